"""The pass `split`: Traced, M -> StepProgram.

Every equation is walked once in program order. The rule table (`frontend/rules`) proves what it
does to kinds; what it cannot prove runs on full-batch values: before the region if that is cheap,
after it otherwise. A step whose heavy work would have to follow a full-batch value is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpass import _jax
from hetpass.errors import SplitError
from hetpass.frontend import assemble
from hetpass.frontend.per_microbatch import per_microbatch
from hetpass.frontend.phases import walk
from hetpass.frontend.probes import compare
from hetpass.frontend.refusal import describe, mixes_refusal, probe_ways_out
from hetpass.frontend.rules.values import Mixes
from hetpass.frontend.unsplit import unsplit
from hetpass.ir.program import StepProgram, Traced
from hetpass.ir.quantities import counted

HEAVY_SHARE = 0.1
"""The largest share of the batch's FLOPs that may run at full batch after the region."""


@dataclass(frozen=True)
class SplitOptions:
    """How a step may be split.

    Attributes:
      accumulate_dtype: of accumulators, at least; None: float32.
      per_microbatch: the step means the mean of itself over the M slices of the batch.
    """

    accumulate_dtype: str | None = None
    per_microbatch: bool = False


def split(
    traced: Traced, num_microbatches: int, options: SplitOptions = SplitOptions()
) -> StepProgram:
    """Find the prologue, the microbatch region and the epilogue of a step.

    Args:
      traced: the step at B and its probes.
      num_microbatches: M; must divide B.

    Raises:
      SplitError: M does not divide B; the step cannot be traced at other batch sizes; or an
        equation mixes examples and heavy work follows it. The message names the equation and the
        user's line.
    """
    _check_divides(traced, num_microbatches)
    if not traced.probes:
        if num_microbatches > 1:
            raise SplitError(
                "HP-SPLIT-PROBE",
                f"{traced.name} cannot be split into {counted(num_microbatches, 'microbatch')}: "
                f"{traced.probe_failure}",
                where=traced.probe_place,
                details=[f"traced with B = {traced.batch_size}"] if traced.batch_size else [],
                ways_out=probe_ways_out(traced),
            )
        return unsplit(traced)
    probes = compare([traced.jaxpr, *traced.probes])
    if options.per_microbatch and num_microbatches > 1:
        return per_microbatch(traced, probes, num_microbatches)
    phases = walk(traced, probes)
    live = assemble.liveness(phases)
    heavy = assemble.heavy_late(phases, live, HEAVY_SHARE)
    if heavy is not None:
        if num_microbatches == 1:
            return unsplit(traced)
        raise mixes_refusal(traced, phases, heavy.index, heavy.share, num_microbatches)
    try:
        return assemble.assemble(
            phases, live, num_microbatches, accumulate_dtype=options.accumulate_dtype
        )
    except Mixes as reason:
        raise SplitError(
            "HP-SPLIT-SIZE",
            f"`{reason.eqn.primitive.name}` {reason.reason}: {traced.name} has no equal in "
            f"{counted(num_microbatches, 'microbatch')}",
            where=_jax.user_frame(reason.eqn) or _jax.name_stack(reason.eqn),
            details=[f"equation: {describe(reason.eqn)}"],
            ways_out=[
                "num_microbatches=1",
                "write the line without sizes that depend on the number of examples",
            ],
        ) from None


def _check_divides(traced: Traced, num_microbatches: int) -> None:
    size = traced.batch_size
    if num_microbatches >= 1 and (size is None or size % num_microbatches == 0):
        return
    legal = [m for m in range(1, (size or 1) + 1) if (size or 1) % m == 0]
    near = sorted(legal, key=lambda m: (abs(m - num_microbatches), m))[:3]
    raise SplitError(
        "HP-SPLIT-DIVIDE",
        f"{num_microbatches} microbatches do not divide a batch of {counted(size or 1, 'example')}",
        details=[f"nearest numbers that do: {', '.join(map(str, sorted(near)))}"],
        ways_out=[f"num_microbatches={near[0]}", "another batch size"],
    )
