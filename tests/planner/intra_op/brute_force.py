"""The cheapest choices of a small problem by trying all of them."""

from __future__ import annotations

import numpy as np


def brute_force(problem, memory=None, at_most=np.inf, most_entries=40_000_000):
    """The least cost over all choices (whose memory is within the limit); None if too many.

    All combinations are laid out as one array, one axis per node. Without a limit, nodes are laid
    out next to their neighbours, and an axis is minimized away once all edges of it are counted.
    """
    held = memory is not None and np.isfinite(at_most)
    order = list(range(len(problem.nodes))) if held else _near(problem)
    total, used, alive = np.zeros(()), np.zeros(()), []
    for position, k in enumerate(order):
        seen = {*order[: position + 1]}
        alive.append(k)
        if total.size * len(problem.nodes[k]) > most_entries:
            return None
        total = total[..., None] + problem.nodes[k]
        used = used[..., None] + memory.nodes[k] if held else used
        for (i, j), costs in problem.edges.items():
            if k in (i, j) and seen >= {i, j}:
                place = alive.index(i), alive.index(j), len(alive)
                total = total + _spread(costs, *place)
                if held and (i, j) in memory.edges:
                    used = used + _spread(memory.edges[i, j], *place)
        if not held:
            for i in [i for i in alive if all(seen >= {*e} for e in problem.edges if i in e)]:
                total = total.min(axis=alive.index(i))
                alive.remove(i)
    if held:
        total = np.where(used <= at_most, total, np.inf)
    return float(total.min())


def _near(problem):
    """An order in which few nodes are waiting for neighbours at any time."""
    around = {k: {k} for k in range(len(problem.nodes))}
    for i, j in problem.edges:
        around[i].add(j)
        around[j].add(i)
    order: list[int] = []
    while len(order) < len(around):
        waiting = {k for k in order if around[k] - {*order}}
        rest = [k for k in around if k not in order]
        order.append(
            min(
                rest,
                key=lambda k: (
                    len(around[k] - {*order} - {k})
                    - (k in set().union(*(around[w] for w in waiting), set())),
                    k,
                ),
            )
        )
    return order


def _spread(costs, i, j, rank):
    shape = [1] * rank
    shape[i], shape[j] = costs.shape
    return (costs if i < j else costs.T).reshape(shape)
