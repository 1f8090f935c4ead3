"""The stages of a step, as `jax.jit` has them, and their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax

from hetpass.analysis.explain import explain
from hetpass.backend.dryrun import DryRun, dryrun
from hetpass.backend.report import FragmentReport
from hetpass.checks import (
    checked_batch_axes,
    checked_cluster,
    checked_count,
    checked_devices,
    checked_float_type,
    checked_hook,
    checked_type,
    created_state,
    refuse_tracers,
)
from hetpass.companion import LocalLeader
from hetpass.errors import ExecutionError, PlanError, TraceError
from hetpass.frontend.microbatch import SplitOptions
from hetpass.frontend.trace import Signature
from hetpass.ir import program as ir
from hetpass.ir.cluster import Cluster
from hetpass.ir.device_profile import DeviceProfile
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import counted, span_text, spelled
from hetpass.ir.timeline import Timeline
from hetpass.pictures.html_table import html_table
from hetpass.pictures.plot_memory import plot_memory
from hetpass.pictures.plot_sharding import plot_sharding
from hetpass.pictures.plot_timelines import plot_timelines
from hetpass.pipeline import (
    ASSUMED,
    Decided,
    Known,
    Observer,
    Passes,
    Summarized,
    Wanted,
    explained,
    planned_timeline,
    step_schedule,
)
from hetpass.planner.baselines import BASELINES
from hetpass.planner.evaluate import Evaluation, evaluate
from hetpass.planner.schedule_choice import OPEN_NAMES
from hetpass.planner.search import Progress, SearchResult
from hetpass.remote_step import Call, RemoteLeader, compile_remote
from hetpass.runtime.distributed.driver import DistributedRuntime
from hetpass.runtime.distributed.workers import Workers
from hetpass.runtime.local import LocalRuntime, Record
from hetpass.tree_difference import call_difference, tree_difference

_CHOICES = {
    "batch_statistics": ("exact", "per_microbatch"),
    "routing": ("exact", "per_microbatch"),
    "sharding": ("axes", "solved"),
}


@dataclass(frozen=True)
class Options:
    """What is rarely changed.

    Attributes:
      batch_axes: where the examples lie, by argument path, if not along dimension 0 of every
        array of the batch argument: `{"batch['rng']": None, "state.cache": 0}`.
      batch_statistics: "exact", or "per_microbatch": what mixes examples (batch norm, a
        contrastive loss) sees one microbatch at a time. The step then equals the mean of
        `jax.jit(step)` over the microbatches, no longer `jax.jit(step)` of the batch.
      routing: the same choice for experts with a capacity per call, and their balance losses.
      accumulate_dtype: of gradient accumulators, at least; None: float32.
      devices: the JAX devices that groups take theirs from; None: `jax.devices()`.
      verify: check every program between passes.
      observer: called with a `hetpass.pipeline.PassRecord` after every pass.
      profile: what was measured of the step's layers (`hetpass profile`); it goes before what
        FLOPs and peak rates say.
      progress: called while plans are searched, with a number of microbatches that is done and the
        best step so far in seconds.
      status: called with a few words before every pass, and while shardings are solved: what is
        being done, "solving shardings: 3 of 8 meshes done".
      sharding: inside a stage. "axes": examples along the mesh axis `data`, parameters along
        `model`, the rest by the compiler. "solved": every operation of every layer by an integer
        program with the group's own costs, and pinned; takes seconds to minutes of planning.
    """

    batch_axes: Mapping[str, int | None] = field(default_factory=dict)
    batch_statistics: Literal["exact", "per_microbatch"] = "exact"
    routing: Literal["exact", "per_microbatch"] = "exact"
    accumulate_dtype: str | None = None
    devices: Sequence[jax.Device] | None = None
    verify: bool = True
    observer: Observer | None = None
    profile: DeviceProfile | None = None
    progress: Progress | None = None
    status: Callable[[str], None] | None = None
    sharding: Literal["axes", "solved"] = "axes"

    def __post_init__(self) -> None:
        for name, legal in _CHOICES.items():
            value = getattr(self, name)
            if value not in legal:
                raise TraceError(
                    "HP-TRACE-OPTION",
                    f"{name} is {value!r}",
                    where=f"Options.{name}",
                    ways_out=[f'"{choice}"' for choice in legal],
                )
        checked_batch_axes(self.batch_axes)
        checked_devices(self.devices)
        for name in ("observer", "progress", "status"):
            checked_hook(getattr(self, name), name)
        checked_type(self.profile, DeviceProfile, "profile", 'DeviceProfile.load("profile.json")')
        accumulate = checked_float_type(self.accumulate_dtype)
        object.__setattr__(self, "accumulate_dtype", accumulate)

    @property
    def split(self) -> SplitOptions:
        per_microbatch = "per_microbatch" in (self.batch_statistics, self.routing)
        return SplitOptions(self.accumulate_dtype, per_microbatch)


@dataclass(frozen=True)
class Settings:
    """The arguments of `het_parallelize`; `workers`: None for the local runtime."""

    cluster: Cluster | None
    num_microbatches: int | Literal["auto"]
    schedule: str
    plan: Plan | str | None
    signature: Signature
    options: Options
    workers: Workers | None = None

    @property
    def passes(self) -> Passes:
        return Passes(
            self.options.observer,
            self.options.verify,
            self.options.profile,
            self.options.progress,
            self.options.status,
        )

    def devices(self) -> Sequence[jax.Device]:
        return self.options.devices if self.options.devices is not None else jax.devices()


# ---------------------------------------------------------------------------------------------
# The stages


@dataclass(frozen=True, repr=False)
class Traced:
    """A step as one jaxpr, for one set of argument shapes. Prints as text.

    Attributes:
      program: the traced step. call: what it was traced from.
      cluster: that plans are made for.
    """

    program: ir.Traced
    call: Call = field(repr=False)
    cluster: Cluster
    settings: Settings = field(repr=False)
    _known: Known = field(default_factory=dict, repr=False, compare=False)

    def on(self, cluster: Cluster) -> Traced:
        """The same step for another cluster; what is known of the step is not worked out again."""
        return replace(self, cluster=checked_cluster(cluster))

    @property
    def facts(self) -> ProgramFacts:
        """All that the planner knows of the step, as numbers: `facts.save("facts.json")`."""
        passes = self.settings.passes
        return passes.summarized_for(self.program, self.cluster, self.wanted, self._known).facts

    def plan(
        self,
        *,
        num_microbatches: int | Literal["auto"] | None = None,
        schedule: str | None = None,
        dryrun: bool = False,
    ) -> Planned:
        """Decide who computes what; no device is touched.

        Args:
          num_microbatches, schedule: instead of those given to `het_parallelize`.
          dryrun: compile the plans that were found, best first, and take the first that fits its
            devices by the compiler's word (see `Planned.dryrun`).

        Raises:
          SplitError: the step has no equal in so many microbatches.
          PlanError: nothing fits.
          ClusterError: HP-TARGET-…, with `dryrun`.
        """
        if dryrun:
            return self._fitting(self.plan(num_microbatches=num_microbatches, schedule=schedule))
        settings = self.settings
        if settings.plan is not None and settings.plan not in BASELINES:
            return self.with_plan(settings.plan)
        wanted = self._wanted(num_microbatches, schedule)
        found = settings.passes.plan(self.program, self.cluster, wanted, self._known)
        if found.search is None or wanted.schedule not in OPEN_NAMES or not found.has_backward:
            return self._scheduled(found.step, found.plan, found.search)
        if any(stage.assignments for stage in found.plan.pipelines[0].stages):
            return Planned(self, found.step, found.plan, found.step.notes, found.search)
        choice = settings.passes.rescheduled(found.step, found.plan, self.cluster)
        notes = (*found.step.notes, *choice.notes)
        return Planned(self, found.step, choice.plan, notes, found.search)

    def _fitting(self, first: Planned) -> Planned:
        """The first plan that fits by the compiler's word: that one, or one that was rejected."""
        rejected = first.search.rejected if first.search is not None else ()
        said = []
        for planned in (first, *(self.with_plan(other.plan) for other in rejected)):
            found = planned.dryrun()
            if found.fits:
                return planned
            full = max(found.stages, key=lambda stage: stage.peak_bytes / stage.limit_bytes)
            said.append(
                f"{planned!r}: {spelled(full.peak_bytes, 'bytes', 4)} of "
                f"{spelled(full.limit_bytes, 'bytes', 4)} on {full.kind} of {full.group}"
            )
        raise PlanError(
            "HP-PLAN-MEMORY",
            "by the compiler's word no plan that was found fits its devices",
            details=said,
            ways_out=["recompute activations", "use smaller microbatches", "add devices"],
        )

    def with_plan(
        self, plan: Plan | str, *, num_microbatches: int | Literal["auto"] | None = None
    ) -> Planned:
        """Bind a plan made elsewhere: loaded, or written by hand.

        Args:
          plan: a `Plan`, or one line of text: `"fast[4](data=2,model=2): 0-13 | slow: 14-24"`.
            With `Options(sharding="solved")` shardings are solved for the stages of a text; a
            `Plan` keeps those that it has.
          num_microbatches: for a plan in text; a `Plan` has its own.

        Raises:
          PlanError: it is for another program or cluster, or makes no sense.
        """
        settings = self.settings
        count = plan.num_microbatches if isinstance(plan, Plan) else num_microbatches
        wanted = self._wanted(count, None)
        found = settings.passes.summarized_for(self.program, self.cluster, wanted, self._known)
        if not isinstance(plan, Plan):
            plan = Plan.parse(
                plan,
                cluster=self.cluster,
                num_layers=found.layered.num_layers,
                num_microbatches=found.layered.program.num_microbatches,
                schedule=settings.schedule,
            )
            plan = replace(plan, fingerprint=found.facts.fingerprint)
            if wanted.sharding == "solved":
                plan = settings.passes.assigned(found, plan, self.cluster)
                found = replace(found, notes=(*found.notes, *_unsolved(plan)))
        plan.check(
            self.cluster,
            found.layered.num_layers,
            found.facts.fingerprint,
            self.program.batch_size,
        )
        return self._scheduled(found, plan, None)

    def _scheduled(self, step: Summarized, plan: Plan, search: SearchResult | None) -> Planned:
        choice = self.settings.passes.schedule(step, plan, self.cluster)
        return Planned(self, step, choice.plan, (*step.notes, *choice.notes), search)

    @property
    def wanted(self) -> Wanted:
        """What plans are made for if nothing else is said."""
        return self._wanted(None, None)

    def _wanted(
        self, num_microbatches: int | Literal["auto"] | None, schedule: str | None
    ) -> Wanted:
        settings, plan = self.settings, self.settings.plan
        count = settings.num_microbatches if num_microbatches is None else num_microbatches
        return Wanted(
            checked_count(count),
            schedule or settings.schedule,
            settings.options.split,
            plan if isinstance(plan, str) and plan in BASELINES else None,
            settings.options.sharding,
        )

    def __str__(self) -> str:
        return str(self.program)

    def __repr__(self) -> str:
        equations, size = len(self.program.jaxpr.eqns), self.program.batch_size
        batch = "no batch" if size is None else f"batch {size}"
        return f"<Traced {self.program.name}: {counted(equations, 'equation')}, {batch}>"


