"""An eval step beside a train step, on the train step's placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from hetpass.backend.compile import CompiledStep
from hetpass.checks import checked_call
from hetpass.errors import ExecutionError
from hetpass.frontend.microbatch import SplitOptions
from hetpass.frontend.trace import Signature, abstract
from hetpass.ir.plan import Plan
from hetpass.ir.program import Layered
from hetpass.pipeline import Passes
from hetpass.remote_step import Call, RemoteLeader, call_of
from hetpass.runtime.local import LocalRuntime


@dataclass(frozen=True)
class LocalLeader:
    """A compiled step, and the plan and devices that it was compiled with."""

    compiled: CompiledStep
    plan: Plan
    devices: Mapping[str, Sequence[jax.Device]]

    @property
    def runtime(self) -> object:
        """What is compiled once for."""
        return self.compiled

    def beside(
        self, call: Call, layered: Layered, arguments: Sequence[Any], passes: Passes
    ) -> LocalRuntime:
        """Another step, near the arrays that live on the leader's stages already."""
        step = passes.compile_beside(layered, self.compiled, self.plan, self.devices, arguments)
        return LocalRuntime(step)


class Companion:
    """A step that keeps the parameters where another step has them. Donates nothing.

    Its layers go to the stages that hold their parameters; it has its own batch sizes, and is
    compiled once per set of shapes.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        passes: Passes,
        signature: Signature,
        num_microbatches: int,
        leader: Callable[[], LocalLeader | RemoteLeader],
    ) -> None:
        self._fun = fun
        self._passes = passes
        self._signature = signature
        self._num_microbatches = num_microbatches
        self._leader = leader
        self._compiled: dict[Any, tuple[Any, Any, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
          ExecutionError: HP-RUN-COMPANION, the train step has not been compiled.
        """
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        avals = tuple(abstract(leaf) for leaf in leaves)
        leader = self._leader()
        key = (tree, tuple((a.shape, a.dtype, a.weak_type) for a in avals), id(leader.runtime))
        if key not in self._compiled:
            self._compiled[key] = self._compile(args, kwargs, leaves, leader)
        runtime, in_tree, out_tree = self._compiled[key]
        if in_tree != tree:
            raise ExecutionError(
                "HP-RUN-STRUCTURE", "the arguments are of another structure than traced"
            )
        return jax.tree.unflatten(out_tree, runtime(leaves))

    def _compile(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaves: Sequence[Any],
        leader: LocalLeader | RemoteLeader,
    ) -> tuple[Any, Any, Any]:
        checked_call(self._fun, args, kwargs, getattr(self._fun, "__name__", "companion"))
        call = call_of(self._fun, args, kwargs, self._signature, ())
        traced = call.traced(self._passes)
        layered = self._passes.layers(traced, self._num_microbatches, SplitOptions())
        runtime = leader.beside(call, layered, leaves, self._passes)
        return runtime, traced.in_tree, traced.out_tree
