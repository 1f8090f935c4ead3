"""The passes in order: the only module that knows which comes after which.

    trace -> split -> segment -> summarize -> plan -> schedule -> partition -> compile -> run

Between two passes stands one hook: it times the pass, verifies its value, and tells an observer.
No pass reads a clock or checks its own work.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import jax

from hetpass.analysis.fingerprint import fingerprint
from hetpass.analysis.operation_graph import operation_graphs
from hetpass.analysis.region_recipes import region_recipes
from hetpass.analysis.summarize import summarize
from hetpass.backend.compile import CompiledStep, compile
from hetpass.cost.analytic import ASSUMED
from hetpass.cost.calibrate import measured_facts
from hetpass.cost.tables import TableOptions
from hetpass.errors import PlanError, SplitError
from hetpass.frontend.microbatch import SplitOptions, split
from hetpass.frontend.segment import segment
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.cluster import Cluster
from hetpass.ir.device_profile import DeviceProfile
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.program import Layered, SliceInput, Staged, StepProgram, Traced
from hetpass.ir.quantities import counted
from hetpass.ir.schedule import Schedule
from hetpass.ir.timeline import Timeline
from hetpass.ir.verify import verify
from hetpass.planner.baselines import BASELINES, baseline
from hetpass.planner.evaluate import evaluate
from hetpass.planner.explain import explain
from hetpass.planner.intra_op.assigned_plan import with_assignments
from hetpass.planner.intra_op.stage_tables import (
    IntraOpOptions,
    LayerGraphs,
    SolvedTables,
    intra_op_tables,
)
from hetpass.planner.judge import AUTO, FAMILY, least_s
from hetpass.planner.plan_tables import lane_limits_bytes, plan_costs
from hetpass.planner.schedule_choice import (
    OPEN_NAMES,
    ScheduleChoice,
    choose_schedule,
    plan_schedule,
    uncounted,
)
from hetpass.planner.search import (
    Progress,
    SearchOptions,
    SearchResult,
    microbatch_numbers,
    search,
)
from hetpass.schedules.make import schedule_names
from hetpass.simulator import simulate
from hetpass.transforms.beside import stages_beside
from hetpass.transforms.partition import partition, partition_layers

T = TypeVar("T")

DEFAULT_SCHEDULE = "1f1b"
_MICROBATCHES_PER_STAGE = 4
_SHARED_SUBMESHES = ("interleaved", "zb-v")
_NEAR, _NEAR_OF_MANY, _MANY_TASKS = 0.02, 0.05, 2000


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    A pass makes objects by the hundred thousand and drops few: the collector walks them all again
    and again, a quarter of the time on a deep model.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class PassRecord:
    """What the hook tells after a pass.

    Attributes:
      name: of the pass.
      value: what it made; prints as text.
      seconds: that it took.
    """

    name: str
    value: Any
    seconds: float


Observer = Callable[[PassRecord], None]


@dataclass(frozen=True)
class Summarized:
    """A step cut into layers, and what the planner knows of them.

    Attributes:
      notes: what the choice of microbatches should be known for.
    """

    layered: Layered
    facts: ProgramFacts
    notes: tuple[str, ...] = ()


Known = MutableMapping[int, Summarized]
"""One traced step, by number of microbatches."""


@dataclass(frozen=True)
class Wanted:
    """What a plan is made for.

    Attributes:
      num_microbatches: M, or "auto".
      schedule: a name, or "auto".
      split: how the step may be split.
      planner: the name of a baseline; None: our own search.
      sharding: inside a stage, by the names of mesh "axes", or "solved" for every operation.
    """

    num_microbatches: int | Literal["auto"] = "auto"
    schedule: str = AUTO
    split: SplitOptions = field(default_factory=SplitOptions)
    planner: str | None = None
    sharding: Literal["axes", "solved"] = "axes"


@dataclass(frozen=True)
class Decided:
    """A plan for a step, and the search that found it."""

    step: Summarized
    plan: Plan
    search: SearchResult | None

    @property
    def has_backward(self) -> bool:
        """Whether the step computes gradients."""
        return any(self.step.layered.backward)


_DOING: Mapping[str, str] = MappingProxyType(
    {
        "trace": "tracing",
        "split": "splitting into microbatches",
        "segment": "cutting into layers",
        "summarize": "summarizing",
        "graphs": "listing operations",
        "shard": "solving shardings",
        "plan": "searching for a plan",
        "schedule": "searching for a schedule",
        "partition": "partitioning",
        "compile": "compiling",
    }
)
"""Passes as a person reads them while they run."""


@dataclass(frozen=True)
class Passes:
    """Runs passes with the hook between them.

    Attributes:
      observer: is told after every pass.
      verifying: every program-level value is verified (a few percent of the time of tracing).
      profile: measured seconds of layers; None: none.
      progress: told while plans are searched: a number of microbatches, the best step so far in
        seconds.
      status: told in words what is being done, before every pass and within the longest.
    """

    observer: Observer | None = None
    verifying: bool = True
    profile: DeviceProfile | None = None
    progress: Progress | None = None
    status: Callable[[str], None] | None = None

    def trace(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        signature: Signature,
        arg_names: Sequence[str],
    ) -> Traced:
        return self._run("trace", lambda: trace(fun, args, kwargs, signature, arg_names=arg_names))

    def layers(self, traced: Traced, num_microbatches: int, options: SplitOptions) -> Layered:
        """split, then segment."""
        program: StepProgram = self._run("split", lambda: split(traced, num_microbatches, options))
        return self._run("segment", lambda: segment(program))

    def summarized(
        self, traced: Traced, num_microbatches: int, options: SplitOptions
    ) -> Summarized:
        """split, segment, summarize."""
        return self._with_facts(self.layers(traced, num_microbatches, options))

    def _with_facts(self, layered: Layered) -> Summarized:
        region = layered.program.region
        remade = region_recipes(region.eqns, region.invars)
        facts = self._run("summarize", lambda: summarize(layered, remade))
        if self.profile is not None:
            facts = measured_facts(facts, self.profile)
        return Summarized(layered, facts)

    def summarized_for(
        self, traced: Traced, cluster: Cluster, wanted: Wanted, known: Known
    ) -> Summarized:
        """The layers for the number of microbatches that is asked for.

        If none is asked for, for one that is known, or of our choice: a plan may still have another
        one.
        """
        if isinstance(wanted.num_microbatches, int):
            return self._known(traced, wanted.num_microbatches, wanted, known)
        if known:
            return next(iter(known.values()))
        count = choose_microbatches(traced, cluster)
        try:
            return self._known(traced, count, wanted, known)
        except SplitError as refusal:
            if count == 1:
                raise
            note = f"one microbatch: {count} were tried, and refused: {refusal.what}"
            known[1] = replace(self._known(traced, 1, wanted, known), notes=(note,))
            return known[1]

    def _known(self, traced: Traced, count: int, wanted: Wanted, known: Known) -> Summarized:
        """The step cut for so many microbatches; equal layers have equal facts."""
        if count not in known:
            layered = self.layers(traced, count, wanted.split)
            name = fingerprint(layered)
            facts = [s.facts for s in known.values() if s.facts.fingerprint == name]
            known[count] = Summarized(layered, facts[0]) if facts else self._with_facts(layered)
        return known[count]

    def plan(self, traced: Traced, cluster: Cluster, wanted: Wanted, known: Known) -> Decided:
        """The planner's own plan, or that of the baseline that is asked for.

        The number of microbatches is searched on facts from one of them. If the program cut into
        the best number has other layers after all, it is planned again with that number; numbers
        that the frontend refuses are left out.

        Args:
          known: layers by number of microbatches, made before; new ones are added.

        Raises:
          SplitError, PlanError: nothing can be run, or nothing fits.
        """
        first = self.summarized_for(traced, cluster, wanted, known)
        numbers = _numbers(first, wanted)
        while True:
            found, result = self._search(first, cluster, wanted, numbers)
            count = found.num_microbatches
            try:
                chosen = self._known(traced, count, wanted, known)
            except SplitError:
                numbers = tuple(m for m in numbers if m != count)
                continue
            solved = wanted.sharding == "solved"
            if solved and wanted.planner is None:
                found, result = self._solved(chosen, cluster, wanted, count)
            elif chosen.facts.fingerprint != first.facts.fingerprint:
                found, result = self._search(chosen, cluster, wanted, (count,))
            if solved and wanted.planner is not None:
                found = self.assigned(chosen, found, cluster)
            plan = replace(found, fingerprint=chosen.facts.fingerprint)
            return Decided(replace(chosen, notes=first.notes), plan, result)

    def _search(
        self, step: Summarized, cluster: Cluster, wanted: Wanted, numbers: tuple[int, ...]
    ) -> tuple[Plan, SearchResult | None]:
        options = search_options(wanted, numbers)
        if wanted.planner is not None:
            name = wanted.planner
            other = self._run("plan", lambda: baseline(name, step.facts, cluster, options))
            if other.evaluation is None:
                raise _baseline_fits_nothing(name)
            return replace(other.evaluation.plan, schedule=wanted.schedule), None
        result = self._run(
            "plan", lambda: search(step.facts, cluster, options, progress=self.progress)
        )
        return _open(result.plan, wanted, step.layered), result

    def _solved(
        self, step: Summarized, cluster: Cluster, wanted: Wanted, count: int
    ) -> tuple[Plan, SearchResult]:
        """Stages by the costs of solved shardings, and the shardings that they came from."""
        solved = self._solved_tables(step, cluster, count)
        wish = search_options(wanted, (count,))
        result = self._run(
            "plan",
            lambda: search(step.facts, cluster, wish, lambda _: solved.costs, self.progress),
        )
        rejected = (
            replace(c, plan=with_assignments(c.plan, solved, c.tables)) for c in result.rejected
        )
        result = replace(result, rejected=tuple(rejected))
        found = _open(result.plan, wanted, step.layered)
        return with_assignments(found, solved, result.best.tables), result

    def _solved_tables(
        self,
        step: Summarized,
        cluster: Cluster,
        count: int,
        sizes: tuple[int, ...] | None = None,
    ) -> SolvedTables:
        """Of submeshes of these numbers of devices; None: of all that a search may want."""
        graphs = self._run("graphs", lambda: operation_graphs(step.layered))
        layers = LayerGraphs(graphs, step.layered.layer_kinds)
        options = IntraOpOptions(assumed=ASSUMED, sizes=sizes)
        return self._run(
            "shard",
            lambda: intra_op_tables(layers, step.facts, cluster, count, options, self._sharded),
        )

    def assigned(self, step: Summarized, plan: Plan, cluster: Cluster) -> Plan:
        """The plan's stages, with solved shardings for every operation."""
        sizes = {len(r.devices) for p in plan.pipelines for s in p.stages for r in s.replicas}
        count = plan.num_microbatches
        tables = self._solved_tables(step, cluster, count, tuple(sorted(sizes)))
        return with_assignments(plan, tables)

    def _sharded(self, done: int, of: int) -> None:
        self._tell(f"solving shardings: {done} of {counted(of, 'mesh')} done")

    def _tell(self, text: str) -> None:
        if self.status is not None:
            self.status(text)

    def schedule(self, step: Summarized, plan: Plan, cluster: Cluster) -> ScheduleChoice:
        """Decides what the plan leaves open about its schedule; the plan then says it."""
        return self._run(
            "schedule",
            lambda: choose_schedule(
                plan,
                plan_costs(plan, step.facts, cluster, ASSUMED),
                has_backward=any(step.layered.backward),
                limits_bytes=lane_limits_bytes(plan, cluster, ASSUMED),
            ),
        )

    def rescheduled(self, step: Summarized, plan: Plan, cluster: Cluster) -> ScheduleChoice:
        """A searched plan with the fastest schedule: its own, or one that a search finds.

        Nothing is searched where no schedule could be faster by more than two percent, or by more
        than five of thousands of tasks.
        """
        costs = plan_costs(plan, step.facts, cluster, ASSUMED)
        own_s = plan.predictions["step_s"]
        tasks = 2 * plan.num_stages * plan.num_microbatches
        near = _NEAR if tasks <= _MANY_TASKS else _NEAR_OF_MANY
        if own_s <= least_s(costs, plan.num_microbatches) * (1 + near):
            return ScheduleChoice(plan)
        choice = self.schedule(step, replace(uncounted(plan), schedule=AUTO), cluster)
        return choice if choice.plan.predictions["step_s"] < own_s else ScheduleChoice(plan)

    def partition(self, layered: Layered, plan: Plan) -> Staged:
        return self._run("partition", lambda: partition(layered, plan))

    def compile(
        self, staged: Staged, plan: Plan, devices: Mapping[str, Sequence[jax.Device]]
    ) -> CompiledStep:
        schedule = step_schedule(staged, plan)
        return self._run(
            "compile",
            lambda: compile(staged, plan, devices, schedule, clock=time.perf_counter),
        )

    def compile_beside(
        self,
        layered: Layered,
        leader: CompiledStep,
        plan: Plan,
        devices: Mapping[str, Sequence[jax.Device]],
        arguments: Sequence[Any],
    ) -> CompiledStep:
        """Another step on the meshes of `leader`, near the arrays that live there already.

        Args:
          plan, devices: that `leader` was compiled with.
          arguments: the flat arguments it will be called with; those that lie on a stage of
            `leader` stay there.
        """
        stage_of = {frozenset(mesh.devices.flat): stage for stage, mesh in enumerate(leader.meshes)}
        homes = {}
        for number, value in enumerate(arguments):
            if isinstance(value, jax.Array):
                stage = stage_of.get(frozenset(value.sharding.device_set))
                if stage is not None:
                    homes[number] = stage
        staged, own_plan = self.partition_beside(layered, homes, plan)
        return self.compile(staged, own_plan, devices)

    def partition_beside(
        self, layered: Layered, homes: Mapping[int, int], plan: Plan
    ) -> tuple[Staged, Plan]:
        """A step cut for the stages of another step's plan, and that plan with its schedule.

        Args:
          homes: flat input -> stage, for inputs that already live somewhere.
          plan: of the other step.
        """
        count = len(plan.pipelines[0].stages)
        stages = stages_beside(layered, homes, count)
        staged = self._run("partition", lambda: partition_layers(layered, stages, count, homes))
        shared = len(set(plan.lane_of)) < len(plan.lane_of)
        schedule = "auto" if shared else DEFAULT_SCHEDULE
        pipelines = tuple(  # assignments are of the other step's operations
            replace(p, stages=tuple(replace(s, assignments=(), price=None) for s in p.stages))
            for p in plan.pipelines
        )
        return staged, replace(plan, pipelines=pipelines, schedule=schedule, tasks=())

    def _run(self, name: str, function: Callable[[], T]) -> T:
        self._tell(_DOING.get(name, name))
        began = time.perf_counter()
        with _collector_paused():
            value = function()
        seconds = time.perf_counter() - began
        if self.verifying and isinstance(value, (Traced, StepProgram, Layered, Staged)):
            verify(value)
        if self.observer is not None:
            self.observer(PassRecord(name, value, seconds))
        return value


