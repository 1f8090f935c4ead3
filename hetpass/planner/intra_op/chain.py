"""The best assignment of every range of layers, from one boundary table per layer kind. No JAX.

Layers meet only at their boundary values. So the least cost of a range is a min-plus product of the
tables of its layers: `cost(i, j)[s, t] = min over u of cost(i, j - 1)[s, u] + table(j - 1)[u, t]`.
All ranges that end at the same layer are extended at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.reshard import arrival_s, reshard_table
from hetpass.ir.operation_graph import Value
from hetpass.planner.intra_op.boundary import BoundaryTable, left_values, right_values
from hetpass.planner.intra_op.linear_program import Effort
from hetpass.planner.intra_op.pbqp import Floats

States = NDArray[np.int64]
Measure = Callable[[int, int, int], Floats]
"""(layer kind, left state, right state) -> quantities that add up over layers."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Every range of layers, entry [first, end]; infinite where first >= end.

    Attributes:
      tables, kinds: what it was made from.
      costs: of the best assignment, in the unit of the tables.
      lower: no assignment costs less.
    """

    tables: tuple[BoundaryTable, ...]
    kinds: tuple[int, ...]
    costs: Floats
    lower: Floats
    _steps: tuple[_Step, ...]

    def path(self, first: int, end: int) -> list[tuple[int, int]]:
        """The left and right state of each layer of a range, as numbers of its table's states."""
        found = []
        for _, rows, left, right in self._walk(end):
            at = np.flatnonzero(rows == first)
            if len(at):
                found.append((int(left[at[0]]), int(right[at[0]])))
        return found[::-1]

    def added(self, measure: Measure, quantities: int) -> RangeSums:
        """Quantities of the best assignment of every range."""
        count = len(self.kinds)
        shapes = [(len(t.left), len(t.right), quantities) for t in self.tables]
        values = [np.full(shape, np.nan) for shape in shapes]
        for end in range(1, count + 1):
            for layer, _, left, right in self._walk(end):
                kind = self.kinds[layer]
                missing = np.isnan(values[kind][left, right, 0])
                for s, t in sorted(set(zip(left[missing], right[missing], strict=True))):
                    values[kind][s, t] = measure(kind, int(s), int(t))
        possible = np.isfinite(self.costs)
        sums = np.where(possible[:, :, None], np.zeros(quantities), np.inf)
        largest = np.where(possible[:, :, None], np.zeros(quantities), np.inf)
        lefts, rights = (np.full((count, count + 1), -1) for _ in range(2))
        for end in range(1, count + 1):
            for layer, rows, left, right in self._walk(end):
                own = values[self.kinds[layer]][left, right]
                sums[rows, end] += own
                largest[rows, end] = np.maximum(largest[rows, end], own)
                lefts[layer, end] = left[rows == layer][0] if layer in rows else -1
                if layer == end - 1:
                    rights[rows, end] = right
        return RangeSums(sums, largest, lefts, rights)

    def _walk(self, end: int) -> Iterator[tuple[int, States, States, States]]:
        """From the last layer to the first: (layer, firsts, left states, right states)."""
        rows = np.flatnonzero(np.isfinite(self.costs[:end, end]))
        right = self._steps[end - 1].last[rows]
        for layer in range(end - 1, -1, -1):
            step = self._steps[layer]
            keep = rows <= layer
            rows, right = rows[keep], right[keep]
            if not len(rows):
                return
            before = step.before[rows, right]
            left = before.copy()
            inner = rows < layer
            left[inner] = step.entered[before[inner], right[inner]]
            yield layer, rows, left, right
            right = before
            # Ranges that begin here have no layer before; they are dropped in the next turn.


@dataclass(frozen=True, eq=False)
class RangeSums:
    """Per range [first, end], of its best assignment.

    Attributes:
      sums, largest: [first, end, quantity], over its layers; infinite where nothing is possible.
      left, right: states at its two ends; -1 where nothing is possible.
    """

    sums: Floats
    largest: Floats
    left: States
    right: States


@dataclass(frozen=True, eq=False)
class _Step:
    """One layer, for all ranges that hold it.

    Attributes:
      before: [first, right state] -> the right state of the layer before; of the range's first
        layer its own left state.
      entered: [right state of the layer before, own right state] -> own left state.
      last: [first] -> right state, if the range ends here.
    """

    before: States
    entered: States
    last: States


def chained(
    tables: Sequence[BoundaryTable], kinds: Sequence[int], effort: Effort = Effort()
) -> Chain:
    """The best assignment of every range.

    Where tables hold upper bounds, entries that might better a range are solved by themselves, as
    long as its gap is worth it (`effort.chain_gap`, `effort.refinements`).

    Args:
      tables: per layer kind, all for the same mesh and number of microbatches.
      kinds: of every layer, in order.
    """
    found = tuple(tables)
    for _ in range(effort.refinements):
        known, _ = _forward(found, kinds, [table.costs for table in found])
        lower, steps = _forward(found, kinds, [table.lower for table in found])
        worth = known > lower * (1 + effort.chain_gap)
        hopeful = _hopeful(Chain(found, tuple(kinds), lower, lower, steps), worth)
        if not hopeful:
            break
        for kind, left, right in hopeful:
            table = found[kind].refined(left, right, effort)
            found = (*found[:kind], table, *found[kind + 1 :])
    costs, steps = _forward(found, kinds, [table.costs for table in found])
    lower, _ = _forward(found, kinds, [table.lower for table in found])
    return Chain(found, tuple(kinds), costs, lower, steps)


