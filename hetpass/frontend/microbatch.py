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
from hetpass.frontend.phases import Phases, walk
from hetpass.frontend.probes import compare
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
                ways_out=_probe_ways_out(traced),
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
        raise _refusal(traced, phases, heavy, num_microbatches)
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


def _probe_ways_out(traced: Traced) -> list[str]:
    if traced.batch_size is None:
        return [
            "num_microbatches=1",
            "batch_argnums naming the argument whose leading dimension is the batch",
        ]
    return [
        "num_microbatches=1",
        "write the step for any number of examples: take sizes from x.shape, not from constants",
    ]


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


def _refusal(
    traced: Traced, phases: Phases, heavy: assemble.HeavyLate, num_microbatches: int
) -> SplitError:
    reason = phases.reasons.get(heavy.index)
    culprit = reason.eqn if reason else traced.jaxpr.eqns[heavy.index]
    why = reason.reason if reason else "needs the whole batch"
    follower = traced.jaxpr.eqns[heavy.index]
    return SplitError(
        "HP-SPLIT-MIXES",
        f"`{culprit.primitive.name}` {why}, and heavy work follows it: "
        f"{traced.name} has no equal in {counted(num_microbatches, 'microbatch')}",
        where=_jax.user_frame(culprit)
        or _jax.user_frame(traced.jaxpr.eqns[heavy.index])
        or _jax.name_stack(culprit),
        details=[
            f"equation: {describe(culprit)}",
            f"what follows would run on the whole batch at once, first "
            f"`{follower.primitive.name}` ({_jax.user_frame(follower)}): "
            f"{100 * heavy.share:.0f} % of the work on the batch",
        ],
        ways_out=[
            "num_microbatches=1 (the step still runs in stages)",
            'hp.Options(batch_statistics="per_microbatch") or routing="per_microbatch": every '
            "microbatch for itself, which is another result",
            "rewrite the line so that every example is treated alike "
            "(a norm within each example, a loss per example)",
            "leave cutting the batch to num_microbatches: no accumulation loop of your own",
        ],
    )


def describe(eqn: _jax.JaxprEqn) -> str:
    """An equation in one line: results, primitive, operands."""

    def short(atom: object) -> str:
        return str(getattr(atom, "aval", atom))

    ins = ", ".join(short(a) for a in eqn.invars[:6])
    outs = ", ".join(short(v) for v in eqn.outvars[:4])
    return f"{outs} = {eqn.primitive.name}({ins}{', …' if len(eqn.invars) > 6 else ''})"