def _unsolved(plan: Plan) -> list[str]:
    """What is to be told of stages whose meshes no shardings were solved for."""
    return [
        f"stage {number}: shardings are not solved for a mesh of "
        + ",".join(f"{axis}={size}" for axis, size in stage.replicas[0].mesh)
        + "; it is sharded by the names of its axes"
        for pipeline in plan.pipelines
        for number, stage in enumerate(pipeline.stages)
        if not stage.assignments
    ]


@dataclass(frozen=True, repr=False)
class Planned:
    """A traced step and the plan for it.

    Attributes:
      traced: the step.
      step: cut into layers for the plan's number of microbatches, with what is known of them.
      plan: the decisions, as data; `planned.plan.save("plan.json")`.
      notes: what the choice of the plan should be known for.
      search: that found the plan; None: it came from elsewhere.
    """

    traced: Traced
    step: Summarized = field(repr=False)
    plan: Plan
    notes: tuple[str, ...] = ()
    search: SearchResult | None = field(default=None, repr=False)

    @property
    def layered(self) -> ir.Layered:
        """The step cut into layers."""
        return self.step.layered

    @property
    def facts(self) -> ProgramFacts:
        """What the planner knows of the step."""
        return self.step.facts

    @property
    def num_layers(self) -> int:
        """L: a plan by hand gives layers 0 to L - 1 to its stages."""
        return self.layered.num_layers

    def explain(self, *, baselines: bool = True) -> str:
        """Who computes what, how long and with which memory; what was rejected, and why.

        Args:
          baselines: plan by other ways too, and say the gain over each. Takes as long as some
            more searches.
        """
        text = explain(self.layered, self.plan, self.notes)
        decided = Decided(self.step, self.plan, self.search)
        wanted = self.traced.wanted
        return f"{text}\n{explained(decided, self.traced.cluster, wanted, baselines=baselines)}"

    def timeline(self) -> Timeline:
        """The step as the simulator expects it: what every lane and link does, and when.

        Times come from FLOPs, peak rates and the cluster's links; what runs once per step is not
        in them. `Compiled.timeline` measures the same.
        """
        return planned_timeline(self.step, self.plan, self.traced.cluster)

    def plot_timeline(self, path: str | Path | None = None) -> Any:
        """A picture of `timeline()`; written to `path` (.png, .svg, .pdf) if given.

        Returns:
          The matplotlib figure.

        Raises:
          ExecutionError: HP-RUN-PLOT, matplotlib is not installed.
        """
        return plot_timelines({self._title: self.timeline()}, path)

    def plot_memory(self, path: str | Path | None = None) -> Any:
        """A picture of what each stage holds on a device, against what it may use.

        Otherwise as `plot_timeline`.
        """
        return plot_memory(self._evaluation().stages, path, title=self._title)

    def plot_sharding(self, path: str | Path | None = None) -> Any:
        """A picture of the cluster: which device computes which layers, and its place on the mesh.

        Otherwise as `plot_timeline`.
        """
        return plot_sharding(self.plan, self.traced.cluster, path)

    @property
    def _title(self) -> str:
        return f"{self.traced.program.name}, schedule {self.plan.schedule}"

    def _evaluation(self) -> Evaluation:
        return evaluate(self.plan, self.facts, self.traced.cluster, ASSUMED)

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = [
            (
                str(number),
                span_text(stage.first_layer, stage.last_layer),
                ", ".join(f"{r.group}[{len(r.devices)}]" for r in stage.replicas),
                ", ".join(f"{name}={size}" for name, size in stage.replicas[0].mesh),
            )
            for pipeline in self.plan.pipelines
            for number, stage in enumerate(pipeline.stages)
        ]
        head = ("stage", "layers", "devices", "mesh")
        return html_table(self._title, head, rows, self.explain())

    def compile(self) -> Compiled:
        """One set of XLA executables per mesh group, and the transfers between them.

        Raises:
          ClusterError: the process has too few devices for the cluster.
          PlanError: shapes do not divide by the plan's meshes.
        """
        settings, cluster = self.traced.settings, self.traced.cluster
        staged = settings.passes.partition(self.layered, self.plan)
        if settings.workers is not None:
            talk = settings.workers.talk(cluster)
            call, split = self.traced.call, settings.options.split
            return Compiled(self, compile_remote(talk, call, split, staged, self.plan, cluster))
        devices = cluster.bind(settings.devices())
        step = settings.passes.compile(staged, self.plan, devices)
        return Compiled(self, LocalRuntime(step))

    def dryrun(self) -> DryRun:
        """Every fragment compiled for its devices' kind, none of which need be here.

        Says what the compiler makes of memory and collectives; takes as long as compiling.

        Raises:
          ClusterError: HP-TARGET-…: a kind cannot be compiled for, or what does it is not
            installed (`pip install "hetpass[dryrun-cuda12]"`, `"hetpass[dryrun-tpu]"`).
          PlanError: shapes do not divide by the plan's meshes.
        """
        staged = self.traced.settings.passes.partition(self.layered, self.plan)
        held = step_schedule(staged, self.plan).held()
        return dryrun(staged, self.plan, self.traced.cluster, held)

    def __str__(self) -> str:
        return self.explain(baselines=False)

    def __repr__(self) -> str:
        plan = self.plan
        return (
            f"<Planned {self.traced.program.name}: {counted(plan.num_layers, 'layer')} on "
            f"{counted(plan.num_stages, 'stage')}, "
            f"{counted(plan.num_microbatches, 'microbatch')}, schedule {plan.schedule}>"
        )


