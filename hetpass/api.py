"""What a user writes: `het_parallelize`, and the stages `Traced`, `Planned`, `Compiled`.

step = hp.het_parallelize(train_step, cluster=cluster)
state, metrics = step(state, batch)

traced = step.trace(state, batch)      # shapes are enough
planned = traced.plan()                # no device is touched
compiled = planned.compile()           # XLA executables, one set per mesh group
state, metrics = compiled(state, batch)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hetpass.analysis.explain import explain
from hetpass.analysis.fingerprint import fingerprint
from hetpass.backend.report import FragmentReport, report
from hetpass.companion import Companion, Leader
from hetpass.errors import ExecutionError, PlanError, TraceError
from hetpass.frontend.boundary import stage_boundary
from hetpass.frontend.microbatch import SplitOptions
from hetpass.frontend.trace import Signature, abstract
from hetpass.ir import program as ir
from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Plan
from hetpass.ir.timeline import Timeline
from hetpass.pictures.plot_timelines import plot_timelines
from hetpass.pipeline import Observer, Passes, planned_timeline
from hetpass.runtime.create import create, input_shardings
from hetpass.runtime.local import LocalRuntime, Record
from hetpass.runtime.measure import measure

__all__ = [
    "Compiled",
    "HetParallelized",
    "Options",
    "Planned",
    "Traced",
    "het_parallelize",
    "stage_boundary",
]


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
    """

    batch_axes: Mapping[str, int | None] = field(default_factory=dict)
    batch_statistics: Literal["exact", "per_microbatch"] = "exact"
    routing: Literal["exact", "per_microbatch"] = "exact"
    accumulate_dtype: str | None = None
    devices: Sequence[jax.Device] | None = None
    verify: bool = True
    observer: Observer | None = None

    def __post_init__(self) -> None:
        for name in ("batch_statistics", "routing"):
            value = getattr(self, name)
            if value not in ("exact", "per_microbatch"):
                raise TraceError(
                    "HP-TRACE-OPTION",
                    f"{name} is {value!r}",
                    where=f"Options.{name}",
                    ways_out=['"exact"', '"per_microbatch"'],
                )

    @property
    def split(self) -> SplitOptions:
        per_microbatch = "per_microbatch" in (self.batch_statistics, self.routing)
        return SplitOptions(self.accumulate_dtype, per_microbatch)


@dataclass(frozen=True)
class _Settings:
    """The arguments of `het_parallelize`."""

    cluster: Cluster | None
    num_microbatches: int | Literal["auto"]
    schedule: str
    plan: Plan | str | None
    signature: Signature
    options: Options

    @property
    def passes(self) -> Passes:
        return Passes(self.options.observer, self.options.verify)

    def devices(self) -> Sequence[jax.Device]:
        return self.options.devices if self.options.devices is not None else jax.devices()


# ---------------------------------------------------------------------------------------------
# The stages


