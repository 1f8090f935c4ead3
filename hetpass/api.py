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
from dataclasses import replace
from typing import Any, Literal

import jax

from hetpass.checks import (
    checked_call,
    checked_cluster,
    checked_count,
    checked_function,
    checked_positions,
    checked_type,
    created_state,
    refuse_tracers,
)
from hetpass.companion import Companion, LocalLeader
from hetpass.errors import ExecutionError, TraceError
from hetpass.frontend.boundary import stage_boundary
from hetpass.frontend.trace import Signature, abstract
from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Plan
from hetpass.remote_step import RemoteLeader, call_of
from hetpass.runtime.distributed.workers import Workers
from hetpass.stages import Compiled, Options, Planned, Settings, Traced, argument_leaves

__all__ = [
    "Compiled",
    "HetParallelized",
    "Options",
    "Planned",
    "Traced",
    "het_parallelize",
    "stage_boundary",
]


class HetParallelized:
    """A step that compiles itself at its first call, once per set of shapes, like `jax.jit`."""

    def __init__(self, fun: Callable[..., Any], settings: Settings) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.__name__ = getattr(fun, "__name__", type(fun).__name__)
        self._fun = fun
        self.settings = settings
        self._compiled: dict[Any, Compiled] = {}
        self._arg_names = _argument_names(fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; compiles first if these shapes are new.

        Raises:
          ExecutionError: HP-RUN-TRACED, called under a JAX transformation.
        """
        refuse_tracers(self.__name__, (args, kwargs))
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
        """Trace the step for these arguments; shapes (`jax.ShapeDtypeStruct`) will do.

        Raises:
          TraceError: the step cannot be called so or traced, or the batch cannot be told.
        """
        checked_call(self._fun, args, kwargs, self.__name__)
        settings = self.settings
        call = call_of(self._fun, args, kwargs, settings.signature, self._arg_names)
        program = call.traced(settings.passes)
        cluster = settings.cluster or Cluster.auto(settings.devices())
        return Traced(program, call, cluster, settings)

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
        state = created_state(create_fn, args)
        rest = batch if isinstance(batch, tuple) else (batch,)
        if batch is not None:
            return self.compiled_for(state, *rest).init_state(create_fn, *args)
        wanted = _shapes(state)
        for compiled in reversed(self._compiled.values()):
            arguments, _ = jax.tree.unflatten(
                compiled.planned.traced.program.in_tree,
                [leaf.aval for leaf in argument_leaves(compiled.planned.traced.program)],
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
        batch_argnums: int | Sequence[int] = (1,),
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
        settings = self.settings
        signature = replace(
            settings.signature,
            batch_argnums=checked_positions(batch_argnums, "batch_argnums"),
            donate_argnums=(),
            static_argnums=(),
            batch_axes={},
        )
        count = checked_count(num_microbatches)
        checked_function(fun)

        def leader() -> LocalLeader | RemoteLeader:
            if not self._compiled:
                raise ExecutionError(
                    "HP-RUN-COMPANION",
                    f"the companion {getattr(fun, '__name__', 'step')} shares the placement of "
                    f"{self.__name__}, which has not been compiled",
                    ways_out=["call the train step, or step.init_state(..., batch=batch), first"],
                )
            return next(reversed(self._compiled.values())).leader()

        return Companion(fun, settings.passes, signature, 1 if count == "auto" else count, leader)

    def without_donation(self) -> HetParallelized:
        """The same step with the same settings; its arguments are kept."""
        signature = replace(self.settings.signature, donate_argnums=())
        return HetParallelized(self._fun, replace(self.settings, signature=signature))

    def jitted(self) -> Callable[..., Any]:
        """`jax.jit` of the step: what it must equal."""
        return jax.jit(self._fun, static_argnums=self.settings.signature.static_argnums)

    def clear(self) -> None:
        """Forget every compiled step."""
        self._compiled.clear()

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        statics = self.settings.signature.static_argnums
        dynamic = tuple(a for i, a in enumerate(args) if i not in statics)
        leaves, tree = jax.tree.flatten((dynamic, dict(kwargs)))
        try:
            avals = tuple(_leaf_key(leaf) for leaf in leaves)
        except TraceError:
            self.trace(*args, **kwargs)  # says by name which one it is
            raise
        return (
            tree,
            avals,
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


class _LeftOut:
    """No function: `het_parallelize` is used with arguments, above one."""

    def __repr__(self) -> str:
        return "..."


_LEFT_OUT = _LeftOut()


def het_parallelize(
    fun: Callable[..., Any] | _LeftOut = _LEFT_OUT,
    *,
    cluster: Cluster | None = None,
    num_microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    plan: Plan | str | None = None,
    batch_argnums: int | Sequence[int] = (1,),
    donate_argnums: int | Sequence[int] = (0,),
    static_argnums: int | Sequence[int] = (),
    runtime: Literal["local", "ray"] | Workers = "local",
    options: Options | None = None,
) -> Any:
    """Run a train step as a pipeline over unlike device groups; equal to `jax.jit(fun)`.

    Use it as `@hp.het_parallelize`, `@hp.het_parallelize(cluster=...)`, or as a function.

    Args:
      fun: the step, written for one device: any JAX function of arrays. It is traced with
        B, 2B and 3B examples, so that it must accept any number of them for M > 1. Left out: a
        decorator is returned.
      cluster: the device groups and their links; None: what `jax.devices()` shows.
      num_microbatches: M, a divisor of B; "auto": the number that the search finds best.
      schedule: a name ("gpipe", "1f1b", "zb-h1", …; docs/schedules.md), or "auto": the fastest
        that a search on the simulator finds within the memory of the groups.
      plan: a `Plan`, its one-line text, or another way to plan by name ("even": a stage on every
        group; "megatron", "alpa", "harp", "single_group"); None: the search makes one.
      batch_argnums: the arguments whose arrays have B examples along dimension 0. An argument
        that the call does not have is no batch.
      donate_argnums: the arguments that are given away: their arrays must not be used after the
        call. The first argument, by default; `()` to keep it.
      static_argnums: the arguments that are part of the program (hashable).
      runtime: "local", this process and its devices; "ray", a process per host of each group,
        started by Ray; or `hp.Workers(...)`, to say more about them.
      options: what is rarely changed.

    Returns:
      A function with the signature of `fun`, and the methods `trace`, `init_state`, `companion`.

    Raises:
      HetpassError: at the call, before anything runs, if the step cannot be run exactly.
    """
    if cluster is not None:
        checked_cluster(cluster)
    checked_type(plan, (Plan, str), "plan", 'hp.Plan.load("plan.json"), or a line of text')
    checked_type(options, Options, "options", "hp.Options(...)")
    settings = Settings(
        cluster=cluster,
        num_microbatches=checked_count(num_microbatches),
        schedule=schedule,
        plan=plan,
        signature=Signature(
            batch_argnums=checked_positions(batch_argnums, "batch_argnums"),
            donate_argnums=checked_positions(donate_argnums, "donate_argnums"),
            static_argnums=checked_positions(static_argnums, "static_argnums"),
            batch_axes=(options or Options()).batch_axes,
        ),
        options=options or Options(),
        workers=_workers(runtime),
    )

    def decorate(*functions: Callable[..., Any]) -> HetParallelized:
        if len(functions) != 1:
            raise TraceError(
                "HP-TRACE-FUNCTION",
                f"het_parallelize(...) decorates one function; {len(functions)} values were given",
                where="its first argument",
                ways_out=["hp.het_parallelize(step, ...)(state, batch)"],
            )
        return HetParallelized(checked_function(functions[0]), settings)

    return decorate if isinstance(fun, _LeftOut) else decorate(fun)


def _workers(runtime: Any) -> Workers | None:
    if runtime == "local":
        return None
    if runtime == "ray":
        return Workers()
    if isinstance(runtime, Workers):
        return runtime
    raise ExecutionError(
        "HP-RUN-RUNTIME",
        f"runtime is {runtime!r:.80}",
        where="runtime",
        ways_out=['"local"', '"ray"', "hp.Workers(...)"],
    )
