"""The suffix program on the few cuts that a bound leaves: the same answer, much sooner. No JAX.

V[c, N] is the shortest fill from a cell c on, as in `planner.suffix_program`: a cell is a node and
a layer within the node's band (`planner.reach`). Stages are edges between cells. All edges are
made at once and taken in the order of falling layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetpass.planner.flat_program import FlatProgram
from hetpass.planner.objective import Pick, needed_deltas
from hetpass.planner.reach import Bands

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_MOST_EDGES, _SHARE = 1_000_000, 16


@dataclass(frozen=True, eq=False)
class _Edges:
    """Stages that are possible, by falling first layer and then by cell.

    Attributes:
      source, target: cells; source is -1 at the start.
      way: of the flat program.
      layer, end: of the stage.
      add_s: t, and the round trip over the link in front.
      most: level of the most microbatches in flight that fit.
      delta: what the stage in front holds more; above M where it must hold all M.
    """

    source: Counts
    target: Counts
    way: Counts
    layer: Counts
    end: Counts
    add_s: Floats
    most: Counts
    delta: Counts

    def at(self, part: slice) -> _Edges:
        """Some of them."""
        return _Edges(*(getattr(self, name)[part] for name in self.__dataclass_fields__))


class BandedProgram:
    """One bound; `few` says whether it is worth while here."""

    def __init__(self, flat: FlatProgram, bands: Bands, bound_s: float, levels: int) -> None:
        """`levels`: in-flight counts that are told apart; the last stands for all M."""
        self.flat, self.bands, self.bound_s, self.levels = flat, bands, bound_s, levels
        lowest = bands.lowest[:, -1]
        self.width = np.maximum(bands.highest - lowest + 1, 0)
        self.width[bands.highest < 0] = 0
        self.first_cell = np.concatenate([[0], np.cumsum(self.width)])
        self.lowest = lowest
        moves = flat.moves
        self._pairs = self.width[moves.source] * self.width[moves.target]

    @property
    def edges(self) -> int:
        """How many are looked at, but for ways."""
        return int(self._pairs.sum())

    @property
    def few(self) -> bool:
        """Whether edges one by one are less work than all that the whole program goes through."""
        whole = len(self._pairs) * self.flat.num_layers**2 // _SHARE
        return self.edges <= min(_MOST_EDGES, whole)

    def picks(self, count: int = 1) -> list[tuple[Pick, ...]]:
        """The stages of the shortest fill; after it the best that begin with other first stages,
        at most `count` in all. None at all if the bound cannot be kept."""
        edges, starts = self._edges(), self._starts()
        values = np.full((int(self.first_cell[-1]), self.levels), np.inf)
        ends = np.nonzero((self.bands.highest >= self.flat.num_layers) & (self.width > 0))[0]
        values[self._cell(ends, np.full(len(ends), self.flat.num_layers)), 0] = 0.0
        layers = np.nonzero(np.diff(edges.layer, append=-1))[0] + 1
        for begin, end in zip([0, *layers[:-1]], layers, strict=False):
            part = edges.at(slice(int(begin), int(end)))
            fill = self._fill(part, values)
            heads = np.nonzero(np.diff(part.source, prepend=-1))[0]
            values[part.source[heads]] = np.minimum.reduceat(fill, heads, axis=0)
        return self._paths(edges, starts, values, count)

    # -- edges --------------------------------------------------------------------------------

    def _cell(self, nodes: Counts, layers: Counts) -> Counts:
        cells: Counts = self.first_cell[nodes] + layers - self.lowest[nodes]
        return cells

    def _edges(self) -> _Edges:
        flat, moves = self.flat, self.flat.moves
        chosen = np.nonzero(self._pairs)[0]
        pairs = self._pairs[chosen]
        move = np.repeat(chosen, pairs)
        place = np.arange(len(move)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
        source, target, row = moves.source[move], moves.target[move], moves.row[move]
        layer = self.lowest[source] + place // self.width[target]
        end = self.lowest[target] + place % self.width[target]
        kept = (layer > 0) & (layer < end)
        kept[kept] &= flat.occupied_s[row[kept], layer[kept]] <= self.bound_s
        kept[kept] &= np.isfinite(flat.occupied_s[row[kept], layer[kept]])
        places = [part[kept] for part in (source, target, row, layer, end)]
        return self._sorted(self._ways(*places))

    def _starts(self) -> _Edges:
        """First stages."""
        flat = self.flat
        widths = self.width[flat.start_target]
        start = np.repeat(np.arange(len(widths)), widths)
        place = np.arange(len(start)) - np.repeat(np.cumsum(widths) - widths, widths)
        target, row = flat.start_target[start], flat.start_row[start]
        end = self.lowest[target] + place
        kept = end > 0
        source, layer = np.full(len(start), -1), np.zeros(len(start), dtype=np.int64)
        places = [part[kept] for part in (source, target, row, layer, end)]
        return self._sorted(self._ways(*places))

    def _ways(
        self, source: Counts, target: Counts, row: Counts, layer: Counts, end: Counts
    ) -> _Edges:
        """An edge for every way that keeps the bound and has room for the least that follows."""
        flat = self.flat
        first, after = flat.first_way[row], flat.first_way[row + 1]
        each = after - first
        at = np.repeat(np.arange(len(row)), each)
        way = np.arange(len(at)) - np.repeat(np.cumsum(each) - each, each) + first[at]
        entry = flat.choice[way], layer[at], end[at]
        usable = (flat.load_s[entry] <= self.bound_s) & np.isfinite(flat.load_s[entry])
        at, way = at[usable], way[usable]
        entry = flat.choice[way], layer[at], end[at]
        held = flat.most[entry]
        levels = self.bands.lowest.shape[1]
        least = self.bands.lowest[target[at], np.minimum(held, levels) - 1]
        roomy = least <= end[at]
        at, way, held = at[roomy], way[roomy], held[roomy]
        entry = flat.choice[way], layer[at], end[at]
        round_s = np.where(source[at] < 0, 0.0, flat.round_s[row[at], layer[at]])
        time_s = flat.time_s[entry]
        starts, targets = source[at], target[at]
        cells = np.full(len(at), -1)
        inner = starts >= 0
        cells[inner] = self._cell(starts[inner], layer[at][inner])
        m = flat.num_microbatches
        most = np.where(held >= m, self.levels, np.minimum(held, self.levels - 1))
        if self.levels >= m:
            most = np.minimum(held, self.levels)
        return _Edges(
            cells,
            self._cell(targets, end[at]),
            way,
            layer[at],
            end[at],
            time_s + round_s,
            most,
            needed_deltas(round_s + time_s, self.bound_s, m, flat.allowed),
        )

    def _sorted(self, edges: _Edges) -> _Edges:
        order = np.lexsort((edges.source, -edges.layer))
        return _Edges(*(getattr(edges, name)[order] for name in edges.__dataclass_fields__))

    # -- values -------------------------------------------------------------------------------

    def _after(self, edges: _Edges, values: Floats) -> Floats:
        """Fill of stages and of what follows, [edges, N] by what follows; infinite without room."""
        fill: Floats = values[edges.target] + edges.add_s[:, None]
        fill[np.arange(self.levels) >= edges.most[:, None]] = np.inf
        return fill

    def _lasting(self, edges: _Edges) -> Counts:
        """Per edge the first level from which the stage in front is on the last one."""
        m, most = self.flat.num_microbatches, self.flat.allowed.most
        last = self.levels - 1
        first = np.maximum(last - edges.delta, 0)
        if most is None:
            return first
        all_held = max(last - most, 0) if self.levels == m else self.levels
        held: Counts = np.where(edges.delta > m, all_held, first)
        return held

    def _fill(self, edges: _Edges, values: Floats) -> Floats:
        """[edges, N] by what the stage in front must hold."""
        after = self._after(edges, values)
        own = np.arange(self.levels)
        moved = own - edges.delta[:, None]
        fill = np.where(moved >= 0, np.take_along_axis(after, np.maximum(moved, 0), axis=1), np.inf)
        lasting = np.where(own >= self._lasting(edges)[:, None], after, np.inf)
        fill[:, -1] = lasting.min(axis=1)
        return fill

    # -- paths --------------------------------------------------------------------------------

    def _paths(
        self, edges: _Edges, starts: _Edges, values: Floats, count: int
    ) -> list[tuple[Pick, ...]]:
        fill = self._after(starts, values)
        if not fill.size:
            return []
        least = fill.min(axis=1)
        paths: list[tuple[Pick, ...]] = []
        first_ways: set[int] = set()
        for at in np.argsort(least, kind="stable"):
            if np.isinf(least[at]) or len(paths) == count:
                break
            way = int(starts.way[at])
            if way not in first_ways:
                first_ways.add(way)
                level = int(fill[at].argmin())
                paths.append(self._path(edges, values, starts.at(slice(at, at + 1)), level))
        return paths

    def _path(self, edges: _Edges, values: Floats, stage: _Edges, level: int) -> tuple[Pick, ...]:
        """The stages from the first one on, which holds so many in flight as a level says."""
        picks = []
        while True:
            picks.append(
                Pick(int(self.flat.table[stage.way[0]]), int(stage.layer[0]), int(stage.end[0]))
            )
            if picks[-1].end == self.flat.num_layers:
                return tuple(picks)
            begin, end = self._of_cell(edges, int(stage.target[0]), picks[-1].end)
            own = edges.at(slice(begin, end))
            after = self._after(own, values)
            levels = np.arange(self.levels)
            if level == self.levels - 1:
                after = np.where(levels >= self._lasting(own)[:, None], after, np.inf)
            else:
                after = np.where(levels + own.delta[:, None] == level, after, np.inf)
            at, level = divmod(int(after.argmin()), self.levels)
            stage = own.at(slice(at, at + 1))

    def _of_cell(self, edges: _Edges, cell: int, layer: int) -> tuple[int, int]:
        """The edges from a cell, which lie together."""
        begin = int(np.searchsorted(-edges.layer, -layer, "left"))
        end = int(np.searchsorted(-edges.layer, -layer, "right"))
        own = edges.source[begin:end]
        return begin + int(np.searchsorted(own, cell, "left")), begin + int(
            np.searchsorted(own, cell, "right")
        )