@dataclass(frozen=True, repr=False, eq=False)
class Compiled:
    """A step that runs: call it as the step itself, for the shapes that it was traced with.

    Attributes:
      planned: the plan that it runs by.
      runtime: that runs it.
    """

    planned: Planned
    runtime: LocalRuntime | DistributedRuntime

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; arrays are returned before they are ready, as from `jax.jit`.

        Raises:
          ExecutionError: the arguments are of another structure, shape or type than traced.
        """
        refuse_tracers(self.planned.traced.program.name, (args, kwargs))
        return self._result(self.runtime(self._leaves(args, kwargs)))

    def timed(self, record: Record, *args: Any, **kwargs: Any) -> Any:
        """One step; waits for it and reports the times of every fragment to `record`."""
        leaves = self._leaves(args, kwargs)
        return self._result(self.runtime(leaves, record))

    def timeline(self, *args: Any, **kwargs: Any) -> tuple[Any, Timeline]:
        """One step, waited for: its result, and what every lane and link did, as measured."""
        leaves = self._leaves(args, kwargs)
        results, timeline = self.runtime.measured(leaves, self.planned.plan.lane_names)
        return self._result(results), timeline

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        program = self.planned.traced.program
        statics = self.planned.traced.settings.signature.static_argnums
        dynamic = tuple(a for i, a in enumerate(args) if i not in statics)
        leaves, tree = jax.tree.flatten((dynamic, dict(kwargs)))
        if tree != program.in_tree:
            raise _other_structure(self.planned.traced, tree)
        return leaves

    def _result(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.planned.traced.program.out_tree, leaves)

    def init_state(self, create_fn: Callable[..., Any], *args: Any) -> Any:
        """Create the state (argument 0 of the step) in place, stage by stage.

        No device and no host ever holds more than its own part.

        Args:
          create_fn: returns a state like the step's first argument.
          args: of `create_fn`; small (a random key).

        Raises:
          ExecutionError: `create_fn` returns another structure, shape or type than traced.
        """
        state = created_state(create_fn, args)
        program = self.planned.traced.program
        inputs = argument_leaves(program)
        numbers = [i for i, leaf in enumerate(inputs) if leaf.argnum == 0]
        _check_state(program, [inputs[i] for i in numbers], state)
        made = self.runtime.create(create_fn, args, numbers)
        return jax.tree.unflatten(jax.tree.structure(state), made)

    def leader(self) -> LocalLeader | RemoteLeader:
        """For a companion: this step's plan and placement."""
        traced = self.planned.traced
        if isinstance(self.runtime, DistributedRuntime):
            return RemoteLeader(self.runtime, self.planned.plan)
        devices = traced.cluster.bind(traced.settings.devices())
        return LocalLeader(self.runtime.compiled, self.planned.plan, devices)

    def report(self) -> tuple[FragmentReport, ...]:
        """Memory, collectives and compile seconds of every fragment, from the compiler."""
        return self.runtime.reports()

    @property
    def staged(self) -> ir.Staged:
        """The fragments, slots and transfers."""
        return self.runtime.staged

    def __str__(self) -> str:
        return f"{self.planned}\n{self.staged}"

    def __repr__(self) -> str:
        return repr(self.planned).replace("<Planned", "<Compiled", 1)


