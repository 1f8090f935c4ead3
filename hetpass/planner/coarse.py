"""The inter-op problem with cuts at a few places only: a quick first answer. No JAX.

Its pipelines are pipelines of the whole problem too, so its optimum is an upper bound there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetpass.cost.tables import CostTables
from hetpass.planner.objective import Pick


def coarse_cuts(tables: CostTables, pieces: int) -> tuple[int, ...]:
    """Layers 0 … L cut into at most so many pieces of about equal time: their ends, and 0."""
    count = tables.num_layers
    if pieces >= count:
        return tuple(range(count + 1))
    layer = np.arange(count)
    times = [t.forward_s[layer, layer + 1] + t.backward_s[layer, layer + 1] for t in tables.stages]
    least = np.minimum.reduce(times)
    least = np.where(np.isfinite(least), least, 0.0)
    before = np.concatenate([[0.0], np.cumsum(least)]) + 1e-12 * np.arange(count + 1)
    wanted = np.linspace(0.0, before[-1], pieces + 1)
    nearest = np.abs(before[None, :] - wanted[:, None]).argmin(axis=1)
    return tuple(sorted({0, *map(int, nearest), count}))


def coarsened(tables: CostTables, cuts: Sequence[int]) -> CostTables:
    """The problem whose layers are the pieces between cuts."""
    at = np.asarray(cuts)
    pick = np.ix_(at[:-1], at)
    names = ("forward_s", "backward_s", "once_s", "fixed_bytes", "activation_bytes")
    stages = tuple(
        replace(table, **{name: getattr(table, name)[pick] for name in names})
        for table in tables.stages
    )
    return replace(
        tables,
        num_layers=len(cuts) - 1,
        stages=stages,
        link_forward_s=tables.link_forward_s[:, :, at],
        link_backward_s=tables.link_backward_s[:, :, at],
    )


def refined(picks: Sequence[Pick], cuts: Sequence[int]) -> tuple[Pick, ...]:
    """A pipeline of the coarse problem, in layers of the whole one."""
    return tuple(Pick(pick.table, cuts[pick.first], cuts[pick.end]) for pick in picks)
