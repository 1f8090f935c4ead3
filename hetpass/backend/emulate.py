"""Devices of other speeds than they have, for experiments on one machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from hetpass.analysis.flops import jaxpr_flops
from hetpass.backend.compile import Executable
from hetpass.errors import ExecutionError
from hetpass.ir.program import Fragment


@dataclass(frozen=True)
class Emulation:
    """How the devices of a group are to behave.

    Attributes:
      repeats: every executable runs so often when it is called: 3 makes a device three times as
        slow, whatever it computes.
      flops_per_s: an executable takes its FLOPs over this rate, if the machine can do it in less
        time; the rest is slept. So groups can be faster than the cores that they share.
    """

    repeats: int = 1
    flops_per_s: float | None = None

    def __post_init__(self) -> None:
        wrong_rate = self.flops_per_s is not None and not self.flops_per_s > 0
        if self.repeats < 1 or wrong_rate:
            raise ExecutionError(
                "HP-RUN-EMULATION",
                f"no device behaves like {self}",
                ways_out=["repeats of at least 1, a positive rate"],
            )

    @property
    def donates(self) -> bool:
        """Whether executables may take over their arguments: not if they run again."""
        return self.repeats == 1


def emulated(executable: Executable, emulation: Emulation, fragment: Fragment | None) -> Executable:
    """The executable on a device that behaves so. It is waited for before the call returns.

    Args:
      fragment: that it was compiled from; None for what has none.
    """
    if emulation == Emulation():
        return executable
    call = executable.call
    flops = 0.0 if fragment is None else jaxpr_flops(fragment.jaxpr)
    least_s = 0.0 if emulation.flops_per_s is None else flops / emulation.flops_per_s

    def run(*arguments: jax.Array) -> Sequence[jax.Array]:
        for argument in arguments:
            argument.block_until_ready()
        begin_s = time.perf_counter()
        for _ in range(emulation.repeats - 1):
            call(*arguments)[-1].block_until_ready()
        results = call(*arguments)
        results[-1].block_until_ready()
        left_s = begin_s + least_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return results

    return replace(executable, call=run)  # type: ignore[arg-type]
