"""How far pipelines come within a bound on the load: bounds for the inter-op program. No JAX.

The program's state is a layer, devices left, and microbatches in flight. Here the layer is a value
instead: the first layer that a suffix of the pipeline on the devices left can begin with, for a
number of microbatches that the stage in front holds at most. A stage's range is taken to be
possible where a larger one is, every link to be as fast as where it is fastest: so this is a
relaxation. What it finds impossible is impossible, in a thousandth of the time of the program; and
real costs hardly differ from it, since they rise with the range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hetpass.planner.flat_program import FlatProgram

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Shorts = NDArray[np.int16]
"""Of layers, where there are many."""

Numbers = TypeVar("Numbers", np.float64, np.int64)

_CELLS = 4_000
"""Nodes times in-flight counts, about: more nodes, fewer counts."""

_DELTAS = 3
"""Steps between in-flight counts of neighbours that are told apart: larger ones count as this."""

_ROUNDING = 1e-9

_FAR, _NEAR = 64.0, 1.1
"""From one load to the next, without and with a guess."""


@dataclass(frozen=True, eq=False)
class Bands:
    """Where layers may be cut between a stage on one node and what follows, under one bound.

    Attributes:
      lowest: [nodes, counts], the first layer that the suffix may begin with, when the stage in
        front holds at most 1, 2, … microbatches.
      highest: [nodes], the last layer at which the prefix may end; below `lowest` where no
        pipeline comes by.
    """

    lowest: Counts
    highest: Counts


class Reach:
    """The relaxation of one problem; see the head of this module."""

    def __init__(self, flat: FlatProgram, levels: int) -> None:
        """`levels`: the in-flight counts that the program tells apart."""
        self.flat = flat
        self.levels = max(1, min(levels, _CELLS // max(1, flat.num_nodes)))
        self._load_s, self._time_s = _of_larger(flat.load_s), _of_larger(flat.time_s)
        cuts = slice(min(1, flat.num_layers - 1), None)  # in front of layer 0 there is no link
        self._round_s = flat.round_s[:, cuts].min(axis=1)
        self._occupied_s = flat.occupied_s[:, cuts].min(axis=1)
        self._room = self._first_with_room()

    def _first_with_room(self) -> Shorts:
        """[choices, counts, L + 1]: per end, the first layer from which so many in flight fit."""
        flat, layers = self.flat, self.flat.num_layers
        counts = min(self.levels, flat.num_microbatches)
        most = -_of_larger(-np.minimum(flat.most, counts))
        place = np.arange(len(most))[:, None, None] * (layers + 1) + np.arange(layers + 1)
        layers_with = np.bincount(
            (place * (counts + 1) + most).reshape(-1), minlength=place.size * (counts + 1)
        ).reshape(len(most), layers + 1, counts + 1)
        first = np.cumsum(layers_with, axis=2)[:, :, :-1].transpose(0, 2, 1)
        more = np.minimum(np.arange(self.levels), counts - 1)  # M at most are ever in flight
        return first[:, more].astype(np.int16)

    def least_fill_s(self) -> float:
        """A fill that no pipeline is below: the fastest ways, whatever devices there are."""
        flat = self.flat
        time_s = flat.time_s.min(axis=0)
        fill_s = np.full(flat.num_layers + 1, np.inf)
        fill_s[-1] = 0.0
        for layer in range(flat.num_layers - 1, -1, -1):
            fill_s[layer] = (time_s[layer, layer + 1 :] + fill_s[layer + 1 :]).min()
        return float(fill_s[0])

    def possible(self, bound_s: float) -> bool:
        """Whether any pipeline may have a load of at most `bound_s`."""
        return self._suffixes(bound_s) is not None

    def lowest_load_s(
        self, around: tuple[float, float], precision: float, guess_s: float | None = None
    ) -> tuple[float, float]:
        """A load that is too low for every pipeline (or 0), and one that is not, up to a factor.

        Args:
          around: such loads, known before; the second may be infinite.
          precision: relative.
          guess_s: near the answer, perhaps.
        """
        low_s, high_s = around
        loads = (self.flat.load_s, self.flat.occupied_s)
        most_s = 2 * max(float(x[np.isfinite(x)].max(initial=0.0)) for x in loads)
        most_s, least_s = min(most_s, high_s), most_s * _ROUNDING
        probe_s, factor = min(guess_s or most_s, most_s), _NEAR if guess_s else _FAR
        while low_s == 0.0 or math.isinf(high_s):
            if probe_s <= least_s:  # no load is too low
                return low_s, min(high_s, most_s)
            if self.possible(probe_s):
                high_s, probe_s = probe_s, probe_s / factor
            elif probe_s == most_s:
                return probe_s, high_s
            else:
                low_s, probe_s = probe_s, min(probe_s * factor, most_s)
            factor = min(factor**2, _FAR)
        while high_s - low_s > precision * high_s:
            middle_s = math.sqrt(low_s * high_s)
            if self.possible(middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s, high_s

    def bands(self, bound_s: float) -> Bands | None:
        """Where cuts may be; None where nothing is possible."""
        lowest = self._suffixes(bound_s)
        return None if lowest is None else Bands(lowest, self._prefixes(bound_s))

    # -- from the last layer ------------------------------------------------------------------

    def _suffixes(self, bound_s: float) -> Counts | None:
        """`Bands.lowest`; None where no pipeline begins at the first layer."""
        flat, levels = self.flat, self.levels
        at_front, firsts = self._first_layers(bound_s)
        lowest = np.full((flat.num_nodes, levels), flat.num_layers)
        own = np.arange(levels)
        moves = flat.moves
        for block in moves.blocks:
            rows, after = moves.row[block, None], lowest[moves.target[block]]
            found = np.full(after.shape, flat.num_layers, dtype=np.int16)
            for step, first in firsts:
                begins = first[rows, own, after]
                if step < levels:
                    np.minimum(found[:, step:], begins[:, :-step], out=found[:, step:])
                np.minimum(found[:, -1], begins.min(axis=1), out=found[:, -1])
            source = moves.source[block]
            heads = np.nonzero(np.diff(source, prepend=-1))[0]
            least = np.minimum.reduceat(found, heads, axis=0)
            lowest[source[heads]] = np.minimum.accumulate(least, axis=1)
        begins = at_front[flat.start_row[:, None], own, lowest[flat.start_target]]
        return lowest if (begins == 0).any() else None

    def _first_layers(self, bound_s: float) -> tuple[Shorts, list[tuple[int, Shorts]]]:
        """[rows, counts, L + 1]: per end, the first layer that a stage may begin with, if none is
        in front of it; and by steps between in-flight counts, if there is one."""
        flat, others = self.flat, self.flat.num_microbatches - 1
        within = _first_within(self._load_s, np.full(len(flat.load_s), bound_s))[flat.choice]
        within[(self._occupied_s > bound_s)[flat.row_of]] = flat.num_layers
        at_front = self._begins(within)
        results = []
        for step, waits in self._steps():
            if waits and others:  # (M - 1) (r + t) / δ is at most the bound
                period_s = step * bound_s / others * (1 + _ROUNDING)
                bounds_s = (period_s - self._round_s)[flat.row_of]
                late = _first_within(self._time_s[flat.choice], bounds_s)
                results.append((step, self._begins(np.maximum(within, late))))
            else:
                results.append((step, at_front))
        return at_front, results

    def _begins(self, first: Shorts) -> Shorts:
        """The least over ways with room for the counts."""
        fitting = np.maximum(first[:, None, :], self._room[self.flat.choice])
        begins: Shorts = np.minimum.reduceat(fitting, self.flat.first_way[:-1], axis=0)
        return begins

    def _steps(self) -> list[tuple[int, bool]]:
        """What stages in front hold more, and whether they may have to wait with that.

        The largest stands for all that are larger. Where a schedule allows none larger, only a
        stage that holds all M never waits; no stage does where M is beyond any depth.
        """
        least, most = self.flat.allowed.least, self.flat.allowed.most
        deltas = _DELTAS if self.levels > 1 else 1
        steps = [(step, True) for step in range(least, least + deltas)]
        steps[-1] = steps[-1][0], False
        if most is None:
            return steps
        depth = len(self.flat.moves.blocks) + 1
        never = self.flat.num_microbatches - 1 > most * depth
        if never:
            return [(step, True) for step, _ in steps if step < most] + [(most, True)]
        return [(min(step, most), waits) for step, waits in steps]

    # -- from the first layer -----------------------------------------------------------------

    def _prefixes(self, bound_s: float) -> Counts:
        """`Bands.highest`."""
        flat = self.flat
        usable = (self._load_s <= bound_s) & np.isfinite(self._load_s)
        last = np.maximum.reduceat(
            (usable.sum(axis=2) - 1)[flat.choice], flat.first_way[:-1], axis=0
        )
        last = np.concatenate([last, np.full((len(last), 1), flat.num_layers)], axis=1)
        highest = np.full(flat.num_nodes, -1)
        np.maximum.at(highest, flat.start_target, last[flat.start_row, 0])
        moves = flat.moves
        for block in reversed(moves.blocks):
            before = highest[moves.source[block]]
            known = before >= 0
            reached = np.maximum(before, last[moves.row[block], before])[known]
            np.maximum.at(highest, moves.target[block][known], reached)
        return highest


def _of_larger(values: NDArray[Numbers]) -> NDArray[Numbers]:
    """The least over all ranges that hold a range, [choices, L, L + 1]: it never rises with the
    first layer, nor falls with the end."""
    larger = np.minimum.accumulate(values[:, :, ::-1], axis=2)[:, :, ::-1]
    result: NDArray[Numbers] = np.minimum.accumulate(larger, axis=1)
    return result


def _first_within(needed_s: Floats, bounds_s: Floats) -> Shorts:
    """[ways, L + 1]: per end, how many layers need more than the bound of the way, by bisection."""
    ways, layers, ends = needed_s.shape
    most_s = np.finfo(np.float64).max  # what is infinite is never possible
    within_s = np.minimum(bounds_s, most_s)[:, None]
    way, end = np.arange(ways)[:, None], np.arange(ends)
    first = np.zeros((ways, ends), dtype=np.int16)
    after = np.full((ways, ends), layers, dtype=np.int16)
    for _ in range(layers.bit_length()):
        middle = (first + after) // 2
        possible = needed_s[way, np.minimum(middle, layers - 1), end] <= within_s
        possible |= middle >= layers
        after = np.where(possible, middle, after)
        first = np.where(possible, first, middle + 1)
    return after
