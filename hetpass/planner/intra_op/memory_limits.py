"""The fastest assignment within one limit on memory after the other. No JAX.

The linear program under the limit bounds from below what any assignment can reach, with a price on
memory (Lagrange; Everett 1963). What cannot lie between that bound and the best that is known is
taken away, and an elimination finds the rest: of everything that looks alike from outside, what is
not bettered in both seconds and bytes. What it has looked through lifts the bound. Where it would
be too much, the gap is left, or (`linear_program.EXACT`) one choice that weighs much is decided
first, either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetpass.planner.intra_op.answers import Answer, answer_of, cheapest, fastest
from hetpass.planner.intra_op.limited_relaxation import LimitedRelaxation, LimitedSlack
from hetpass.planner.intra_op.linear_program import Effort, Solved, slack
from hetpass.planner.intra_op.pbqp import Choices, Problem, reduced
from hetpass.planner.intra_op.program import Program
from hetpass.planner.intra_op.sparse_elimination import Limit, survivors
from hetpass.planner.intra_op.tree_bounds import pruned

_MORE = 1.4
"""Each allowance is so many times the one before."""

_MORE_TILTS = (0.0, 0.3, -0.3, 1.0, -0.6, 3.0)

_NEAR = 1e-2
"""What the linear program uses is looked through at once only while the best lies further above."""

_LEAN = 10.0
"""A price on memory at which all of it costs so many times the fastest seconds."""

_FEW = 3000
"""Pairs of choices that are looked at at once, however far above the bound."""


@dataclass(frozen=True)
class Point:
    """Choices of a program, with their seconds and bytes."""

    choices: tuple[int, ...]
    seconds: float
    memory: float

    @classmethod
    def of(cls, made: Program, choices: tuple[int, ...]) -> Point:
        return cls(choices, made.seconds.cost(choices), made.memory.cost(choices))


@dataclass(frozen=True, eq=False)
class _Box:
    """A part of the choices.

    Attributes:
      seconds, memory: among the choices that are left of each node.
      left: their numbers.
      bound: no assignment in here takes less.
    """

    seconds: Problem
    memory: Problem
    left: tuple[Choices, ...]
    bound: float

    def only(self, kept: Sequence[NDArray[np.bool_] | Choices]) -> _Box:
        left = tuple(own[keep] for own, keep in zip(self.left, kept, strict=True))
        return _Box(_only(self.seconds, kept), _only(self.memory, kept), left, self.bound)


def _only(problem: Problem, kept: Sequence[NDArray[np.bool_] | Choices]) -> Problem:
    """The problem with some of the choices of each node."""
    own = [np.arange(len(c))[keep] for c, keep in zip(problem.nodes, kept, strict=True)]
    nodes = tuple(costs[k] for costs, k in zip(problem.nodes, own, strict=True))
    edges = {(i, j): costs[np.ix_(own[i], own[j])] for (i, j), costs in problem.edges.items()}
    return Problem(nodes, edges)


class MemoryLimits:
    """A program, and what was learnt from the limits before."""

    def __init__(self, made: Program, effort: Effort = Effort()) -> None:
        self.made, self.effort = made, effort
        self.fast = fastest(made, effort)
        self.known: list[Point] = []
        lean = cheapest(made.memory, effort)
        if self.fast is None or lean.choices is None:
            return
        self.known.append(Point.of(made, lean.choices))
        heavy = {k for k, costs in enumerate(made.memory.nodes) if np.ptp(costs)}
        heavy |= {k for edge in made.memory.edges for k in edge}
        self.rest = reduced(made.seconds, heavy)
        place = {node: k for k, node in enumerate(self.rest.nodes)}
        # What is not heavy weighs the same whatever it chooses: nothing, or what it always does.
        self.always = sum(float(c[0]) for k, c in enumerate(made.memory.nodes) if k not in heavy)
        self.memory = Problem(
            tuple(
                made.memory.nodes[node][left] if node in heavy else np.zeros(len(left))
                for node, left in zip(self.rest.nodes, self.rest.choices, strict=True)
            ),
            {(place[i], place[j]): costs for (i, j), costs in made.memory.edges.items()},
        )
        everything = tuple(np.arange(len(costs)) for costs in self.rest.core.nodes)
        self.whole = _Box(self.rest.core, self.memory, everything, -np.inf)
        self.starts: dict[bool, tuple[_Box, LimitedRelaxation]] = {}

    def fastest(self, memory_bytes: float) -> Answer | None:
        """The fastest assignment within a limit; None if there is none."""
        if self.fast is None or not self.known or self.known[0].memory > memory_bytes:
            return None
        if self.fast.memory_bytes <= memory_bytes:
            return self.fast
        search = _Search(self, memory_bytes)
        best, bound = search.run()
        self.known.append(best)
        return answer_of(self.made, Solved(best.choices, bound, search.boxes - 1, "optimal"))

    def start(self, memory_bytes: float) -> tuple[_Box, LimitedRelaxation]:
        """What limits begin with: those that a lean and still fast assignment keeps, without what
        takes longer than that whatever it weighs."""
        lean = self.lean
        small = lean is not None and lean.memory <= memory_bytes
        if small not in self.starts:
            box = self.whole
            measured = slack(box.seconds) if small else None
            if lean is not None and measured is not None:
                gap = lean.seconds - self.rest.cost - measured.bound
                above = pruned(measured.above, gap * (1 + 1e-9), tilts=(0.0,) * 3)
                kept = [np.isfinite(costs) for costs in above.nodes]
                if all(own.any() for own in kept):
                    box = box.only(kept)
            self.starts[small] = box, LimitedRelaxation(box.seconds, box.memory)
        return self.starts[small]

    @cached_property
    def lean(self) -> Point | None:
        """Of almost the least memory, as fast as that allows."""
        if self.fast is None:
            return None
        price = _LEAN * self.fast.seconds / max(self.fast.memory_bytes, 1.0)
        found = cheapest(self.made.weighed(price), self.effort)
        if found.choices is None:
            return None
        point = Point.of(self.made, found.choices)
        self.known.append(point)
        return point


class _Search:
    """One limit. Costs and bytes are of the core that reduction left."""

    def __init__(self, limits: MemoryLimits, memory_bytes: float) -> None:
        self.limits, self.effort = limits, limits.effort
        self.memory_bytes = memory_bytes
        self.limit = memory_bytes - limits.always
        self.start = limits.start(memory_bytes)
        self.best = min(
            (point for point in limits.known if point.memory <= memory_bytes),
            key=lambda point: point.seconds,
        )
        self.boxes = 0

    def run(self) -> tuple[Point, float]:
        """The best, and a bound on it."""
        box, relaxation = self.start
        found = relaxation.within(self.limit)
        waiting = [] if found is None else self.opened(box, found)
        while waiting and self.boxes < self.effort.most_boxes:
            box = waiting.pop()
            if box.bound < self.worth:
                relaxation = LimitedRelaxation(box.seconds, box.memory, warm=False)
                found = relaxation.within(self.limit)
                waiting += [] if found is None else self.opened(box, found)
        bounds = [box.bound for box in waiting]
        return self.best, min([*bounds, self.core_seconds]) + self.limits.rest.cost

    @property
    def core_seconds(self) -> float:
        return self.best.seconds - self.limits.rest.cost

    @property
    def worth(self) -> float:
        """Only what takes less than this betters the best."""
        return self.core_seconds - self.effort.gap * abs(self.best.seconds)

    def opened(self, box: _Box, found: LimitedSlack) -> list[_Box]:
        """What is left to look at of a box."""
        self.boxes += 1
        relaxed, price = found.slack, found.price
        if relaxed.bound >= self.worth:
            return []
        if self.core_seconds - relaxed.bound > _NEAR * abs(relaxed.bound):
            self.mix(box, relaxed.used)
        gap = self.core_seconds - relaxed.bound
        above = pruned(relaxed.above, gap, Limit(box.memory, self.limit, price))
        kept = [np.isfinite(costs) for costs in above.nodes]
        if relaxed.bound >= self.worth or not all(own.any() for own in kept):
            return []
        box = box.only(kept)
        proved = self.eliminated(box, _only(above, kept), relaxed.bound, price)
        if proved >= self.worth:
            return []
        box = replace(box, bound=max(box.bound, proved))
        return self.halves(box, [np.flatnonzero(own) for own in kept], relaxed.used)

    def mix(self, box: _Box, used: Sequence[Choices]) -> None:
        """The best among the choices that the linear program uses."""
        some = box.only(used)
        limit = Limit(some.memory, self.limit, 0.0)
        found = survivors(some.seconds, (), self.core_seconds, self.effort.most_limited, limit)
        if found is not None and len(found.costs):
            self.better(some, found.choices(int(np.argmin(found.costs))))

    def eliminated(self, box: _Box, above: Problem, bound: float, price: float) -> float:
        """Looks at all that lies up to an allowance above a bound, further and further.

        Returns:
          What nothing that was not looked at takes less than.
        """
        pairs = sum(int(np.isfinite(costs).sum()) for costs in above.edges.values())
        allowance = np.inf if pairs <= _FEW else self.effort.allowances[0] * abs(bound)
        proved, budget = bound, self.effort.most_limited
        while proved < self.worth:
            gap = self.core_seconds - bound
            allowance = gap if gap < _MORE * allowance else allowance
            limit = Limit(box.memory, self.limit, price)
            near = pruned(above, allowance, limit, _MORE_TILTS)
            kept = [np.isfinite(costs) for costs in near.nodes]
            if all(own.any() for own in kept):
                joined = self.near(box.only(kept), _only(near, kept), allowance, budget, price)
                if joined is None:
                    break
                budget -= joined
            proved = bound + allowance * (1 + 1e-9)
            allowance *= _MORE
        return proved

    def near(
        self, some: _Box, above: Problem, allowance: float, budget: int, price: float
    ) -> int | None:
        """Keeps the best within an allowance; how many combinations were joined, None: too many."""
        # Counted from the least, so that what is too much is seen early.
        least = [float(costs.min()) for costs in some.memory.nodes]
        nodes = zip(some.memory.nodes, least, strict=True)
        memory = Problem(tuple(costs - low for costs, low in nodes), some.memory.edges)
        limit = Limit(memory, self.limit - sum(least), price)
        found = survivors(above, (), allowance, budget, limit)
        if found is None:
            return None
        if len(found.costs):
            seconds = found.costs + price * (limit.at_most - found.weights)
            self.better(some, found.choices(int(np.argmin(seconds))))
        return found.joined

    def better(self, box: _Box, core: Sequence[int]) -> None:
        """Keeps choices if they are better, and within the limit."""
        chosen = [int(left[c]) for left, c in zip(box.left, core, strict=True)]
        point = Point.of(self.limits.made, self.limits.rest.complete(chosen))
        if point.seconds < self.best.seconds and point.memory <= self.memory_bytes:
            self.best = point

    def halves(self, box: _Box, kept: Sequence[Choices], used: Sequence[Choices]) -> list[_Box]:
        """Either way of the choice that the linear program splits and that weighs most."""
        split = [np.flatnonzero(np.isin(k, u)) for k, u in zip(kept, used, strict=True)]
        if all(len(own) < 2 for own in split):
            split = [np.arange(len(k)) for k in kept]
        weights = [costs[own] for costs, own in zip(box.memory.nodes, split, strict=True)]
        spans = [float(np.ptp(own)) if len(own) > 1 else -1.0 for own in weights]
        node = int(np.argmax(spans))
        if spans[node] < 0.0:  # nothing is open
            self.better(box, [0] * len(kept))
            return []
        if spans[node] > 0.0:
            light = box.memory.nodes[node] <= (weights[node].min() + weights[node].max()) / 2
        else:
            light = np.arange(len(kept[node])) == split[node][0]
        sides: list[list[NDArray[np.bool_]]] = [
            [np.ones(len(k), dtype=bool) for k in kept] for _ in range(2)
        ]
        sides[0][node], sides[1][node] = ~light, light
        return [box.only(side) for side in sides]
