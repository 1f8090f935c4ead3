"""Elimination that keeps only what may come near the optimum. No JAX.

Costs are measured as what they lie above a bound (reduced costs of the linear program), so they are
never negative, and a combination that is already further above than allowed is dropped. What is
left is exact: every combination within the allowance survives to the end.

A second cost (memory) may be limited. Then of the combinations that look alike to all that is left,
those survive of which none is better in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from hetpass.planner.intra_op.pbqp import Floats, Problem

Codes = NDArray[np.int64]

_MOST_BITS = 62
_ALIKE = 1e-10
"""Differences below this share of a limit or an allowance are rounding, and are not told apart."""


@dataclass(frozen=True, eq=False)
class Limit:
    """A second cost of the same nodes and edges.

    Attributes:
      at_most: what it may come to.
      price: what a unit of it costs in the problem that is eliminated, beside the first cost.
    """

    costs: Problem
    at_most: float
    price: float


@dataclass(frozen=True, eq=False)
class _Sparse:
    """Combinations of the choices of some nodes, by a code: bits for every node, the first leads.

    Attributes:
      codes, costs, weights: one per combination; weights are the second cost.
      least: per node, the least cost with each of its choices.
      sources: what it was made from, with the row there of every combination.
    """

    nodes: tuple[int, ...]
    codes: Codes
    costs: Floats
    weights: Floats
    least: Mapping[int, Floats]
    sources: tuple[tuple[_Sparse, Codes], ...] = ()

    def rows(self, chosen: NDArray[np.bool_] | Codes) -> _Sparse:
        """Some of the combinations."""
        sources = tuple((table, rows[chosen]) for table, rows in self.sources)
        own = self.codes[chosen], self.costs[chosen], self.weights[chosen]
        return _Sparse(self.nodes, *own, {}, sources)


@dataclass(frozen=True, eq=False)
class Survivors:
    """What is left over the kept nodes.

    Attributes:
      states: [combination, kept node] -> choice.
      costs: per combination, above the bound.
      weights: the second cost.
      joined: combinations that were joined on the way.
    """

    states: Codes
    costs: Floats
    weights: Floats
    joined: int
    _final: _Sparse
    _bits: tuple[int, ...]
    _numbers: tuple[Codes, ...]

    def choices(self, combination: int) -> tuple[int, ...]:
        """The cheapest choices of all nodes."""
        chosen: dict[int, int] = {}
        waiting = [(self._final, combination)]
        while waiting:
            table, row = waiting.pop()
            rest = int(table.codes[row])
            for node in reversed(table.nodes):
                chosen[node] = rest & ((1 << self._bits[node]) - 1)
                rest >>= self._bits[node]
            waiting += [(source, int(rows[row])) for source, rows in table.sources]
        return tuple(int(own[chosen[node]]) for node, own in enumerate(self._numbers))


def survivors(
    above: Problem,
    kept: Sequence[int],
    allowance: float,
    most_entries: int,
    limit: Limit | None = None,
) -> Survivors | None:
    """All combinations of the kept nodes that some choices of the others bring within an allowance.

    Args:
      above: costs above a bound, none negative.
      most_entries: that may be joined in all; None is returned if it were more.
      limit: then of each combination there may be several, the faster the heavier.
    """
    work = _Work(above, allowance, most_entries, limit)
    waiting = set(range(len(above.nodes))) - set(kept)
    weights = {node: work.weight(node) for node in waiting}
    while waiting:
        node = min(waiting, key=lambda k: (weights[k], k))
        joined = work.joined(node)
        if joined is None:
            return None
        waiting.remove(node)
        work.project(node, joined)
        for other in work.tables[-1].nodes:
            if other in waiting:
                weights[other] = work.weight(other)
    final: _Sparse | None = work.table((), np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros(1))
    for table in sorted(work.tables, key=lambda t: len(t.codes)):
        final = None if final is None else work.join(final, table)
    return None if final is None else work.finish(final, tuple(sorted(kept)))


class _Work:
    """The tables that are left, and a budget."""

    def __init__(
        self, above: Problem, allowance: float, budget: int, limit: Limit | None = None
    ) -> None:
        # Choices are numbered among those of their node that may come near at all.
        self.numbers = tuple(np.flatnonzero(costs <= allowance) for costs in above.nodes)
        self.sizes = tuple(len(own) for own in self.numbers)
        self.bits = tuple(max(size - 1, 0).bit_length() for size in self.sizes)
        self.allowance, self.budget, self.most = allowance, budget, budget
        self.at_most = np.inf if limit is None else limit.at_most
        self.price = 0.0 if limit is None else limit.price
        second = None if limit is None else limit.costs
        self.tables = [
            self.sparse((k,), costs, None if second is None else second.nodes[k])
            for k, costs in enumerate(above.nodes)
        ]
        self.tables += [
            self.sparse(edge, costs, None if second is None else second.edges.get(edge))
            for edge, costs in above.edges.items()
        ]

    def sparse(self, nodes: tuple[int, ...], costs: Floats, weights: Floats | None) -> _Sparse:
        own = np.ix_(*(self.numbers[node] for node in nodes))
        places = np.nonzero(costs[own] <= self.allowance)
        codes = places[0]
        if len(nodes) == 2:
            codes = (codes << self.bits[nodes[1]]) | places[1]
        found = np.zeros(len(codes)) if weights is None else weights[own][places]
        return self.table(nodes, codes, costs[own][places], found)

    def table(
        self,
        nodes: tuple[int, ...],
        codes: Codes,
        costs: Floats,
        weights: Floats,
        sources: tuple[tuple[_Sparse, Codes], ...] = (),
    ) -> _Sparse:
        bare = _Sparse(nodes, codes, costs, weights, {})
        least = {}
        for node in nodes:
            least[node] = np.full(self.sizes[node], np.inf)
            np.minimum.at(least[node], self.pick(bare, (node,)), costs)
        return _Sparse(nodes, codes, costs, weights, least, sources)

    def weight(self, node: int) -> float:
        """How many combinations the tables of a node have together, if they are independent."""
        own = [t for t in self.tables if node in t.nodes]
        around = {n for t in own for n in t.nodes}
        dense = prod(float(self.sizes[n]) for n in around)
        shares = [len(t.codes) / max(prod(float(self.sizes[n]) for n in t.nodes), 1.0) for t in own]
        return dense * prod(min(share, 1.0) for share in shares)

    def joined(self, node: int) -> _Sparse | None:
        """All tables of a node in one; None if the budget is used up."""
        own = [t for t in self.tables if node in t.nodes]
        own.sort(key=lambda t: len(t.codes))
        self.tables = [t for t in self.tables if node not in t.nodes]
        total = own.pop(0)
        while own:  # next what shares most, so that combinations stay few
            table = max(own, key=lambda t: (len({*t.nodes} & {*total.nodes}), -len(t.codes)))
            own.remove(table)
            found = self.join(total, table, [*own, *self.tables])
            if found is None:
                return None
            total = found
        return total

    def join(self, one: _Sparse, other: _Sparse, others: Sequence[_Sparse] = ()) -> _Sparse | None:
        if sum(self.bits[n] for n in {*one.nodes, *other.nodes}) > _MOST_BITS:
            return None
        shared = [n for n in one.nodes if n in other.nodes]
        keys, other_keys = self.pick(one, shared), self.pick(other, shared)
        order = np.argsort(other_keys, kind="stable")
        sorted_keys = other_keys[order]
        first = np.searchsorted(sorted_keys, keys, side="left")
        count = np.searchsorted(sorted_keys, keys, side="right") - first
        total = int(count.sum())
        self.budget -= total
        if self.budget < 0:
            return None
        rows = np.repeat(np.arange(len(keys)), count)
        offsets = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
        columns = order[first[rows] + offsets]
        costs = one.costs[rows] + other.costs[columns]
        weights = one.weights[rows] + other.weights[columns]
        keep = (costs <= self.allowance) & (weights <= self.at_most)
        rows, columns, costs, weights = rows[keep], columns[keep], costs[keep], weights[keep]
        fresh = [n for n in other.nodes if n not in shared]
        room = sum(self.bits[n] for n in fresh)
        codes = (one.codes[rows] << room) | self.pick(other, fresh)[columns]
        sources = (one, rows), (other, columns)
        made = _Sparse((*one.nodes, *fresh), codes, costs, weights, {}, sources)
        return self.promising(made, others)

    def promising(self, table: _Sparse, others: Sequence[_Sparse]) -> _Sparse:
        """Without combinations that other tables, each by itself, lift above the allowance."""
        ahead, own = table.costs, {*table.nodes}
        touching: dict[int, list[Floats]] = {}
        for t in others:
            shared = own.intersection(t.nodes)
            if len(shared) == 1:
                (node,) = shared
                touching.setdefault(node, []).append(t.least[node])
        for node, least in touching.items():
            ahead = ahead + np.sum(least, axis=0)[self.pick(table, (node,))]
        return table.rows(ahead <= self.allowance)

    def pick(self, table: _Sparse, nodes: Sequence[int]) -> Codes:
        """The codes of some of a table's nodes, in the given order."""
        if tuple(nodes) == table.nodes:
            return table.codes
        shifts, at = {}, 0
        for node in reversed(table.nodes):
            shifts[node] = at
            at += self.bits[node]
        code = np.zeros(len(table.codes), dtype=np.int64)
        for node in nodes:
            mask = (1 << self.bits[node]) - 1
            code = (code << self.bits[node]) | ((table.codes >> shifts[node]) & mask)
        return code

    def project(self, node: int, table: _Sparse) -> None:
        """Puts back what is best over a node's choices."""
        others = tuple(n for n in table.nodes if n != node)
        codes = self.pick(table, others)
        first, second = self.told_apart(table)
        order = np.lexsort((first, codes))
        codes, second = codes[order], second[order]
        leads = np.ones(len(codes), dtype=bool)
        leads[1:] = codes[1:] != codes[:-1]
        # Lighter than all that is cheaper: later groups are shifted below earlier ones.
        group = np.cumsum(leads) - 1
        shifted = second - group * (int(second.max(initial=0)) + 1)
        leads[1:] |= shifted[1:] < np.minimum.accumulate(shifted)[:-1]
        at = order[leads]
        made = self.table(others, codes[leads], table.costs[at], table.weights[at], ((table, at),))
        self.tables.append(made)

    def told_apart(self, table: _Sparse) -> tuple[Floats, Codes]:
        """Both costs, so rounded that equal ones are equal; the second in units of a share."""
        if not np.isfinite(self.at_most):
            return table.costs, np.zeros(len(table.codes), dtype=np.int64)
        unit = _ALIKE * max(abs(self.at_most), 1.0)
        second = np.rint(table.weights / unit).astype(np.int64)
        second -= int(second.min(initial=0))
        first = table.costs - self.price * table.weights
        if np.isfinite(self.allowance) and self.allowance > 0:
            first = np.rint(first / (_ALIKE * self.allowance))
        return first, second

    def finish(self, final: _Sparse, kept: tuple[int, ...]) -> Survivors:
        final = final.rows(final.weights <= self.at_most)
        states = np.zeros((len(final.codes), len(kept)), dtype=np.int64)
        for column, node in enumerate(kept):
            states[:, column] = self.numbers[node][self.pick(final, (node,))]
        joined = self.most - self.budget
        return Survivors(states, final.costs, final.weights, joined, final, self.bits, self.numbers)
