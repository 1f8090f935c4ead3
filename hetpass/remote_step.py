"""A step over several processes, from the driver's call down to every worker's part.

What travels to the workers is the step itself (a Python object, in memory), the shapes of its
arguments, and the plan as JSON. Each of them traces and cuts the step as the driver did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from hetpass.analysis.fingerprint import fingerprint
from hetpass.backend.compile_part import CompiledPart, Places, compile_part
from hetpass.backend.emulate import Emulation
from hetpass.frontend.microbatch import SplitOptions
from hetpass.frontend.trace import Signature, abstract
from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Plan
from hetpass.ir.program import Layered, Staged, Traced
from hetpass.ir.schedule import Schedule
from hetpass.pipeline import Passes, step_schedule
from hetpass.runtime.distributed.driver import Conversation, DistributedRuntime, layout_of
from hetpass.runtime.distributed.remote_array import RemoteArray

_PASSES = Passes(None, verifying=False)


@dataclass(frozen=True)
class Call:
    """A step and the shapes that it is called with: all that tracing it again needs.

    Attributes:
      fun: the step.
      args, kwargs: with a `jax.ShapeDtypeStruct` for every array; static arguments as they are.
      signature: the roles of the arguments. names: of the positional ones.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    signature: Signature
    names: tuple[str, ...]

    def traced(self, passes: Passes = _PASSES) -> Traced:
        """The step as one jaxpr."""
        return passes.trace(self.fun, self.args, self.kwargs, self.signature, self.names)


def call_of(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: Signature,
    names: Sequence[str],
) -> Call:
    """The call without its numbers."""
    shapes = tuple(
        a
        if i in signature.static_argnums
        else _shapes(names[i] if i < len(names) else f"args[{i}]", a)
        for i, a in enumerate(args)
    )
    named = {name: _shapes(name, value) for name, value in kwargs.items()}
    return Call(fun, shapes, named, signature, tuple(names))


def _shapes(argument: str, value: Any) -> Any:
    def shape(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        aval = abstract(leaf, argument + jax.tree_util.keystr(path))
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    return jax.tree_util.tree_map_with_path(shape, value)


@dataclass(frozen=True)
class StepJob:
    """A planned step, as the workers get it.

    Attributes:
      call: what is traced. split: options of the split into microbatches.
      cluster: as plain data. plan: as JSON; its fingerprint is the program's.
    """

    call: Call
    split: SplitOptions
    cluster: Mapping[str, Any]
    plan: str

    def build(
        self,
        devices: Mapping[str, Sequence[jax.Device]],
        places: Places,
        place: int,
        emulation: Emulation = Emulation(),
    ) -> CompiledPart:
        plan = Plan.from_json(self.plan)
        layered = _PASSES.layers(self.call.traced(), plan.num_microbatches, self.split)
        program = layered.program.traced
        cluster = Cluster.from_dict(self.cluster)
        plan.check(cluster, layered.num_layers, fingerprint(layered), program.batch_size)
        staged = _PASSES.partition(layered, plan)
        schedule = step_schedule(staged, plan)
        return compile_part(staged, plan, schedule, devices, places, place, emulation)


@dataclass(frozen=True)
class BesideJob:
    """A step beside another one, as the workers get it.

    Attributes:
      call: what is traced. num_microbatches: M.
      homes: by flat input, the stage on which it lives already.
      plan: of the other step, as JSON.
    """

    call: Call
    num_microbatches: int
    homes: Mapping[int, int]
    plan: str

    def build(
        self,
        devices: Mapping[str, Sequence[jax.Device]],
        places: Places,
        place: int,
        emulation: Emulation = Emulation(),
    ) -> CompiledPart:
        layered = _PASSES.layers(self.call.traced(), self.num_microbatches, SplitOptions())
        staged, plan = _PASSES.partition_beside(layered, self.homes, Plan.from_json(self.plan))
        schedule = step_schedule(staged, plan)
        return compile_part(staged, plan, schedule, devices, places, place, emulation)


def compile_remote(
    talk: Conversation,
    call: Call,
    split: SplitOptions,
    staged: Staged,
    plan: Plan,
    cluster: Cluster,
) -> DistributedRuntime:
    """Has every worker compile its part of a planned step.

    Args:
      talk: with the workers. call, split: how they come to the same program.
      staged: the program, as cut here by the plan.
    """
    schedule: Schedule = step_schedule(staged, plan)
    layout = layout_of(staged, plan, schedule, talk.crew)
    job = StepJob(call, split, cluster.to_dict(), plan.to_json())
    return DistributedRuntime(talk, layout, job)


@dataclass(frozen=True)
class RemoteLeader:
    """A step that runs in workers, and the plan that it was compiled with."""

    runtime: DistributedRuntime
    plan: Plan

    def beside(
        self, call: Call, layered: Layered, arguments: Sequence[Any], passes: Passes
    ) -> DistributedRuntime:
        """Another step, near the arrays that live in the workers already."""
        homes = {n: v.stage for n, v in enumerate(arguments) if isinstance(v, RemoteArray)}
        staged, plan = passes.partition_beside(layered, homes, self.plan)
        talk = self.runtime.talk
        layout = layout_of(staged, plan, step_schedule(staged, plan), talk.crew)
        count = layered.program.num_microbatches
        job = BesideJob(call, count, homes, self.plan.to_json())
        return DistributedRuntime(talk, layout, job)