@dataclass(frozen=True)
class Traced:
    """A step as one jaxpr, for one set of argument shapes. Prints as text.

    Attributes:
      program: the traced step.
      cluster: that plans are made for.
    """

    program: ir.Traced
    cluster: Cluster
    _settings: _Settings = field(repr=False)

    def plan(
        self,
        *,
        num_microbatches: int | Literal["auto"] | None = None,
        schedule: str | None = None,
    ) -> Planned:
        """Decide who computes what; no device is touched.

        Args:
          num_microbatches, schedule: instead of those given to `het_parallelize`.

        Raises:
          SplitError: the step has no equal in so many microbatches.
          PlanError: nothing fits.
        """
        settings = self._settings
        if settings.plan is not None:
            return self.with_plan(settings.plan)
        count = num_microbatches or settings.num_microbatches
        layered, note = self._layers(count)
        plan = settings.passes.plan(layered, self.cluster, schedule or settings.schedule)
        return self._scheduled(layered, plan, note)

    def with_plan(
        self, plan: Plan | str, *, num_microbatches: int | Literal["auto"] | None = None
    ) -> Planned:
        """Bind a plan made elsewhere: loaded, or written by hand.

        Args:
          plan: a `Plan`, or one line of text: `"fast[4](data=2,model=2): 0-13 | slow: 14-24"`.
          num_microbatches: for a plan in text; a `Plan` has its own.

        Raises:
          PlanError: it is for another program or cluster, or makes no sense.
        """
        settings = self._settings
        count = num_microbatches or settings.num_microbatches
        note = ""
        if isinstance(plan, Plan):
            layered = settings.passes.layers(
                self.program, plan.num_microbatches, settings.options.split
            )
        else:
            layered, note = self._layers(count)
            plan = Plan.parse(
                plan,
                cluster=self.cluster,
                num_layers=layered.num_layers,
                num_microbatches=layered.program.num_microbatches,
                schedule=settings.schedule,
            )
            plan = replace(plan, fingerprint=fingerprint(layered))
        plan.check(self.cluster, layered.num_layers, fingerprint(layered), self.program.batch_size)
        return self._scheduled(layered, plan, note)

    def _scheduled(self, layered: ir.Layered, plan: Plan, note: str) -> Planned:
        choice = self._settings.passes.schedule(layered, plan, self.cluster)
        notes = (note, *choice.notes) if note else choice.notes
        return Planned(self, layered, choice.plan, notes)

    def _layers(self, count: int | Literal["auto"]) -> tuple[ir.Layered, str]:
        settings = self._settings
        if count == "auto":
            return settings.passes.layers_for(self.program, self.cluster, settings.options.split)
        return settings.passes.layers(self.program, count, settings.options.split), ""

    def __str__(self) -> str:
        return str(self.program)


@dataclass(frozen=True)
class Planned:
    """A traced step and the plan for it.

    Attributes:
      traced: the step.
      layered: the step cut into layers, for the plan's number of microbatches.
      plan: the decisions, as data; `planned.plan.save("plan.json")`.
      notes: what the choice of the plan should be known for.
    """

    traced: Traced
    layered: ir.Layered
    plan: Plan
    notes: tuple[str, ...] = ()

    def explain(self) -> str:
        """Who computes what, stage by stage."""
        return explain(self.layered, self.plan, self.notes)

    def timeline(self) -> Timeline:
        """The step as the simulator expects it: what every lane and link does, and when.

        Times come from FLOPs, peak rates and the cluster's links; what runs once per step is not
        in them. `Compiled.timeline` measures the same.
        """
        return planned_timeline(self.layered, self.plan, self.traced.cluster)

    def plot_timeline(self, path: str | Path | None = None) -> Any:
        """A picture of `timeline()`; written to `path` (.png, .svg, .pdf) if given.

        Returns:
          The matplotlib figure.

        Raises:
          ExecutionError: HP-RUN-PLOT, matplotlib is not installed.
        """
        title = f"{self.traced.program.name}, schedule {self.plan.schedule}"
        return plot_timelines({title: self.timeline()}, path)

    def compile(self) -> Compiled:
        """One set of XLA executables per mesh group, and the transfers between them.

        Raises:
          ClusterError: the process has too few devices for the cluster.
          PlanError: shapes do not divide by the plan's meshes.
        """
        settings = self.traced._settings
        devices = self.traced.cluster.bind(settings.devices())
        staged = settings.passes.partition(self.layered, self.plan)
        step = settings.passes.compile(staged, self.plan, devices)
        return Compiled(self, LocalRuntime(step))

    def __str__(self) -> str:
        return self.explain()


