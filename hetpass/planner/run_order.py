"""The order of groups along a pipeline, by the simulator. No JAX.

The program's objective hardly tells in which order runs of stages follow each other: its fill is a
sum. The step does: stages behind the slowest one hide their share of the fill behind its work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from hetpass.cost.tables import CostTables
from hetpass.planner.judge import Judged
from hetpass.planner.objective import Pick

_NEAR = 0.02
"""Nothing is sought where no order could be faster by more than this share."""

_LEAST_GAIN = 1e-3
_ROUNDS = 8

Judge = Callable[[tuple[Pick, ...]], Judged | None]


def in_better_order(
    tables: CostTables, picks: tuple[Pick, ...], own: Judged, judge: Judge
) -> tuple[tuple[Pick, ...], Judged]:
    """The pipeline with its runs of stages on one group moved, one at a time, as long as that
    shortens the step; layers are counted out anew in the new order.

    Args:
      own: judgement of `picks`.
      judge: of any pipeline; None where it does not fit.
    """
    for _ in range(_ROUNDS):
        if own.step_s <= _least_s(tables, picks) * (1 + _NEAR):
            break
        known = [(judge(other), other) for other in moved_runs(tables, picks)]
        better = [(judged, other) for judged, other in known if judged is not None]
        judged, other = min(better, key=lambda pair: pair[0].step_s, default=(own, picks))
        if judged.step_s > own.step_s * (1 - _LEAST_GAIN):
            break
        picks, own = other, judged
    return picks, own


def moved_runs(tables: CostTables, picks: Sequence[Pick]) -> Iterator[tuple[Pick, ...]]:
    """Every pipeline in which one run of stages on a group stands elsewhere, that can compute."""
    runs = [
        tuple(run) for _, run in itertools.groupby(picks, lambda p: tables.stages[p.table].group)
    ]
    seen = {tuple(runs)}
    for index, run in enumerate(runs):
        others = runs[:index] + runs[index + 1 :]
        for place in range(len(runs)):
            order = (*others[:place], run, *others[place:])
            if order not in seen:
                seen.add(order)
                found = _counted_out(list(itertools.chain.from_iterable(order)))
                if _computes(tables, found):
                    yield found


def _counted_out(picks: Sequence[Pick]) -> tuple[Pick, ...]:
    ends = itertools.accumulate(pick.end - pick.first for pick in picks)
    return tuple(
        Pick(pick.table, end - (pick.end - pick.first), end)
        for pick, end in zip(picks, ends, strict=True)
    )


def _computes(tables: CostTables, picks: Sequence[Pick]) -> bool:
    """Whether every stage and every link of it exists."""
    stages = [tables.stages[pick.table] for pick in picks]
    seconds = [
        float(cost[pick.first, pick.end])
        for pick, stage in zip(picks, stages, strict=True)
        for cost in (stage.forward_s, stage.backward_s, stage.once_s, stage.fixed_bytes)
    ]
    for (one, other), pick in zip(itertools.pairwise(stages), picks[1:], strict=True):
        place = one.group, other.group, pick.first
        seconds += [float(tables.link_forward_s[place]), float(tables.link_backward_s[place])]
        seconds.append(float(tables.link_latency_s[one.group, other.group]))
    return all(math.isfinite(s) for s in seconds)


def _least_s(tables: CostTables, picks: Sequence[Pick]) -> float:
    """The work of the slowest stage: no order is faster, but for what layers cost elsewhere."""
    return max(
        tables.num_microbatches * float(stage.forward_s[at] + stage.backward_s[at])
        + float(stage.once_s[at])
        for pick in picks
        for stage, at in [(tables.stages[pick.table], (pick.first, pick.end))]
    )
