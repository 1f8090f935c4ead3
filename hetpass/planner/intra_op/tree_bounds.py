"""What no choices within an allowance can use, by sums along trees. No JAX.

Costs above a bound are never negative, so the costs on the edges of a spanning tree alone bound
from below what a choice, or a pair of choices, comes to at least. On a tree that least cost is
exact, from one sweep up and one down (min-marginals).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetpass.planner.intra_op.pbqp import Edge, Floats, Problem
from hetpass.planner.intra_op.sparse_elimination import Limit

_TILTS = (0.0, 0.3, -0.3, 1.0, -0.6)


def pruned(
    above: Problem, allowance: float, limit: Limit | None = None, tilts: Sequence[float] = _TILTS
) -> Problem:
    """The same costs, infinite for choices and pairs that are lifted above the allowance.

    What is within a limit on a second cost and within the allowance is so at any other price of
    that cost too: `above + (other - price) * (second - at_most)` is no more than the allowance.

    Args:
      above: costs above a bound, none negative.
      tilts: one tree each; shares of the price that are added. Each tree prefers edges that cost
        much and were not in one.
    """
    nodes = [costs.copy() for costs in above.nodes]
    edges = {edge: costs.copy() for edge, costs in above.edges.items()}
    drawn = dict.fromkeys(edges, 0)
    for tilt in tilts:
        priced, within = Problem(tuple(nodes), edges), allowance
        if limit is not None and (change := tilt * limit.price):
            priced = _tilted(priced, limit, change)
            within += change * limit.at_most
        tree = _tree(priced, drawn, allowance)
        for edge in tree:
            drawn[edge] += 1
        # What is on no edge of the tree may be negative now.
        beside = {*priced.edges} - {*tree}
        within -= sum(min(0.0, float(priced.edges[edge].min())) for edge in beside)
        least, pairs = _marginals(priced, tree)
        for node, costs in enumerate(least):
            nodes[node][costs > within] = np.inf
        for edge, costs in pairs.items():
            edges[edge][costs > within] = np.inf
        for (i, j), costs in edges.items():
            costs[np.isinf(nodes[i])] = np.inf
            costs[:, np.isinf(nodes[j])] = np.inf
    return Problem(tuple(nodes), edges)


def least_between(above: Problem, ends: tuple[int, int], allowance: float) -> Floats:
    """[choice of one node, choice of another] -> what any choices with both come to at least.

    Args:
      above: costs above a bound, none negative.
      allowance: costs beyond it do not matter in the choice of trees.
    """
    found = np.zeros([len(above.nodes[end]) for end in ends])
    drawn = dict.fromkeys(above.edges, 0)
    for _ in range(len(_TILTS)):
        tree = _tree(above, drawn, allowance)
        for edge in tree:
            drawn[edge] += 1
        for axis, (one, other) in enumerate((ends, ends[::-1])):
            by_choice = found if axis == 0 else found.T
            for choice in range(len(by_choice)):
                nodes = list(above.nodes)
                nodes[one] = np.full(len(nodes[one]), np.inf)
                nodes[one][choice] = above.nodes[one][choice]
                least, _ = _marginals(Problem(tuple(nodes), above.edges), tree)
                by_choice[choice] = np.maximum(by_choice[choice], least[other])
    return found


def _tilted(problem: Problem, limit: Limit, change: float) -> Problem:
    nodes = tuple(
        own + change * second for own, second in zip(problem.nodes, limit.costs.nodes, strict=True)
    )
    edges = dict(problem.edges)
    for edge, second in limit.costs.edges.items():
        edges[edge] = edges[edge] + change * second
    return Problem(nodes, edges)


def _tree(problem: Problem, drawn: Mapping[Edge, int], allowance: float) -> list[Edge]:
    """Of the greatest mean cost, less what was drawn before (Kruskal 1956); or a forest."""
    worth = {
        edge: float(np.minimum(costs, allowance).mean()) / (1 + 2 * drawn[edge])
        for edge, costs in problem.edges.items()
    }
    part = list(range(len(problem.nodes)))

    def root(node: int) -> int:
        while part[node] != node:
            part[node] = part[part[node]]
            node = part[node]
        return node

    found = []
    for edge in sorted(worth, key=lambda e: (-worth[e], e)):
        one, other = root(edge[0]), root(edge[1])
        if one != other:
            part[one] = other
            found.append(edge)
    return found


def _marginals(problem: Problem, tree: Sequence[Edge]) -> tuple[list[Floats], dict[Edge, Floats]]:
    """The least cost with each choice of a node, and with each pair on an edge of the tree.

    Where there are several trees (nothing connects them), the least of the others is counted too.
    """
    nodes, edges = problem.nodes, problem.edges
    around: list[list[int]] = [[] for _ in nodes]
    for i, j in tree:
        around[i].append(j)
        around[j].append(i)

    def costs(one: int, other: int) -> Floats:
        return edges[one, other] if one < other else edges[other, one].T

    order, parent = _walk(around)
    below = [own.copy() for own in nodes]  # a choice, with all that hangs on it
    up: dict[int, Floats] = {}
    for node in reversed(order):
        if (above := parent[node]) is not None:
            up[node] = (costs(above, node) + below[node]).min(axis=1)
            below[above] = below[above] + up[node]
    roots = [node for node in order if parent[node] is None]
    total = sum(float(below[root].min()) for root in roots)
    least, pairs = list(below), {}
    for root in roots:
        others = total - float(below[root].min())
        least[root] = below[root] + (others if np.isfinite(others) else 0.0)
    for node in order:
        if (above := parent[node]) is not None:
            finite = np.isfinite(least[above])  # so is what comes up from below
            rest = np.full(len(finite), np.inf)
            rest[finite] = least[above][finite] - up[node][finite]
            pair = rest[:, None] + costs(above, node) + below[node]
            least[node] = pair.min(axis=0)
            pairs[min(above, node), max(above, node)] = pair if above < node else pair.T
    return least, pairs


def _walk(around: Sequence[Sequence[int]]) -> tuple[list[int], list[int | None]]:
    """All nodes, each after its parent."""
    order: list[int] = []
    parent: list[int | None] = [None] * len(around)
    seen = [False] * len(around)
    for root in range(len(around)):
        if seen[root]:
            continue
        waiting, seen[root] = [root], True
        while waiting:
            node = waiting.pop()
            order.append(node)
            for other in around[node]:
                if not seen[other]:
                    seen[other], parent[other] = True, node
                    waiting.append(other)
    return order, parent
