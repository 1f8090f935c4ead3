"""Memory beside time: a price on memory is swept. No JAX.

Every price gives a corner of the lower convex hull of (memory, time), and a bound on what any
assignment within a limit can reach (Lagrange; Everett 1963). What lies between corners is found by
the integer program with the limit as a row, where the gap is worth it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetpass.planner.intra_op.answers import Answer, answer_of, cheapest
from hetpass.planner.intra_op.linear_program import Effort, Limit, Solved, solved
from hetpass.planner.intra_op.program import Program


def fastest_within(made: Program, memory_bytes: float, effort: Effort = Effort()) -> Answer | None:
    """The fastest assignment whose memory is within a limit.

    A price on memory is raised until the limit is kept (a Lagrangian relaxation, which also bounds
    what any assignment within the limit can reach). Where a gap is left, the integer program with
    the limit as a row goes on from there, on small problems to the end.
    """
    sweep = _Sweep(made, effort)
    best, bound = sweep.within(memory_bytes)
    least = sweep.least_memory()
    if least is None or least.memory > memory_bytes:
        return None
    gap = (best.seconds - bound) / best.seconds if best is not None and best.seconds else np.inf
    if gap > effort.limit_gap and _variables(made) <= effort.most_variables:
        refined = solved(made.seconds, Limit(made.memory, memory_bytes * (1 - 1e-9)), effort)
        bound = max(bound, refined.bound)
        if refined.choices is not None:
            point = _Point.of(made, refined.choices)
            best = point if best is None or point.seconds < best.seconds else best
    if best is None:
        return None
    return answer_of(made, Solved(best.choices, bound, 0, "optimal"))


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

    def least_memory(self) -> _Point | None:
        """The assignment of the least memory; of several nearly the fastest."""
        free = self.at(0.0)
        if free is None:
            return None
        price = 1e3 * max(free[0].seconds, 1e-9) / max(free[0].memory, 1.0)
        found = self.at(price)
        return None if found is None else found[0]

    def within(self, limit: float) -> tuple[_Point | None, float]:
        """The best point found within a limit, and the best bound on any."""
        fast, small = self.at(0.0), self.least_memory()
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
        fast, small = self.at(0.0), self.least_memory()
        if fast is None or small is None:
            return []
        return [fast[0], *self.between(fast[0], small, self.effort.prices)]

    def between(self, fast: _Point, small: _Point, depth: int) -> list[_Point]:
        if depth == 0 or small.memory >= fast.memory * (1 - 1e-9):
            return [small] if small.memory < fast.memory else []
        price = (small.seconds - fast.seconds) / (fast.memory - small.memory)
        found = self.at(max(price, 0.0))
        if found is None:
            return [small]
        point = found[0]
        corner = fast.seconds + price * fast.memory
        if point.seconds + price * point.memory >= corner * (1 - 1e-9):
            return [small]
        return [*self.between(fast, point, depth - 1), *self.between(point, small, depth - 1)]


def _variables(made: Program) -> int:
    return sum(len(n) for n in made.seconds.nodes) + sum(
        e.size for e in made.seconds.edges.values()
    )