def _hopeful(chain: Chain, worth: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Entries on the best paths by lower bounds that may be better than what is known.

    Args:
      worth: [first, end], the ranges that are looked at.
    """
    found: set[tuple[int, int, int]] = set()
    for end in np.flatnonzero(worth.any(axis=0)):
        for layer, rows, left, right in chain._walk(int(end)):
            kind, own = chain.kinds[layer], worth[rows, end]
            found.update((kind, s, t) for s, t in zip(left[own], right[own], strict=True))
    return sorted(
        (kind, int(left), int(right))
        for kind, left, right in found
        if chain.tables[kind].lower[left, right]
        < chain.tables[kind].costs[left, right] * (1 - 1e-6)
    )


def _forward(
    tables: Sequence[BoundaryTable], kinds: Sequence[int], costs: Sequence[Floats]
) -> tuple[Floats, tuple[_Step, ...]]:
    count = len(kinds)
    joined: dict[tuple[int, int], tuple[Floats, States]] = {}
    starts = [arrivals(table, 0) for table in tables]
    finishes = [arrivals(table, 1) for table in tables]
    total = np.full((count, count + 1), np.inf)
    steps = []
    reached: Floats = np.zeros((0, 0))
    for layer, kind in enumerate(kinds):
        own = starts[kind][:, None] + costs[kind]
        extended, before = np.zeros((0, own.shape[1])), np.zeros((0, own.shape[1]), dtype=np.int64)
        entered = np.zeros((1, own.shape[1]), dtype=np.int64)
        if layer:
            pair = kinds[layer - 1], kind
            if pair not in joined:
                joined[pair] = _min_plus(_meeting(tables[pair[0]], tables[kind]), costs[kind])
            table, entered = joined[pair]
            extended, before = _min_plus(reached, table)
        reached = np.vstack([extended, own.min(axis=0)])
        before = np.vstack([before, own.argmin(axis=0)])
        finished = reached + finishes[kind]
        total[: layer + 1, layer + 1] = finished.min(axis=1)
        steps.append(_Step(before, entered, finished.argmin(axis=1)))
    return total, tuple(steps)


def _min_plus(one: Floats, other: Floats) -> tuple[Floats, States]:
    """The least sum over what is between, and where it is."""
    least = np.full((len(one), other.shape[1]), np.inf)
    where = np.zeros(least.shape, dtype=np.int64)
    for between in range(len(other)):
        sums = one[:, between, None] + other[None, between, :]
        better = sums < least
        least = np.where(better, sums, least)
        where = np.where(better, between, where)
    return least, where


def arrivals(table: BoundaryTable, side: int) -> Floats:
    """Per state at an end of a range: seconds in which what comes from other stages arrives."""
    graph, setting = table.made.graph, table.made.setting
    numbers = (left_values, right_values)[side](graph)
    states = (table.left, table.right)[side]
    total = np.zeros(len(states))
    for position, v in enumerate(numbers):
        value = graph.values[v]
        if value.role in ("activation", "cotangent"):
            prices = arrival_s(value, setting.mesh)
            total += [prices[state[position]] for state in states]
    return setting.num_microbatches * total


def _meeting(before: BoundaryTable, after: BoundaryTable) -> Floats:
    """[right state, left state] -> 0 where the two layers agree; infinite where they do not.

    Values are matched in order. What has no match comes from, or goes to, layers further away, and
    arrives. If no states agree, values are resharded in between.
    """
    ones, others = right_values(before.made.graph), left_values(after.made.graph)
    matches = matched(
        [before.made.graph.values[v] for v in ones], [after.made.graph.values[v] for v in others]
    )
    mesh, count = after.made.setting.mesh, after.made.setting.num_microbatches
    apart = np.zeros((len(before.right), len(after.left)))
    moved = np.zeros_like(apart)
    for one, other in matches:
        value = after.made.graph.values[others[other]]
        table = reshard_table(value.shape, value.item_bytes, mesh)
        rows = np.array([table.index[state[one]] for state in before.right])
        columns = np.array([table.index[state[other]] for state in after.left])
        apart += np.where(rows[:, None] == columns[None, :], 0.0, np.inf)
        moved += table.seconds[np.ix_(rows, columns)]
    sides = (
        (before, ones, before.right, {one for one, _ in matches}),
        (after, others, after.left, {other for _, other in matches}),
    )
    arriving = [np.zeros(len(states)) for _, _, states, _ in sides]
    for seconds, (own, numbers, states, taken) in zip(arriving, sides, strict=True):
        for position, v in enumerate(numbers):
            value = own.made.graph.values[v]
            if position not in taken and value.role in ("activation", "cotangent"):
                prices = arrival_s(value, mesh)
                seconds += [count * prices[state[position]] for state in states]
    agreeing = apart if np.isfinite(apart).any() else count * moved
    return arriving[0][:, None] + arriving[1][None, :] + agreeing


def matched(ones: Sequence[Value], others: Sequence[Value]) -> list[tuple[int, int]]:
    """Positions of values that are the same on both sides, in order."""
    alike = [[(v.shape, v.item_bytes) for v in side] for side in (ones, others)]
    blocks = SequenceMatcher(None, alike[0], alike[1], autojunk=False).get_matching_blocks()
    return [(b.a + k, b.b + k) for b in blocks for k in range(b.size)]