def _check_state(program: ir.Traced, leaves: Sequence[ir.InputLeaf], state: Any) -> None:
    (first, *_), _ = jax.tree.unflatten(program.in_tree, [v.aval for v in argument_leaves(program)])
    traced, made = jax.tree.structure(first), jax.tree.structure(state)
    if traced != made:
        raise ExecutionError(
            "HP-RUN-INIT",
            "the function that creates the state returns another structure than was traced",
            details=tree_difference(traced, made, ("traced", "created")),
            ways_out=["return what the step takes as its first argument"],
        )
    for leaf, shape in zip(leaves, jax.tree.leaves(state), strict=True):
        if (leaf.aval.shape, leaf.aval.dtype) != (shape.shape, shape.dtype):
            raise ExecutionError(
                "HP-RUN-INIT",
                "the function that creates the state returns a leaf of another shape or type",
                where=leaf.path,
                details=[
                    f"traced:  {leaf.aval.str_short()}",
                    f"created: {shape.dtype}{list(shape.shape)}",
                ],
                ways_out=["trace the step with the shapes of the state that is created"],
            )


def _other_structure(traced: Traced, tree: Any) -> ExecutionError:
    program, statics = traced.program, traced.settings.signature.static_argnums
    names = [name for i, name in enumerate(traced.call.names) if i not in statics]
    return ExecutionError(
        "HP-RUN-STRUCTURE",
        f"the arguments of {program.name} are of another structure than it was compiled for",
        details=call_difference(program.in_tree, tree, ("compiled for", "called with"), names),
        ways_out=[
            "call the decorated function itself: it compiles once for every structure and shape",
            "trace and compile again with these arguments",
        ],
    )


def argument_leaves(program: ir.Traced) -> tuple[ir.InputLeaf, ...]:
    return program.inputs[: len(program.inputs) - len(program.constants)]
