"""Memory beside time: a price on memory is swept. No JAX.

Every price gives a corner of the lower convex hull of (memory, time), and a bound on what any
assignment within a limit can reach (Lagrange; Everett 1963). What lies between corners is found by
the integer program with the limit as a row, where the gap is worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetpass.planner.intra_op.answers import Answer, answer_of, cheapest
from hetpass.planner.intra_op.linear_program import Effort, Limit, Solved, solved
from hetpass.planner.intra_op.pbqp import Choices, Problem
from hetpass.planner.intra_op.program import Program

_NEAR = 1e-3
"""Corners of the hull whose memory differs by less are not told apart."""


def fastest_within(made: Program, memory_bytes: float, effort: Effort = Effort()) -> Answer | None:
    """The fastest assignment whose memory is within a limit; None if there is none.

    A price on memory is raised until the limit is kept (a Lagrangian relaxation, which also bounds
    what any assignment within the limit can reach). Where a gap is left, an integer program mixes
    the choices of all assignments that were found, and then, on small problems, all choices.
    """
    sweep = _Sweep(made, effort)
    best, bound = sweep.within(memory_bytes)
    if best is None:
        return None
    points = [found[0] for found in sweep.known.values() if found is not None]
    mixed = tuple(
        np.array(sorted({point.choices[node] for point in (*points, best)}))
        for node in range(len(made.nodes))
    )
    everything = tuple(np.arange(len(costs)) for costs in made.seconds.nodes)
    for allowed in (mixed, everything):
        within = _only(made.seconds, allowed)
        if best.seconds - bound <= effort.limit_gap * best.seconds:
            break
        if _variables(within) > effort.most_variables:
            continue
        limit = Limit(_only(made.memory, allowed), memory_bytes * (1 - 1e-9))
        found = solved(within, limit, effort)
        if allowed is everything:
            bound = max(bound, found.bound)
        if found.choices is not None:
            choices = tuple(int(a[c]) for a, c in zip(allowed, found.choices, strict=True))
            best = min(best, _Point.of(made, choices), key=lambda point: point.seconds)
    return answer_of(made, Solved(best.choices, bound, 0, "optimal"))


def _only(problem: Problem, allowed: Sequence[Choices]) -> Problem:
    """The problem with some of the choices of each node."""
    nodes = tuple(costs[own] for costs, own in zip(problem.nodes, allowed, strict=True))
    edges = {(i, j): e[np.ix_(allowed[i], allowed[j])] for (i, j), e in problem.edges.items()}
    return Problem(nodes, edges)


def pareto(made: Program, effort: Effort = Effort()) -> tuple[Answer, ...]:
    """Answers of which none is better in both time and memory, fastest first.

    They are the corners of the lower convex hull: each is the cheapest at some price of memory.
    """
    return tuple(
        answer
        for point in _Sweep(made, effort).hull()
        if (answer := answer_of(made, Solved(point.choices, point.seconds, 0, "optimal")))
        is not None
    )


@dataclass(frozen=True)
class _Point:
    choices: tuple[int, ...]
    seconds: float
    memory: float

    @classmethod
    def of(cls, made: Program, choices: tuple[int, ...]) -> _Point:
        return cls(choices, made.seconds.cost(choices), made.memory.cost(choices))


class _Sweep:
    """Prices on memory, each solved once."""

    def __init__(self, made: Program, effort: Effort) -> None:
        self.made, self.effort = made, effort
        self.known: dict[float, tuple[_Point, float] | None] = {}

    def at(self, price: float) -> tuple[_Point, float] | None:
        """The cheapest assignment at a price in seconds per byte, and the least possible cost."""
        if price not in self.known:
            found = cheapest(self.made.weighed(price), self.effort)
            self.known[price] = (
                None
                if found.choices is None
                else (_Point.of(self.made, found.choices), found.bound)
            )
        return self.known[price]

    def lean(self) -> _Point | None:
        """An assignment of the least memory, as fast as that allows."""
        free, found = self.at(0.0), cheapest(self.made.memory, self.effort)
        if free is None or found.choices is None:
            return None
        leanest = _Point.of(self.made, found.choices)
        rate = max(free[0].seconds, 1e-9) / max(free[0].memory, 1.0)
        for price in (1e3 * rate, 1e6 * rate):
            point = self.at(price)
            if point is not None and point[0].memory <= leanest.memory * (1 + 1e-9):
                return point[0]
        return leanest

    def within(self, limit: float) -> tuple[_Point | None, float]:
        """The best point found within a limit, and the best bound on any."""
        fast, small = self.at(0.0), self.lean()
        if fast is None or small is None:
            return None, np.inf
        bound = fast[1]
        if fast[0].memory <= limit:
            return fast[0], bound
        if small.memory > limit:
            return None, np.inf
        over, under = fast[0], small
        for _ in range(self.effort.prices):
            price = (under.seconds - over.seconds) / (over.memory - under.memory)
            found = self.at(price)
            if found is None:
                break
            bound = max(bound, found[1] - price * limit)
            point = found[0]
            corner = min(over.seconds + price * over.memory, under.seconds + price * under.memory)
            if point.seconds + price * point.memory >= corner * (1 - 1e-9):
                break
            if point.memory <= limit:
                under = point
            else:
                over = point
        return under, bound

    def hull(self) -> list[_Point]:
        """Corners of the lower convex hull, fastest first."""
        fast, small = self.at(0.0), self.lean()
        if fast is None or small is None:
            return []
        return [fast[0], *self.between(fast[0], small, self.effort.prices)]

    def between(self, fast: _Point, small: _Point, depth: int) -> list[_Point]:
        if small.memory >= fast.memory * (1 - 1e-9):
            return []
        if depth == 0 or small.memory >= fast.memory * (1 - _NEAR):
            return [small]
        price = (small.seconds - fast.seconds) / (fast.memory - small.memory)
        found = self.at(max(price, 0.0))
        if found is None:
            return [small]
        point = found[0]
        corner = fast.seconds + price * fast.memory
        if point.seconds + price * point.memory >= corner * (1 - 1e-9):
            return [small]
        return [*self.between(fast, point, depth - 1), *self.between(point, small, depth - 1)]


def _variables(problem: Problem) -> int:
    return sum(len(n) for n in problem.nodes) + sum(e.size for e in problem.edges.values())
