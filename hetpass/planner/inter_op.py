"""The inter-op program: stages on parts of unlike groups so that the step is shortest. No JAX.

Minimizes T = fill + load (`planner.objective`) over the cuts of the layers, the part of a group
that each stage takes, the order of groups, and the microbatches in flight; devices may stay idle.
For a bound Q on the load, `planner.suffix_program` finds the shortest fill f(Q). Since f never
rises with Q, every answer rules out a range of bounds: with T* the best so far, a load below Q can
only help if it is below T* - f(Q). So Q descends, mostly in long jumps, from T* - f(∞) to the
smallest feasible load, which bisection finds first; no list of candidate bounds is needed, and the
answer is exact up to `tolerance`. (Alpa, OSDI 2022, tries every distinct stage time.)

Solving without regard to microbatches in flight is faster and a lower bound; where its answer fits,
it is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetpass.cost.tables import CostTables
from hetpass.planner.objective import ANY, Deltas, Pick, Priced, cheapest, fits, priced
from hetpass.planner.resources import ResourceGraph, any_order, any_order_states, one_run
from hetpass.planner.suffix_program import SuffixProgram, choices_of

_EXACT_STATES = 20_000
_BISECTIONS = 40
_ROUNDING = 1e-9

Progress = Callable[[int, float], None]
"""Called with the number of bounds solved, and the best T in seconds."""


@dataclass(frozen=True)
class InterOpOptions:
    """How to search.

    Attributes:
      order: group names in the only order that is allowed, one run of stages each; None: any.
      one_run: whether each group takes one contiguous run of stages; None: where the exact state
        is too large.
      allowed: what the schedule allows for in-flight counts of neighbours.
      tolerance: of T, relative: the answer is at most so much above the optimum.
      max_bounds: how many bounds are solved at most; the gap says what that leaves open.
      at_most_s: a T above this is of no interest: None may be returned although some would fit.
      known: pipelines to begin with, from a coarser search.
      bisection: the smallest feasible load is found up to this factor before the descent.
    """

    order: tuple[str, ...] | None = None
    one_run: bool | None = None
    allowed: Deltas = ANY
    tolerance: float = 1e-9
    max_bounds: int = 400
    at_most_s: float | None = None
    known: tuple[tuple[Pick, ...], ...] = ()
    bisection: float = 0.02


@dataclass(frozen=True)
class InterOpResult:
    """What was found.

    Attributes:
      best: the pipeline of the smallest T.
      others: further pipelines that were met, best first.
      gap: (T - lower bound) / T; zero up to the tolerance unless `max_bounds` ended the search.
      bounds: how many were solved.
      graph: the resource states, "any order" or "one run".
      interrupted: by a KeyboardInterrupt; the best so far is given.
    """

    best: Priced
    others: tuple[Priced, ...]
    gap: float
    bounds: int
    graph: str
    interrupted: bool = False


def inter_op(
    tables: CostTables,
    options: InterOpOptions = InterOpOptions(),
    progress: Progress | None = None,
) -> InterOpResult | None:
    """The pipeline of the smallest T; None if none fits.

    Deterministic: equal tables give an equal result.
    """
    search = _Search(tables, options, progress)
    return search.result() if search.run() else None


def suffix_program(tables: CostTables, options: InterOpOptions) -> SuffixProgram:
    """The program that is solved for one bound after another."""
    graph = resource_graph(tables, options)
    return SuffixProgram(tables, choices_of(tables), graph, allowed=options.allowed)


def resource_graph(tables: CostTables, options: InterOpOptions) -> ResourceGraph:
    """The states of devices for this problem."""
    devices = [group.devices for group in tables.groups]
    sizes: list[Sequence[int]] = [
        sorted({table.devices for table in tables.stages if table.group == g})
        for g in range(len(devices))
    ]
    if options.order is not None:
        names = [group.name for group in tables.groups]
        return one_run(devices, sizes, [names.index(name) for name in options.order])
    runs = options.one_run
    if runs is None:
        runs = any_order_states(devices, sizes) > _EXACT_STATES
    return one_run(devices, sizes) if runs else any_order(devices, sizes)


class _Search:
    def __init__(
        self, tables: CostTables, options: InterOpOptions, progress: Progress | None
    ) -> None:
        self.tables, self.options, self.progress = tables, options, progress
        self.program = suffix_program(tables, options)
        self.found: dict[tuple[Pick, ...], Priced] = {}
        self.best: Priced | None = None
        self.bounds = 0
        self.interrupted = False
        self.lowest_s = 0.0
        """No T below this is possible, as far as is known."""

    def run(self) -> bool:
        """Whether anything fits."""
        for picks in self.options.known:
            found = cheapest(self.tables, picks, self.options.allowed)
            if found is not None:
                self._remember(found)
        first = self._solve(math.inf)
        if first is None or not self._worth_while(first):
            return False
        self.lowest_s = first.fill_s
        try:
            low_s = self._bisect(first)
            self._descend(first.fill_s, low_s)
        except KeyboardInterrupt:
            self.interrupted = True
        return True

    def _solve(self, bound_s: float) -> Priced | None:
        """The shortest fill for a bound, with memory."""
        self.bounds += 1
        found = self._priced(bound_s, free_memory=True)
        if found is not None and not self._holds(found, bound_s):
            found = self._priced(bound_s, free_memory=False)
        if found is not None:
            self._remember(found)
        if self.progress is not None and self.best is not None:
            self.progress(self.bounds, self.best.step_s)
        return found

    def _remember(self, found: Priced) -> None:
        known = self.found.get(found.picks)
        if known is None or found.step_s < known.step_s:
            self.found[found.picks] = found
        if self.best is None or found.step_s < self.best.step_s:
            self.best = found

    def _worth_while(self, first: Priced) -> bool:
        """Whether T may come to `at_most_s`, told by one bound; first without regard to memory."""
        at_most_s = self.options.at_most_s
        if at_most_s is None or min(first.step_s, self._best_s()) <= at_most_s:
            return True
        bound_s = at_most_s - first.fill_s
        if self.program.solve(bound_s, free_memory=True) is None:
            return False
        return self._solve(bound_s) is not None

    def _priced(self, bound_s: float, *, free_memory: bool) -> Priced | None:
        picks = self.program.solve(bound_s, free_memory=free_memory)
        return None if picks is None else self._price(picks, bound_s)

    def _price(self, picks: tuple[Pick, ...], bound_s: float) -> Priced:
        return priced(self.tables, picks, bound_s, self.options.allowed)

    def _holds(self, found: Priced, bound_s: float) -> bool:
        """Whether an answer that memory and the schedule had no part in stands."""
        return found.load_s <= bound_s * (1 + _ROUNDING) and fits(self.tables, found)

    def _best_s(self) -> float:
        return self.best.step_s if self.best is not None else math.inf

    def _bisect(self, first: Priced) -> float:
        """A load that is too small for any pipeline, close to the smallest that is not."""
        low_s, high_s = 0.0, first.load_s
        for _ in range(_BISECTIONS):
            high_s = min(high_s, self._best_s() - first.fill_s)
            if high_s - low_s <= self.options.bisection * high_s:
                break
            middle_s = (low_s + high_s) / 2
            found = self._solve(middle_s)
            if found is None:
                low_s = middle_s
            else:
                high_s = found.load_s
        return low_s

    def _descend(self, fill_s: float, low_s: float) -> None:
        while True:
            bound_s = self._best_s() * (1 - self.options.tolerance) - fill_s
            self.lowest_s = fill_s + low_s
            if bound_s <= low_s:
                break
            if self.bounds >= self.options.max_bounds:
                return
            found = self._solve(bound_s)
            if found is None:
                break
            fill_s = found.fill_s
        self.lowest_s = self._best_s()

    def result(self) -> InterOpResult:
        best = self.best
        if best is None:
            raise AssertionError("no result without a pipeline")
        others = sorted(self.found.values(), key=lambda p: (p.step_s, len(p.picks)))
        gap = max(0.0, 1 - self.lowest_s / best.step_s) if best.step_s else 0.0
        return InterOpResult(
            best,
            tuple(p for p in others if p is not best),
            gap,
            self.bounds,
            self.program.graph.name,
            self.interrupted,
        )
