"""The same problem as a linear program with transport edges, by HiGHS. No JAX.

A choice is a variable of its node, summing to one; a pair of choices is a variable of its edge, the
rows and columns of which sum to the choices of the two nodes (Koster, van Hoesel and Kolen 1998).
Without integrality the program is nearly always integral; HiGHS branches only where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetpass.planner.intra_op.pbqp import Choices, Floats, Problem


@dataclass(frozen=True)
class Effort:
    """Limits in counts, not in seconds, so that equal problems give equal answers.

    Attributes:
      node_limit: of the branching.
      gap: relative, at which branching ends.
      most_entries: in the tables of an elimination, above which the linear program is used.
      most_joined: combinations that a sparse elimination joins,
      most_limited: and under a memory limit, in each part that choices are divided into.
      allowances: how far above the bound it looks, relative, one after the other.
      most_states: of a boundary.
      refinements: rounds in which entries of boundary tables are solved by themselves,
      chain_gap: while ranges of layers are further than this above their lower bounds, relative.
      prices: of memory that are tried in a row.
      most_boxes: parts that are looked at under a memory limit; what then is left open is the
        answer's gap.
    """

    node_limit: int = 2000
    gap: float = 1e-9
    most_entries: int = 1 << 23
    most_joined: int = 1_000_000
    most_limited: int = 400_000
    allowances: tuple[float, ...] = (3e-3, 3e-2)
    most_states: int = 64
    refinements: int = 2
    chain_gap: float = 1e-2
    prices: int = 12
    most_boxes: int = 1


EXACT = Effort(most_limited=8_000_000, refinements=40, chain_gap=1e-9, most_boxes=200)
"""Leaves no gap, under a memory limit and over ranges of layers, in seconds instead of tenths."""


@dataclass(frozen=True)
class Solved:
    """Attributes:
    choices: per node; None if nothing is allowed or nothing was found.
    bound: no answer costs less.
    branches: nodes of the branching; 0 if the relaxation was integral.
    status: "optimal", "infeasible" or "limit".
    """

    choices: tuple[int, ...] | None
    bound: float
    branches: int
    status: str


def solved(problem: Problem, effort: Effort = Effort()) -> Solved:
    """The cheapest choices."""
    if not problem.nodes:
        return Solved((), 0.0, 0, "optimal")
    program = Transport(problem)
    relaxed = _relaxed(program)
    if relaxed is None:
        return Solved(None, np.inf, 0, "infeasible")
    if program.is_integral(relaxed.x):
        return Solved(program.choices(relaxed.x), relaxed.bound, 0, "optimal")
    return _branched(program, effort)


def slack(problem: Problem) -> Slack | None:
    """How far everything lies above the relaxation; None: infeasible."""
    program = Transport(problem)
    relaxed = _relaxed(program)
    if relaxed is None:
        return None
    return program.slack(relaxed.x, relaxed.bound, relaxed.reduced_costs)


@dataclass(frozen=True, eq=False)
class Slack:
    """Attributes:
    bound: no choices cost less.
    above: the same problem, with costs above the bound.
    used: per node, the choices that the relaxation makes, in whole or in part.
    """

    bound: float
    above: Problem
    used: tuple[Choices, ...]


@dataclass(frozen=True, eq=False)
class _Relaxed:
    x: Floats
    bound: float
    reduced_costs: Floats


def _relaxed(program: Transport) -> _Relaxed | None:
    """The program without integrality; None if nothing is allowed."""
    # scipy.optimize takes a third of a second to import: only who solves pays it.
    from scipy.optimize import linprog

    scale = program.scale()
    found = linprog(
        program.objective / scale, A_eq=program.sums(), b_eq=program.right, method="highs-ds"
    )
    if found.status != 0:
        return None
    return _Relaxed(found.x, found.fun * scale, found.lower.marginals * scale)


def _branched(program: Transport, effort: Effort) -> Solved:
    from scipy.optimize import Bounds, LinearConstraint, milp

    scale, sums = program.scale(), program.sums()
    constraints = [LinearConstraint(sums, program.right, program.right)]
    answer = milp(
        program.objective / scale,
        integrality=program.integrality,
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"node_limit": effort.node_limit, "mip_rel_gap": effort.gap},
    )
    if answer.status == 2:
        return Solved(None, np.inf, 0, "infeasible")
    bound = -np.inf if answer.mip_dual_bound is None else float(answer.mip_dual_bound) * scale
    chosen = None if answer.x is None else program.choices(answer.x)
    status = "optimal" if answer.status == 0 else "limit"
    return Solved(chosen, bound, int(answer.mip_node_count or 0), status)


class Transport:
    """Variables: allowed choices of all nodes, then allowed pairs of all edges.

    Attributes:
      objective: their costs.
      right: right sides of `sums`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.allowed = [np.flatnonzero(np.isfinite(c)) for c in problem.nodes]
        self.first = np.concatenate([[0], np.cumsum([len(a) for a in self.allowed])])
        self.pairs: list[tuple[int, int, NDArray[np.int64], NDArray[np.int64]]] = []
        parts = [c[a] for c, a in zip(problem.nodes, self.allowed, strict=True)]
        for (i, j), costs in problem.edges.items():
            inside = costs[np.ix_(self.allowed[i], self.allowed[j])]
            rows, columns = np.nonzero(np.isfinite(inside))
            self.pairs.append((i, j, rows, columns))
            parts.append(inside[rows, columns])
        self.objective = np.concatenate(parts)
        self.integrality = np.zeros(len(self.objective))
        self.integrality[: self.first[-1]] = 1
        self.right: Floats = np.zeros(0)

    def scale(self) -> float:
        """So that costs are near one, where HiGHS's tolerances are meant to be."""
        largest = float(np.abs(self.objective).max(initial=0.0))
        return largest / 1e3 if largest else 1.0

    def sums(self) -> Any:
        """One row per node, and one per row and per column of every edge."""
        from scipy.sparse import coo_array

        rows, columns, signs = [], [], []
        count = len(self.allowed)
        for node in range(count):
            variables = np.arange(self.first[node], self.first[node + 1])
            rows.append(np.full(len(variables), node))
            columns.append(variables)
            signs.append(np.ones(len(variables)))
        variable, row = int(self.first[-1]), count
        for i, j, one, other in self.pairs:
            pairs = variable + np.arange(len(one))
            for node, ends in ((i, one), (j, other)):
                own = np.arange(len(self.allowed[node]))
                rows += [row + ends, row + own]
                columns += [pairs, self.first[node] + own]
                signs += [np.ones(len(ends)), -np.ones(len(own))]
                row += len(own)
            variable += len(one)
        self.right = np.zeros(row)
        self.right[:count] = 1
        return coo_array(
            (np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns))),
            shape=(row, variable),
        ).tocsr()

    def row(self, costs: Problem) -> Floats:
        """Another cost of the same variables."""
        parts = [c[a] for c, a in zip(costs.nodes, self.allowed, strict=True)]
        for (i, j, one, other), key in zip(self.pairs, self.problem.edges, strict=True):
            table = costs.edges.get(key)
            inside = None if table is None else table[np.ix_(self.allowed[i], self.allowed[j])]
            parts.append(np.zeros(len(one)) if inside is None else inside[one, other])
        return np.concatenate(parts)

    def slack(self, x: Floats, bound: float, reduced_costs: Floats) -> Slack:
        """What a solution says of every choice.

        For any choices the reduced costs of nodes and edges add up to what they cost above the
        bound.
        """
        above = np.maximum(reduced_costs, 0.0)
        nodes, variable = [], 0
        for node, allowed in enumerate(self.allowed):
            costs = np.full(len(self.problem.nodes[node]), np.inf)
            costs[allowed] = above[variable : variable + len(allowed)]
            variable += len(allowed)
            nodes.append(costs)
        edges = {}
        for i, j, one, other in self.pairs:
            costs = np.full((len(nodes[i]), len(nodes[j])), np.inf)
            pairs = self.allowed[i][one], self.allowed[j][other]
            costs[pairs] = above[variable : variable + len(one)]
            variable += len(one)
            edges[i, j] = costs
        used = tuple(
            allowed[x[self.first[node] : self.first[node + 1]] > 1e-7]
            for node, allowed in enumerate(self.allowed)
        )
        return Slack(bound, Problem(tuple(nodes), edges), used)

    def is_integral(self, x: Floats) -> bool:
        """Whether every node makes one choice."""
        chosen = x[: self.first[-1]]
        return bool(np.all(np.minimum(chosen, 1 - chosen) < 1e-6))

    def choices(self, x: Floats) -> tuple[int, ...]:
        return tuple(
            int(allowed[np.argmax(x[self.first[node] : self.first[node + 1]])])
            for node, allowed in enumerate(self.allowed)
        )