def step_schedule(staged: Staged, plan: Plan) -> Schedule:
    """The schedule that a decided plan says, for a step cut by it or for its stages."""
    return plan_schedule(
        plan,
        has_backward=any(f.role in ("backward", "weight") for f in staged.fragments),
        num_microbatches=staged.num_microbatches,
    )


def planned_timeline(step: Summarized, plan: Plan, cluster: Cluster) -> Timeline:
    """One step by the plan's schedule, as the simulator plays it."""
    schedule = plan_schedule(plan, has_backward=any(step.layered.backward))
    timeline = simulate(schedule, plan_costs(plan, step.facts, cluster, ASSUMED))
    return timeline.renamed(dict(zip(timeline.lanes, plan.lane_names, strict=True)))


def explained(decided: Decided, cluster: Cluster, wanted: Wanted, *, baselines: bool) -> str:
    """Why the plan is as it is: stages, memory, what was rejected, the gain over baselines."""
    facts, plan = decided.step.facts, decided.plan
    evaluation = evaluate(plan, facts, cluster, ASSUMED)
    options = search_options(wanted, _numbers(decided.step, wanted))
    others = [baseline(name, facts, cluster, options) for name in BASELINES] if baselines else []
    return explain(evaluation, facts, cluster, decided.search, others, ASSUMED)


