"""How far pipelines come within a bound on the load: bounds for the inter-op program. No JAX.

The program's state is a layer, devices left, and microbatches in flight. Here the layer is a value
instead: the first layer that a suffix of the pipeline on the devices left can begin with, for a
number of microbatches that the stage in front holds at most. A stage's range is taken to be
possible where a larger one is, so this is a relaxation: what it finds impossible is impossible, in
a thousandth of the time of the program; and real costs hardly differ from it, since they rise with
the range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetpass.planner.flat_program import FlatProgram

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_CELLS = 8_000
"""Nodes times in-flight counts, about: more nodes, fewer counts."""

_DELTAS = 3
"""Steps between in-flight counts of neighbours that are told apart: larger ones count as this."""

_ROUNDING = 1e-9


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
        self._needed = [self._least_bound(d) for d in range(1, self._deltas() + 1)]
        self._room = self._first_with_room()

    def _deltas(self) -> int:
        return _DELTAS if self.levels > 1 else 1

    def _step(self, delta: int) -> int:
        """What the `delta`-th of the steps adds to the in-flight count, at least."""
        step = self.flat.allowed.least + delta - 1
        most = self.flat.allowed.most
        return step if most is None else min(step, most)

    def _least_bound(self, delta: int) -> Floats:
        """[ways, L, L + 1]: bounds under which the range may be run, or a larger one; with the
        largest step there is no wait."""
        flat = self.flat
        bound_s = np.maximum(flat.load_s[flat.choice], flat.occupied_s[flat.row_of][:, :, None])
        if delta < self._deltas():
            others = flat.num_microbatches - 1
            waited_s = flat.time_s[flat.choice] + flat.round_s[flat.row_of][:, :, None]
            with np.errstate(invalid="ignore"):
                needed_s = others * waited_s * ((1 - _ROUNDING) / self._step(delta))
            bound_s = np.fmax(bound_s, needed_s)
        larger = np.minimum.accumulate(bound_s[:, :, ::-1], axis=2)[:, :, ::-1]
        result: Floats = np.minimum.accumulate(larger, axis=1)
        return result

    def _first_with_room(self) -> Counts:
        """[ways, counts, L + 1]: per end, the first layer from which so many in flight fit."""
        flat, layers = self.flat, self.flat.num_layers
        counts = min(self.levels, flat.num_microbatches)
        most = np.maximum.accumulate(np.minimum(flat.most, counts)[:, :, ::-1], axis=2)
        most = np.maximum.accumulate(most[:, :, ::-1], axis=1)
        place = np.arange(len(most))[:, None, None] * (layers + 1) + np.arange(layers + 1)
        layers_with = np.bincount(
            (place * (counts + 1) + most).reshape(-1), minlength=place.size * (counts + 1)
        ).reshape(len(most), layers + 1, counts + 1)
        first = np.cumsum(layers_with, axis=2)[:, :, :-1].transpose(0, 2, 1)
        more = np.minimum(np.arange(self.levels), counts - 1)  # M at most are ever in flight
        result: Counts = first[:, more][flat.choice]
        return result

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

    def lowest_load_s(self, below_s: float, precision: float) -> tuple[float, float]:
        """A load that is too low for every pipeline, and one that is not, up to a factor.

        Args:
          below_s: a load that is possible; it may be infinite.
          precision: relative.
        """
        loads = self.flat.load_s[np.isfinite(self.flat.load_s)]
        links = self.flat.occupied_s[np.isfinite(self.flat.occupied_s)]
        most_s = 2 * max(float(loads.max(initial=0.0)), float(links.max(initial=0.0)))
        high_s = min(below_s, most_s)
        if not self.possible(high_s):
            return high_s, below_s
        low_s = 0.0
        probe_s = high_s / 64
        while high_s - low_s > precision * high_s:
            middle_s = probe_s if low_s == 0.0 else math.sqrt(low_s * high_s)
            if self.possible(middle_s):
                high_s, probe_s = middle_s, middle_s / 64
                if middle_s <= most_s * _ROUNDING:
                    break
            else:
                low_s = middle_s
        return low_s, high_s

    def bands(self, bound_s: float) -> Bands | None:
        """Where cuts may be; None where nothing is possible."""
        lowest = self._suffixes(bound_s)
        return None if lowest is None else Bands(lowest, self._prefixes(bound_s))

    def _suffixes(self, bound_s: float) -> Counts | None:
        """`Bands.lowest`; None where no pipeline begins at the first layer."""
        flat, levels = self.flat, self.levels
        firsts = [self._first_layers(needed, bound_s) for needed in self._needed]
        lowest = np.full((flat.num_nodes, levels), flat.num_layers)
        own = np.arange(levels)
        moves = flat.moves
        for block in moves.blocks:
            rows, after = moves.row[block, None], lowest[moves.target[block]]
            found = np.full(after.shape, flat.num_layers)
            for delta, first in enumerate(firsts, 1):
                begins = np.minimum.accumulate(first[rows, own, after], axis=1)
                step = self._step(delta)
                if step < levels:
                    np.minimum(found[:, step:], begins[:, :-step], out=found[:, step:])
                np.minimum(found[:, -1], begins[:, -1], out=found[:, -1])
            source = moves.source[block]
            heads = np.nonzero(np.diff(source, prepend=-1))[0]
            least = np.minimum.reduceat(found, heads, axis=0)
            lowest[source[heads]] = np.minimum.accumulate(least, axis=1)
        begins = firsts[-1][flat.start_row[:, None], own, lowest[flat.start_target]]
        return lowest if (begins == 0).any() else None

    def _first_layers(self, needed_s: Floats, bound_s: float) -> Counts:
        """[rows, counts, L + 1]: per end, the first layer that a stage may begin with."""
        flat = self.flat
        too_much = ~(needed_s <= bound_s) | np.isinf(needed_s)
        first = too_much.sum(axis=1)[:, None, :]
        result: Counts = np.minimum.reduceat(
            np.maximum(first, self._room), flat.first_way[:-1], axis=0
        )
        result = np.where(result < np.arange(flat.num_layers + 1), result, flat.num_layers)
        result[:] = np.minimum.accumulate(result[:, :, ::-1], axis=2)[:, :, ::-1]
        return result

    def _prefixes(self, bound_s: float) -> Counts:
        """`Bands.highest`."""
        flat = self.flat
        needed_s = self._needed[-1]
        usable = (needed_s <= bound_s) & np.isfinite(needed_s)
        last = np.maximum.reduceat(usable.sum(axis=2), flat.first_way[:-1], axis=0) - 1
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
