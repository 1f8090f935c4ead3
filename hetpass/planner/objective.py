"""What the inter-op program minimizes, for one pipeline. No JAX.

    T = fill + load
    fill = Σ t_i + Σ r_i            one microbatch forward and back: t_i of stage i, r_i the round
                                    trip over the link behind it (its activation, its gradient)
    load = max of                   what the slowest part adds for the other M - 1 microbatches:
           (M - 1) t_i + u_i        a stage, with its gradient sync and update u_i, which stages do
                                    at the same time
           (M - 1) c_i              a link, in the direction that occupies it longer
           (M - 1) (r_i + t_{i+1}) / δ_i      a stage that waits for its microbatches to come back

The last line prices how many microbatches are in flight: N_i = N_{i+1} + δ_i, at most M, N = 1 on
the last stage. In 1F1B order the backward of a microbatch on stage i + 1 is followed, around the
cycle over stage i, by the backward δ_i + 1 later, so δ_i + 1 periods take at least
t_i + t_{i+1} + r_i; since t_i is at most a period, the line above is enough. More than
δ = 1 + ⌈r_i / t⌉ hides nothing more; fewer cost time, and save memory. A stage that holds all M
never waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.tables import CostTables, StageTable

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_ROUNDING = 1e-9
_STEP = 1e-6
"""Larger than rounding: a bound below a load must not be met by the same in-flight counts."""


@dataclass(frozen=True)
class Pick:
    """A stage: which of `CostTables.stages`, and the layers first … end - 1."""

    table: int
    first: int
    end: int


@dataclass(frozen=True)
class Priced:
    """A pipeline and what it costs.

    Attributes:
      picks: stages in layer order.
      in_flight: N_i per stage.
      fill_s, load_s: as at the head of this module; infinite where it does not fit.
    """

    picks: tuple[Pick, ...]
    in_flight: tuple[int, ...]
    fill_s: float
    load_s: float

    @property
    def step_s(self) -> float:
        """T."""
        return self.fill_s + self.load_s


def most_in_flight(table: StageTable, memory_bytes: float, num_microbatches: int) -> Counts:
    """Per range of layers the most microbatches in flight that fit, 0 … M."""
    with np.errstate(invalid="ignore", divide="ignore"):
        free = memory_bytes * (1 + _ROUNDING) - table.fixed_bytes
        fits = np.where(free >= 0, free / table.activation_bytes, 0.0)
    fits[np.isnan(fits)] = np.inf  # nothing is free, and nothing is needed
    fits[~np.isfinite(table.fixed_bytes) | ~np.isfinite(table.activation_bytes)] = 0.0
    counts: Counts = np.minimum(fits, num_microbatches).astype(np.int64)
    return counts


@dataclass(frozen=True)
class Deltas:
    """What a schedule allows for δ: at least, at most (None: any number)."""

    least: int = 1
    most: int | None = None


ANY = Deltas()
ONE_F_ONE_B = Deltas(1, 1)


def needed_deltas(
    round_s: Floats | float, load_s: float, num_microbatches: int, allowed: Deltas = ANY
) -> Counts:
    """δ for a link whose round trip, with the stage behind it, takes `round_s`.

    M + 1 where more would be needed than is allowed.
    """
    others = num_microbatches - 1
    if others == 0 or math.isinf(load_s):
        return np.full(np.shape(round_s), allowed.least, dtype=np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = others * np.asarray(round_s) / load_s
    ratio = np.where(np.isfinite(ratio), ratio, float(num_microbatches))
    ratio = np.minimum(ratio, num_microbatches)
    wanted = np.ceil(ratio * (1 - _ROUNDING)).astype(np.int64)
    deltas: Counts = np.maximum(allowed.least, wanted)
    if allowed.most is not None:
        deltas = np.where(deltas > allowed.most, num_microbatches + 1, deltas)
    return deltas


def priced(
    tables: CostTables,
    picks: Sequence[Pick],
    bound_s: float = math.inf,
    allowed: Deltas = ANY,
) -> Priced:
    """T of the stages, with the fewest microbatches in flight for which the load may be `bound_s`.

    Memory is not looked at. Where a link would need more than is allowed, it gets the most that
    is, and the load is above the bound.
    """
    m = tables.num_microbatches
    times = [_time(tables, pick) for pick in picks]
    once = [float(tables.stages[p.table].once_s[p.first, p.end]) for p in picks]
    loads = [(m - 1) * t + u for t, u in zip(times, once, strict=True)]
    rounds = []
    in_flight = [1]
    for i in range(len(picks) - 1, 0, -1):
        p, g = (tables.stages[picks[j].table].group for j in (i - 1, i))
        there = float(tables.link_forward_s[p, g, picks[i].first])
        back = float(tables.link_backward_s[p, g, picks[i].first])
        round_s = there + back + 2 * float(tables.link_latency_s[p, g])
        rounds.append(round_s)
        loads.append((m - 1) * max(there, back))
        delta = int(needed_deltas(round_s + times[i], bound_s, m, allowed))
        if allowed.most is not None:
            delta = min(delta, allowed.most)
        in_flight.append(min(m, in_flight[-1] + delta))
        if in_flight[-1] < m:
            loads.append((m - 1) * (round_s + times[i]) / delta)
    fill_s = math.fsum(times) + math.fsum(rounds)
    return Priced(tuple(picks), tuple(reversed(in_flight)), fill_s, max(loads))


def cheapest(tables: CostTables, picks: Sequence[Pick], allowed: Deltas = ANY) -> Priced | None:
    """T of the stages with the in-flight counts that make it least; None where none fit."""
    best = None
    found = priced(tables, picks, allowed=allowed)
    while fits(tables, found) and (best is None or found.load_s < best.load_s):
        best = found
        found = priced(tables, picks, found.load_s * (1 - _STEP), allowed)
    return best


def fits(tables: CostTables, found: Priced) -> bool:
    """Whether every stage has room for its microbatches in flight."""
    for pick, count in zip(found.picks, found.in_flight, strict=True):
        table = tables.stages[pick.table]
        most = most_in_flight(
            table, tables.groups[table.group].memory_bytes, tables.num_microbatches
        )
        if most[pick.first, pick.end] < count:
            return False
    return True


def _time(tables: CostTables, pick: Pick) -> float:
    table = tables.stages[pick.table]
    return float(table.forward_s[pick.first, pick.end] + table.backward_s[pick.first, pick.end])
