"""A partitioned boolean quadratic problem, and its exact reduction. No JAX.

Every node makes one choice; choices cost, and pairs of choices on edges do (infinite: forbidden).
A node without edges (R0), with one edge (R1) or with two (R2) is folded into its neighbours, which
loses nothing (Scholz and Eckstein 2002); so is a choice that can always be bettered by another
choice of its node, whatever the neighbours do (Goldstein 1994, for side chains of proteins).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Choices = NDArray[np.int64]
Edge = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Problem:
    """Attributes:
    nodes: per node, the cost of each choice.
    edges: (i, j) with i < j -> costs [choice of i, choice of j].
    """

    nodes: tuple[Floats, ...]
    edges: Mapping[Edge, Floats]

    def cost(self, choices: Sequence[int]) -> float:
        """Of one choice per node."""
        total = sum(float(costs[c]) for costs, c in zip(self.nodes, choices, strict=True))
        return total + sum(float(e[choices[i], choices[j]]) for (i, j), e in self.edges.items())


@dataclass(frozen=True, eq=False)
class _Folded:
    """A node that was folded into its neighbours, with what its best choice depends on.

    Attributes:
      choices: the numbers of those that were left, and their costs.
      neighbours: per neighbour its number, those of its choices that were left, and the costs
        [own choice, its choice].
    """

    node: int
    choices: Choices
    costs: Floats
    neighbours: tuple[tuple[int, Choices, Floats], ...]

    def best(self, chosen: Sequence[int]) -> int:
        total = self.costs
        for neighbour, left, costs in self.neighbours:
            total = total + costs[:, int(np.searchsorted(left, chosen[neighbour]))]
        return int(self.choices[np.argmin(total)])


@dataclass(frozen=True, eq=False)
class Reduced:
    """What is left of a problem.

    Attributes:
      core: the problem among the nodes that are left.
      nodes: their numbers in the whole problem.
      choices: per node of the core, the numbers of its choices that are left.
      cost: of what was folded away for good; infinite if no choices are allowed.
    """

    core: Problem
    nodes: tuple[int, ...]
    choices: tuple[Choices, ...]
    cost: float
    _folded: tuple[_Folded, ...]

    def complete(self, core_choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of all nodes of the whole problem, from those of the core's nodes."""
        chosen = [0] * (len(self.nodes) + len(self._folded))
        for node, left, choice in zip(self.nodes, self.choices, core_choices, strict=True):
            chosen[node] = int(left[choice])
        for fold in reversed(self._folded):
            chosen[fold.node] = fold.best(chosen)
        return tuple(chosen)


def reduced(problem: Problem, keep: Collection[int] = ()) -> Reduced:
    """Folds and prunes as long as that is exact.

    Args:
      keep: nodes that are left with all their choices.
    """
    work = _Work(problem, frozenset(keep))
    work.fold()
    while work.prune():
        work.fold()
    return work.result()


class _Work:
    """A problem while it is being reduced."""

    def __init__(self, problem: Problem, keep: frozenset[int]) -> None:
        self.keep = keep
        self.costs = {k: np.array(c, dtype=np.float64) for k, c in enumerate(problem.nodes)}
        self.left = {k: np.arange(len(c)) for k, c in self.costs.items()}
        self.edges: dict[int, dict[int, Floats]] = {k: {} for k in self.costs}
        self.constant = 0.0
        self.folded: list[_Folded] = []
        for (i, j), costs in problem.edges.items():
            self.connect(i, j, costs)
        for node in self.costs:
            if node not in keep:
                self.restrict(node, np.isfinite(self.costs[node]))

    def connect(self, i: int, j: int, costs: Floats) -> None:
        known = self.edges[i].get(j)
        total = costs if known is None else known + costs
        self.edges[i][j], self.edges[j][i] = total, total.T

    def restrict(self, node: int, alive: NDArray[np.bool_]) -> None:
        """Takes choices away; all of them: nothing is allowed."""
        if alive.all():
            return
        if not alive.any():
            self.constant = np.inf
            return
        self.costs[node], self.left[node] = self.costs[node][alive], self.left[node][alive]
        for other, costs in list(self.edges[node].items()):
            self.edges[node][other] = costs[alive]
            self.edges[other][node] = costs[alive].T

    def fold(self) -> None:
        """R0, R1 and R2, nodes with the fewest edges and lowest numbers first."""
        waiting = [(len(self.edges[node]), node) for node in self.costs if node not in self.keep]
        heapq.heapify(waiting)
        while waiting:
            degree, node = heapq.heappop(waiting)
            if degree > 2:
                break
            if node not in self.costs or degree != len(self.edges[node]):
                continue
            for other in self.fold_node(node):
                if other not in self.keep:
                    heapq.heappush(waiting, (len(self.edges[other]), other))

    def fold_node(self, node: int) -> list[int]:
        neighbours = sorted(self.edges[node])
        costs = self.costs.pop(node)
        tables = [self.edges[node][other] for other in neighbours]
        known = tuple((o, self.left[o], t) for o, t in zip(neighbours, tables, strict=True))
        self.folded.append(_Folded(node, self.left.pop(node), costs, known))
        del self.edges[node]
        for other in neighbours:
            del self.edges[other][node]
        if not neighbours:
            self.constant += float(costs.min())
        elif len(neighbours) == 1:
            self.costs[neighbours[0]] = self.costs[neighbours[0]] + (
                costs[:, None] + tables[0]
            ).min(0)
        else:
            one, other = neighbours
            through = (costs[:, None] + tables[0])[:, :, None] + tables[1][:, None, :]
            self.connect(one, other, through.min(0))
        return neighbours

    def prune(self) -> bool:
        """Takes away choices that another of the same node always betters; whether any was."""
        before = sum(len(c) for c in self.costs.values())
        for node in sorted(self.costs):
            if node not in self.keep and len(self.costs[node]) > 1:
                self.restrict(node, ~self.bettered(node))
        return sum(len(c) for c in self.costs.values()) < before

    def bettered(self, node: int) -> NDArray[np.bool_]:
        costs = self.costs[node]
        alive = np.isfinite(costs)
        if not alive.any():
            return ~alive
        with np.errstate(invalid="ignore"):
            worse = costs[:, None] - costs[None, :]
            for table in self.edges[node].values():
                rows = table[:, None, :] - table[None, :, :]
                rows[np.broadcast_to(np.isinf(table)[:, None, :], rows.shape)] = np.inf
                worse = worse + rows.min(axis=2)
        found = ~alive
        for choice in reversed(range(len(costs))):
            if alive[choice]:
                rivals = alive & (worse[choice] >= 0)
                rivals[choice] = False
                if rivals.any():
                    alive[choice], found[choice] = False, True
        return found

    def result(self) -> Reduced:
        nodes = tuple(sorted(self.costs))
        place = {node: k for k, node in enumerate(nodes)}
        edges = {
            (place[i], place[j]): self.edges[i][j]
            for i in nodes
            for j in sorted(self.edges[i])
            if i < j
        }
        core = Problem(tuple(self.costs[n] for n in nodes), edges)
        left = tuple(self.left[n] for n in nodes)
        return Reduced(core, nodes, left, self.constant, tuple(self.folded))
