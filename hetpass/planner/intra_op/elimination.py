"""Least costs for every state of some nodes: elimination of all others, one by one. No JAX.

Eliminating a node joins the tables that it is in and takes the least over its choices (Bertelè and
Brioschi 1972). Exact; how large tables grow depends on how tangled the problem is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from hetpass.planner.intra_op.pbqp import Floats, Problem

MOST_ENTRIES = 1 << 24


@dataclass(frozen=True, eq=False)
class _Table:
    """Costs over the choices of some nodes, in increasing order of their numbers."""

    nodes: tuple[int, ...]
    costs: Floats

    def over(self, nodes: Sequence[int]) -> Floats:
        """Broadcast to more nodes, also in increasing order."""
        shape = [1] * len(nodes)
        for node, size in zip(self.nodes, self.costs.shape, strict=True):
            shape[nodes.index(node)] = size
        return self.costs.reshape(shape)


@dataclass(frozen=True, eq=False)
class Eliminated:
    """The least cost for every state of the kept nodes.

    Attributes:
      kept: nodes, in increasing order.
      costs: shape [choices of kept[0], choices of kept[1], …].
    """

    kept: tuple[int, ...]
    costs: Floats
    _order: tuple[tuple[int, tuple[int, ...], NDArray[np.int64]], ...]

    def choices(self, state: Sequence[int]) -> tuple[int, ...]:
        """The cheapest choices of all nodes, given those of the kept ones."""
        chosen = dict(zip(self.kept, state, strict=True))
        for node, others, best in reversed(self._order):
            chosen[node] = int(best[tuple(chosen[other] for other in others)])
        return tuple(chosen[node] for node in range(len(chosen)))


def eliminated(
    problem: Problem, kept: Sequence[int] = (), most_entries: int = MOST_ENTRIES
) -> Eliminated | None:
    """Eliminates all nodes but the kept ones; None if that takes more entries than allowed."""
    order = elimination_order(problem, kept)
    if order.entries > most_entries:
        return None
    tables = [_Table((k,), costs) for k, costs in enumerate(problem.nodes)]
    tables += [_Table(edge, costs) for edge, costs in problem.edges.items()]
    found = []
    for node, others in order.nodes:
        tables, best = _without(node, others, tables)
        found.append((node, others, best))
    left = tuple(sorted(kept))
    total: Floats = np.zeros([len(problem.nodes[k]) for k in left])
    for table in tables:
        total = total + table.over(left)
    return Eliminated(left, total, tuple(found))


@dataclass(frozen=True)
class Order:
    """Attributes:
    nodes: in the order of elimination, each with the nodes around it at that time.
    entries: of all tables together.
    """

    nodes: tuple[tuple[int, tuple[int, ...]], ...]
    entries: int


def elimination_order(problem: Problem, kept: Sequence[int] = ()) -> Order:
    """The next node is always the one whose table is smallest, the lowest number of equals."""
    sizes = [len(costs) for costs in problem.nodes]
    around: dict[int, set[int]] = {k: set() for k in range(len(sizes))}
    for i, j in problem.edges:
        around[i].add(j)
        around[j].add(i)
    waiting = set(range(len(sizes))) - set(kept)
    order: list[tuple[int, tuple[int, ...]]] = []
    total = 0
    of = {k: sizes[k] * prod(sizes[o] for o in around[k]) for k in waiting}
    while waiting:
        node = min(waiting, key=lambda k: (of[k], k))
        total += of[node]
        waiting.remove(node)
        others = tuple(sorted(around.pop(node)))
        order.append((node, others))
        for other in others:
            around[other] |= set(others)
            around[other] -= {node, other}
            of[other] = sizes[other] * prod(sizes[o] for o in around[other])
    return Order(tuple(order), total)


def _without(
    node: int, others: tuple[int, ...], tables: list[_Table]
) -> tuple[list[_Table], NDArray[np.int64]]:
    """The tables without a node, and its best choice by those of the nodes around it."""
    joined: Floats = np.zeros(())
    everyone = (*others, node)
    in_order = sorted(everyone)
    for table in tables:
        if node in table.nodes:
            joined = joined + table.over(in_order)
    axis = in_order.index(node)
    rest = [table for table in tables if node not in table.nodes]
    best = joined.argmin(axis=axis)
    return [*rest, _Table(others, joined.min(axis=axis))], best