def search_options(wanted: Wanted, numbers: tuple[int, ...]) -> SearchOptions:
    """What is searched for a wish. Schedules that share submeshes are put on a plan afterwards."""
    searched = wanted.schedule in schedule_names() and wanted.schedule not in _SHARED_SUBMESHES
    return SearchOptions(
        num_microbatches=numbers,
        schedule=wanted.schedule if searched else AUTO,
        tables=TableOptions(assumed=ASSUMED),
    )


def _open(plan: Plan, wanted: Wanted, layered: Layered) -> Plan:
    """The plan with the schedule that is asked for; counts stand where they say all of it."""
    if wanted.schedule in (*FAMILY, *OPEN_NAMES) and any(layered.backward):
        return plan
    return replace(uncounted(plan), schedule=wanted.schedule)


def _numbers(step: Summarized, wanted: Wanted) -> tuple[int, ...]:
    """The numbers of microbatches that may be planned with."""
    program = step.layered.program
    if isinstance(wanted.num_microbatches, int):
        return (wanted.num_microbatches,)
    if not any(isinstance(source, SliceInput) for source in program.region_inputs):
        return (1,)
    return microbatch_numbers(step.facts.batch_size, None)


def _baseline_fits_nothing(name: str) -> PlanError:
    return PlanError(
        "HP-PLAN-MEMORY",
        f"{name!r} finds no plan that could run on the cluster",
        details=[
            "its plans need more memory than there is, or cut a microbatch into shares that do "
            "not come out whole"
        ],
        ways_out=["leave the plan to the search", "another number of microbatches"],
    )


def choose_microbatches(traced: Traced, cluster: Cluster) -> int:
    """Enough microbatches to fill the pipeline, each with an example for every device of a group.

    The largest divisor M of B with M <= 4 stages whose B / M still feeds the widest group; if
    none does, the largest divisor within 4 stages. 1 for a single group or a step without probes.
    """
    size = traced.batch_size
    stages = len(cluster.groups)
    if size is None or not traced.probes or stages == 1:
        return 1
    widest = max(group.num_devices for group in cluster.groups)
    legal = [m for m in range(1, min(size, _MICROBATCHES_PER_STAGE * stages) + 1) if size % m == 0]
    wide = [m for m in legal if size // m >= widest]
    return max(wide or legal)
