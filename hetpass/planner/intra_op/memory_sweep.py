"""Memory beside time: a price on memory is swept. No JAX.

Every price gives a corner of the lower convex hull of (memory, time) (Everett 1963). What lies
between corners, within one limit, is found by `memory_limits`.
"""

from __future__ import annotations

from hetpass.planner.intra_op.answers import Answer, answer_of, cheapest
from hetpass.planner.intra_op.linear_program import Effort, Solved
from hetpass.planner.intra_op.memory_limits import Point
from hetpass.planner.intra_op.program import Program

_NEAR = 1e-3
"""Corners of the hull whose memory differs by less are not told apart."""


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


class _Sweep:
    """Prices on memory, each solved once."""

    def __init__(self, made: Program, effort: Effort) -> None:
        self.made, self.effort = made, effort
        self.known: dict[float, tuple[Point, float] | None] = {}

    def at(self, price: float) -> tuple[Point, float] | None:
        """The cheapest assignment at a price in seconds per byte, and the least possible cost."""
        if price not in self.known:
            found = cheapest(self.made.weighed(price), self.effort)
            self.known[price] = (
                None if found.choices is None else (Point.of(self.made, found.choices), found.bound)
            )
        return self.known[price]

    def lean(self) -> Point | None:
        """An assignment of the least memory, as fast as that allows."""
        free, found = self.at(0.0), cheapest(self.made.memory, self.effort)
        if free is None or found.choices is None:
            return None
        leanest = Point.of(self.made, found.choices)
        rate = max(free[0].seconds, 1e-9) / max(free[0].memory, 1.0)
        for price in (1e3 * rate, 1e6 * rate):
            point = self.at(price)
            if point is not None and point[0].memory <= leanest.memory * (1 + 1e-9):
                return point[0]
        return leanest

    def hull(self) -> list[Point]:
        """Corners of the lower convex hull, fastest first."""
        fast, small = self.at(0.0), self.lean()
        if fast is None or small is None:
            return []
        return [fast[0], *self.between(fast[0], small, self.effort.prices)]

    def between(self, fast: Point, small: Point, depth: int) -> list[Point]:
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
