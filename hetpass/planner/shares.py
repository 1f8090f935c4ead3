"""Sharing a batch out over pipelines of unlike pace, so that all end together. No JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """`count` pipelines of one sort.

    Attributes:
      first_s: until a pipeline's first microbatch is done.
      period_s: from one microbatch to the next.
      count: how many pipelines.
    """

    first_s: float
    period_s: float
    count: int

    def done(self, seconds: float) -> int:
        """Microbatches that one pipeline has done by then."""
        if seconds < self.first_s:
            return 0
        return math.floor((seconds - self.first_s) / self.period_s * (1 + 1e-12)) + 1


def shared_out(microbatches: int, paces: Sequence[Pace]) -> tuple[tuple[int, ...], ...]:
    """Microbatches of every pipeline, by sort; the last of them ends as early as can be."""
    low_s, high_s = 0.0, min(p.first_s + (microbatches - 1) * p.period_s for p in paces)
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        if sum(pace.count * pace.done(middle_s) for pace in paces) >= microbatches:
            high_s = middle_s
        else:
            low_s = middle_s
    each = [pace.done(high_s) for pace in paces]
    fewer = [0] * len(paces)  # pipelines of a sort that do one less
    surplus = sum(p.count * n for p, n in zip(paces, each, strict=True)) - microbatches
    ends = [p.first_s + (n - 1) * p.period_s for p, n in zip(paces, each, strict=True)]
    for index in sorted(range(len(paces)), key=lambda i: -ends[i]):  # from those that end last
        if each[index]:
            fewer[index] = min(surplus, paces[index].count)
            surplus -= fewer[index]
    return tuple(
        (n,) * (pace.count - less) + (n - 1,) * less
        for pace, n, less in zip(paces, each, fewer, strict=True)
    )
