"""Elimination that keeps only what may come near the optimum. No JAX.

Costs are measured as what they lie above a bound (reduced costs of the linear program), so they are
never negative, and a combination that is already further above than allowed is dropped. What is
left is exact: every combination within the allowance survives to the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from hetpass.planner.intra_op.pbqp import Floats, Problem

Codes = NDArray[np.int64]

_LARGEST_CODE = 1 << 62


@dataclass(frozen=True, eq=False)
class _Sparse:
    """Combinations of the choices of some nodes, by a code of mixed radix (the first node leads).

    Attributes:
      codes, costs: one per combination.
      least: per node, the least cost with each of its choices.
    """

    nodes: tuple[int, ...]
    codes: Codes
    costs: Floats
    least: Mapping[int, Floats]


@dataclass(frozen=True, eq=False)
class Survivors:
    """What is left over the kept nodes.

    Attributes:
      states: [combination, kept node] -> choice.
      costs: per combination, above the bound.
    """

    states: Codes
    costs: Floats
    _kept: tuple[int, ...]
    _order: tuple[tuple[int, tuple[int, ...], Codes, Codes], ...]
    _sizes: tuple[int, ...]

    def choices(self, combination: int) -> tuple[int, ...]:
        """The cheapest choices of all nodes."""
        chosen = dict(zip(self._kept, self.states[combination], strict=True))
        for node, others, codes, best in reversed(self._order):
            code = 0
            for other in others:
                code = code * self._sizes[other] + int(chosen[other])
            chosen[node] = int(best[np.searchsorted(codes, code)])
        return tuple(int(chosen[node]) for node in range(len(chosen)))


def survivors(
    above: Problem, kept: Sequence[int], allowance: float, most_entries: int
) -> Survivors | None:
    """All combinations of the kept nodes that some choices of the others bring within an allowance.

    Args:
      above: costs above a bound, none negative.
      most_entries: that may be joined in all; None is returned if it were more.
    """
    work = _Work(above, allowance, most_entries)
    waiting = set(range(len(above.nodes))) - set(kept)
    order = []
    while waiting:
        node = min(waiting, key=lambda k: (work.weight(k), k))
        joined = work.joined(node)
        if joined is None:
            return None
        waiting.remove(node)
        order.append(work.project(node, joined))
    final: _Sparse | None = _Sparse((), np.zeros(1, dtype=np.int64), np.zeros(1), {})
    for table in sorted(work.tables, key=lambda t: len(t.codes)):
        final = None if final is None else work.join(final, table)
    return None if final is None else work.finish(final, tuple(sorted(kept)), tuple(order))


class _Work:
    """The tables that are left, and a budget."""

    def __init__(self, above: Problem, allowance: float, budget: int) -> None:
        self.sizes = tuple(len(costs) for costs in above.nodes)
        self.allowance, self.budget = allowance, budget
        self.tables = [self.sparse((k,), costs) for k, costs in enumerate(above.nodes)]
        self.tables += [self.sparse(edge, costs) for edge, costs in above.edges.items()]

    def sparse(self, nodes: tuple[int, ...], costs: Floats) -> _Sparse:
        flat = costs.reshape(-1)
        codes = np.flatnonzero(flat <= self.allowance)
        return self.table(nodes, codes, flat[codes])

    def table(self, nodes: tuple[int, ...], codes: Codes, costs: Floats) -> _Sparse:
        bare = _Sparse(nodes, codes, costs, {})
        least = {}
        for node in nodes:
            least[node] = np.full(self.sizes[node], np.inf)
            np.minimum.at(least[node], self.pick(bare, (node,)), costs)
        return _Sparse(nodes, codes, costs, least)

    def weight(self, node: int) -> float:
        """How many combinations the tables of a node have together, at most."""
        around = {n for t in self.tables if node in t.nodes for n in t.nodes}
        dense = float(prod(float(self.sizes[n]) for n in around))
        lengths = [len(t.codes) for t in self.tables if node in t.nodes]
        return min(dense, float(prod(float(n) for n in lengths)))

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
        if prod(self.sizes[n] for n in {*one.nodes, *other.nodes}) > _LARGEST_CODE:
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
        keep = costs <= self.allowance
        rows, columns, costs = rows[keep], columns[keep], costs[keep]
        nodes = (*one.nodes, *(n for n in other.nodes if n not in shared))
        fresh = [n for n in other.nodes if n not in shared]
        radix = prod(self.sizes[n] for n in fresh)
        codes = one.codes[rows] * radix + self.pick(other, fresh)[columns]
        return self.promising(_Sparse(nodes, codes, costs, {}), others)

    def promising(self, table: _Sparse, others: Sequence[_Sparse]) -> _Sparse:
        """Without combinations that other tables, each by itself, lift above the allowance."""
        ahead = table.costs
        for node in table.nodes:
            touching = [t for t in others if {*t.nodes} & {*table.nodes} == {node}]
            if touching:
                least = np.sum([t.least[node] for t in touching], axis=0)
                ahead = ahead + least[self.pick(table, (node,))]
        keep = ahead <= self.allowance
        return _Sparse(table.nodes, table.codes[keep], table.costs[keep], {})

    def pick(self, table: _Sparse, nodes: Sequence[int]) -> Codes:
        """The codes of some of a table's nodes, in the given order."""
        digits, rest = {}, table.codes
        for node in reversed(table.nodes):
            rest, digits[node] = np.divmod(rest, self.sizes[node])
        code = np.zeros(len(table.codes), dtype=np.int64)
        for node in nodes:
            code = code * self.sizes[node] + digits[node]
        return code

    def project(self, node: int, table: _Sparse) -> tuple[int, tuple[int, ...], Codes, Codes]:
        """Puts back the least over a node's choices; its best choice by those around it."""
        others = tuple(n for n in table.nodes if n != node)
        codes, own = self.pick(table, others), self.pick(table, (node,))
        order = np.lexsort((own, table.costs, codes))
        codes = codes[order]
        leads = np.ones(len(codes), dtype=bool)
        leads[1:] = codes[1:] != codes[:-1]
        at = order[leads]
        self.tables.append(self.table(others, codes[leads], table.costs[at]))
        return node, others, codes[leads], own[at]

    def finish(
        self,
        final: _Sparse,
        kept: tuple[int, ...],
        order: tuple[tuple[int, tuple[int, ...], Codes, Codes], ...],
    ) -> Survivors:
        states = np.zeros((len(final.codes), len(kept)), dtype=np.int64)
        for column, node in enumerate(kept):
            states[:, column] = self.pick(final, (node,))
        return Survivors(states, final.costs, kept, order, self.sizes)