@dataclass(frozen=True)
class Compiled:
    """A step that runs: call it as the step itself, for the shapes that it was traced with.

    Attributes:
      planned: the plan that it runs by.
      runtime: that runs it.
    """

    planned: Planned
    runtime: LocalRuntime

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; arrays are returned before they are ready, as from `jax.jit`.

        Raises:
          ExecutionError: the arguments are of another structure, shape or type than traced.
        """
        return self._result(self.runtime(self._leaves(args, kwargs)))

    def timed(self, record: Record, *args: Any, **kwargs: Any) -> Any:
        """One step; waits for it and reports the times of every fragment to `record`."""
        leaves = self._leaves(args, kwargs)
        return self._result(self.runtime(leaves, record))

    def timeline(self, *args: Any, **kwargs: Any) -> tuple[Any, Timeline]:
        """One step, waited for: its result, and what every lane and link did, as measured."""
        leaves = self._leaves(args, kwargs)
        results, timeline = measure(self.runtime, leaves, self.planned.plan.lane_names)
        return self._result(results), timeline

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        program = self.planned.traced.program
        statics = self.planned.traced._settings.signature.static_argnums
        dynamic = tuple(a for i, a in enumerate(args) if i not in statics)
        leaves, tree = jax.tree.flatten((dynamic, dict(kwargs)))
        if tree != program.in_tree:
            raise _other_structure(program, tree)
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
        leaves, tree = jax.tree.flatten(args)

        def flat(*values: Any) -> Any:
            return create_fn(*jax.tree.unflatten(tree, values))

        jaxpr, state = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        program = self.planned.traced.program
        inputs = _arguments(program)
        numbers = [i for i, leaf in enumerate(inputs) if leaf.argnum == 0]
        _check_state(program, [inputs[i] for i in numbers], state)
        # A leaf that the step does not use lives beside the others: with the first stage's.
        elsewhere = NamedSharding(self.runtime.compiled.meshes[0], PartitionSpec())
        wanted = input_shardings(self.runtime.compiled)
        made = create(jaxpr, leaves, [wanted[i] or elsewhere for i in numbers])
        return jax.tree.unflatten(jax.tree.structure(state), made)

    def _leader(self) -> Leader:
        traced = self.planned.traced
        devices = traced.cluster.bind(traced._settings.devices())
        return Leader(self.runtime.compiled, self.planned.plan, devices)

    def report(self) -> tuple[FragmentReport, ...]:
        """Memory, collectives and compile seconds of every fragment, from the compiler."""
        return report(self.runtime.compiled)

    @property
    def staged(self) -> ir.Staged:
        """The fragments, slots and transfers."""
        return self.runtime.compiled.staged

    def __str__(self) -> str:
        return f"{self.planned.explain()}\n{self.staged}"


def _check_state(program: ir.Traced, leaves: Sequence[ir.InputLeaf], state: Any) -> None:
    (first, *_), _ = jax.tree.unflatten(program.in_tree, [v.aval for v in _arguments(program)])
    traced, made = jax.tree.structure(first), jax.tree.structure(state)
    if traced != made:
        raise ExecutionError(
            "HP-RUN-INIT",
            "the function that creates the state returns another structure than was traced",
            details=[f"traced:  {traced}"[:400], f"created: {made}"[:400]],
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


def _other_structure(program: ir.Traced, tree: Any) -> ExecutionError:
    return ExecutionError(
        "HP-RUN-STRUCTURE",
        f"the arguments of {program.name} are of another structure than it was compiled for",
        details=[f"compiled for: {program.in_tree}"[:400], f"called with:  {tree}"[:400]],
        ways_out=[
            "call the decorated function itself: it compiles once for every structure and shape",
            "trace and compile again with these arguments",
        ],
    )


# ---------------------------------------------------------------------------------------------
# The decorator


class HetParallelized:
    """A step that compiles itself at its first call, once per set of shapes, like `jax.jit`."""

    def __init__(self, fun: Callable[..., Any], settings: _Settings) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.__name__ = getattr(fun, "__name__", type(fun).__name__)
        self._fun = fun
        self._settings = settings
        self._compiled: dict[Any, Compiled] = {}
        self._arg_names = _argument_names(fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; compiles first if these shapes are new."""
        return self.compiled_for(*args, **kwargs)(*args, **kwargs)

    def compiled_for(self, *args: Any, **kwargs: Any) -> Compiled:
        """The compiled step for arguments of these structures, shapes and types."""
        key = self._key(args, kwargs)
        found = self._compiled.get(key)
        if found is None:
            found = self.trace(*args, **kwargs).plan().compile()
            self._compiled[key] = found
        return found

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace the step for these arguments; `jax.ShapeDtypeStruct`s will do.

        Raises:
          TraceError: the step cannot be traced, or the batch cannot be told.
        """
        settings = self._settings
        program = settings.passes.trace(
            self._fun, args, kwargs, settings.signature, self._arg_names
        )
        cluster = settings.cluster or Cluster.auto(settings.devices())
        return Traced(program, cluster, settings)

    def init_state(self, create_fn: Callable[..., Any], *args: Any, batch: Any = None) -> Any:
        """Create the state in place, stage by stage, where the step will want it.

        Args:
          create_fn: returns the state, argument 0 of the step.
          args: of `create_fn`.
          batch: an example of the step's second argument (shapes will do), or a tuple of all
            further arguments. Needed unless the step has been compiled.

        Raises:
          ExecutionError: HP-RUN-INIT, there is no batch to place the state by.
        """
        state = jax.eval_shape(create_fn, *args)
        rest = batch if isinstance(batch, tuple) else (batch,)
        if batch is not None:
            return self.compiled_for(state, *rest).init_state(create_fn, *args)
        wanted = _shapes(state)
        for compiled in reversed(self._compiled.values()):
            arguments, _ = jax.tree.unflatten(
                compiled.planned.traced.program.in_tree,
                [leaf.aval for leaf in _arguments(compiled.planned.traced.program)],
            )
            if arguments and _shapes(arguments[0]) == wanted:
                return compiled.init_state(create_fn, *args)
        raise ExecutionError(
            "HP-RUN-INIT",
            "where the state will live depends on the batch, and none is known yet",
            ways_out=[
                "step.init_state(create, *args, batch=batch): an example batch, or its shapes",
                "step.trace(jax.eval_shape(create, *args), batch).plan().compile().init_state(...)",
            ],
        )

    def companion(
        self,
        fun: Callable[..., Any],
        *,
        batch_argnums: tuple[int, ...] = (1,),
        num_microbatches: int = 1,
    ) -> Companion:
        """An eval step beside this train step, on the same placement of the parameters.

        Args:
          fun: takes the train step's state (or a part of it) first; donates nothing.
          batch_argnums: of `fun`.
          num_microbatches: of `fun`.

        Returns:
          A function like `fun`, compiled once per set of shapes.
        """
        settings = self._settings
        signature = replace(
            settings.signature,
            batch_argnums=batch_argnums,
            donate_argnums=(),
            static_argnums=(),
            batch_axes={},
        )

        def leader() -> Leader:
            if not self._compiled:
                raise ExecutionError(
                    "HP-RUN-COMPANION",
                    f"the companion {getattr(fun, '__name__', 'step')} shares the placement of "
                    f"{self.__name__}, which has not been compiled",
                    ways_out=["call the train step, or step.init_state(..., batch=batch), first"],
                )
            return next(reversed(self._compiled.values()))._leader()

        return Companion(fun, settings.passes, signature, num_microbatches, leader)

    def without_donation(self) -> HetParallelized:
        """The same step with the same settings; its arguments are kept."""
        signature = replace(self._settings.signature, donate_argnums=())
        return HetParallelized(self._fun, replace(self._settings, signature=signature))

    def jitted(self) -> Callable[..., Any]:
        """`jax.jit` of the step: what it must equal."""
        return jax.jit(self._fun, static_argnums=self._settings.signature.static_argnums)

    def clear(self) -> None:
        """Forget every compiled step."""
        self._compiled.clear()

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        statics = self._settings.signature.static_argnums
        dynamic = tuple(a for i, a in enumerate(args) if i not in statics)
        leaves, tree = jax.tree.flatten((dynamic, dict(kwargs)))
        return (
            tree,
            tuple(_leaf_key(leaf) for leaf in leaves),
            tuple(_hashable(args[i], i) for i in statics if i < len(args)),
        )

    def __repr__(self) -> str:
        return f"het_parallelize({self.__name__})"


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return (leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False)))
    aval = abstract(leaf)
    return (aval.shape, aval.dtype, aval.weak_type)


def _hashable(value: Any, position: int) -> Any:
    try:
        hash(value)
    except TypeError:
        raise TraceError(
            "HP-TRACE-STATIC",
            f"argument {position} is static but cannot be hashed",
            where=f"args[{position}]: {type(value).__name__}",
            ways_out=["pass a hashable value", "take it out of static_argnums"],
        ) from None
    return value


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _arguments(program: ir.Traced) -> tuple[ir.InputLeaf, ...]:
    return program.inputs[: len(program.inputs) - len(program.constants)]


def _argument_names(fun: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return ()
    names = []
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        names.append(parameter.name)
    return tuple(names)


def het_parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | None = None,
    num_microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    plan: Plan | str | None = None,
    batch_argnums: int | Sequence[int] = (1,),
    donate_argnums: int | Sequence[int] = (0,),
    static_argnums: int | Sequence[int] = (),
    options: Options | None = None,
) -> Any:
    """Run a train step as a pipeline over unlike device groups; equal to `jax.jit(fun)`.

    Use it as `@hp.het_parallelize`, `@hp.het_parallelize(cluster=...)`, or as a function.

    Args:
      fun: the step, written for one device: any JAX function of arrays. It is traced with
        B, 2B and 3B examples, so that it must accept any number of them for M > 1.
      cluster: the device groups and their links; None: what `jax.devices()` shows.
      num_microbatches: M, a divisor of B; "auto": enough to fill the pipeline.
      schedule: a name ("gpipe", "1f1b", "zb-h1", …; docs/schedules.md), or "auto": the fastest
        that a search on the simulator finds within the memory of the groups.
      plan: a `Plan` or its one-line text; None: one is made.
      batch_argnums: the arguments whose arrays have B examples along dimension 0. An argument
        that the call does not have is no batch.
      donate_argnums: the arguments that are given away: their arrays must not be used after the
        call. The first argument, by default; `()` to keep it.
      static_argnums: the arguments that are part of the program (hashable).
      options: what is rarely changed.

    Returns:
      A function with the signature of `fun`, and the methods `trace`, `init_state`, `companion`.

    Raises:
      HetpassError: at the call, before anything runs, if the step cannot be run exactly.
    """
    settings = _Settings(
        cluster=cluster,
        num_microbatches=_checked_count(num_microbatches),
        schedule=schedule,
        plan=plan,
        signature=Signature(
            batch_argnums=_indices(batch_argnums, "batch_argnums"),
            donate_argnums=_indices(donate_argnums, "donate_argnums"),
            static_argnums=_indices(static_argnums, "static_argnums"),
            batch_axes=(options or Options()).batch_axes,
        ),
        options=options or Options(),
    )

    def decorate(function: Callable[..., Any]) -> HetParallelized:
        if not callable(function):
            raise TraceError(
                "HP-TRACE-FUNCTION",
                f"het_parallelize takes a function, not a {type(function).__name__}",
                where="its first argument",
                ways_out=["@hp.het_parallelize over a function of arrays"],
            )
        return HetParallelized(function, settings)

    return decorate if fun is None else decorate(fun)


def _checked_count(count: Any) -> int | Literal["auto"]:
    if count == "auto":
        return "auto"
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PlanError(
            "HP-PLAN-MICROBATCHES",
            f"num_microbatches is {count!r}",
            where="num_microbatches",
            ways_out=["a whole number of at least 1", '"auto"'],
        )
    return count


def _indices(value: int | Sequence[int], name: str) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    if any(not isinstance(v, int) or isinstance(v, bool) or v < 0 for v in values):
        raise TraceError(
            "HP-TRACE-ARGNUMS",
            f"{name} is {value!r}",
            where=name,
            ways_out=["positions of arguments, from 0"],
        )
    return values
