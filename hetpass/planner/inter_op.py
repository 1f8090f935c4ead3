"""The inter-op program: stages on parts of unlike groups so that the step is shortest. No JAX.

Minimizes T = fill + load (`planner.objective`) over the cuts of the layers, the part of a group
that each stage takes, the order of groups, and the microbatches in flight; devices may stay idle.
For a bound Q on the load, `planner.suffix_program` finds the shortest fill f(Q). Since f never
rises with Q, every answer rules out a range of bounds: with T* the best so far, a load below Q can
only help if it is below T* - f(Q). So Q descends, mostly in long jumps, from T* - f(∞) to the
smallest feasible load; no list of candidate bounds is needed, and the answer is exact up to
`tolerance`. (Alpa, OSDI 2022, tries every distinct stage time.)

What load is too small for any pipeline is told by a relaxation (`planner.reach`), which costs
little: the first answer is sought right above it. It also leaves few places where layers may be
cut, as long as the bound is near, and there the program is solved by itself
(`planner.banded_program`). Where it leaves many, the program is solved in full; first without
regard to microbatches in flight, which is faster and a lower bound: where its answer fits, it is
the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetpass.cost.tables import CostTables
from hetpass.planner.banded_program import BandedProgram
from hetpass.planner.flat_program import flat_program
from hetpass.planner.objective import ANY, Deltas, Pick, Priced, fits, priced
from hetpass.planner.reach import Bands, Reach
from hetpass.planner.resources import ResourceGraph, any_order, any_order_states, one_run
from hetpass.planner.suffix_program import SuffixProgram, choices_of

_EXACT_STATES = 20_000
_ROUNDING = 1e-9

_COARSE, _FIRST_STEP = 0.04, 0.005
"""The smallest load that may be possible is found up to the first share, and where that may matter
up to the second; an answer is sought so far above it, then twice as far, and so on."""

_PATHS = 8
"""Pipelines that are taken from one answer: the best, and the best that begin otherwise."""

_LOOSER, _SOON = (1.003, 1.01, 1.05, 1.15, 1.5, math.inf), 100_000
"""Bounds beyond the best load that further pipelines are sought under, and edges at most."""

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
    """

    order: tuple[str, ...] | None = None
    one_run: bool | None = None
    allowed: Deltas = ANY
    tolerance: float = 1e-9
    max_bounds: int = 400
    at_most_s: float | None = None


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
    return InterOp(tables, options, progress).result()


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


class InterOp:
    """One problem: what T cannot be below, soon; its optimum, later.

    Attributes:
      least_s: no T is below this; infinite where nothing fits.
    """

    def __init__(
        self,
        tables: CostTables,
        options: InterOpOptions = InterOpOptions(),
        progress: Progress | None = None,
        guess_s: float | None = None,
    ) -> None:
        """`guess_s`: the smallest load that is possible, perhaps."""
        self.tables, self.options, self.progress = tables, options, progress
        self.program = suffix_program(tables, options)
        self.levels = self.program.levels()
        self.found: dict[tuple[Pick, ...], Priced] = {}
        self.best: Priced | None = None
        self.bounds = 0
        self.interrupted = False
        self.least_s = math.inf
        if not self.program.choices:
            return
        self.flat = flat_program(tables, self.program.choices, self.program.graph, options.allowed)
        self.reach = Reach(self.flat, self.levels)
        if self.reach.possible(math.inf):
            self.fill_s = self.reach.least_fill_s()
            self.load_s, self.high_s = self.reach.lowest_load_s((0.0, math.inf), _COARSE, guess_s)
            self.least_s = self.fill_s + self.load_s

    def result(self, at_most_s: float | None = None) -> InterOpResult | None:
        """The pipeline of the smallest T; None if none fits, or none is as good as it should be.

        Args:
          at_most_s: instead of the options' own.
        """
        limit_s = self._limit_s(at_most_s)
        if self.least_s > limit_s or not self.first(limit_s):
            return None
        try:
            self._descend(limit_s)
        except KeyboardInterrupt:
            self.interrupted = True
        return self._result()

    def first(self, at_most_s: float | None = None) -> bool:
        """Seeks a first answer, right above what is impossible; False if there is none up to a T,
        which may be above the optimum that is not up to it either.

        Args:
          at_most_s: as of `result`.
        """
        if self.best is not None or math.isinf(self.least_s):
            return self.best is not None
        most_s = self._limit_s(at_most_s) - self.fill_s
        if most_s < self.high_s and not self.reach.possible(most_s):
            return False
        around = self.load_s, min(self.high_s, most_s)
        self.load_s, self.high_s = self.reach.lowest_load_s(around, _FIRST_STEP)
        bound_s, step = self.high_s, _FIRST_STEP
        while self._solve(min(bound_s, most_s)) is None:
            if bound_s >= most_s:
                return False
            self.load_s = max(self.load_s, bound_s)
            bound_s = bound_s * (1 + step) if step < 1 else math.inf
            step *= 2
        return True

    def _limit_s(self, at_most_s: float | None) -> float:
        own = self.options.at_most_s if at_most_s is None else at_most_s
        return math.inf if own is None else own

    def meet(self, count: int) -> tuple[Priced, ...]:
        """Pipelines that can be had soon, at least so many if possible, best first: the first
        answer, and those of looser bounds."""
        self.first(math.inf)
        if self.best is not None:
            load_s = self.best.load_s
            for factor in _LOOSER:
                bands = self.reach.bands(load_s * factor)
                if len(self.found) >= count or bands is None:
                    break
                banded = BandedProgram(self.flat, bands, load_s * factor, self.levels)
                if banded.edges > _SOON:
                    break
                for picks in banded.picks(_PATHS):
                    self._remember(
                        priced(self.tables, picks, load_s * factor, self.options.allowed)
                    )
        return self._met()

    @property
    def gap(self) -> float:
        """(T - lower bound) / T, as far as it is solved."""
        best_s = self.best_s
        return max(0.0, 1 - self.least_s / best_s) if best_s > 0 else 0.0

    def _met(self) -> tuple[Priced, ...]:
        return tuple(sorted(self.found.values(), key=lambda p: (p.step_s, len(p.picks))))

    def _descend(self, limit_s: float) -> None:
        fill_s = self.fill_s
        while True:
            bound_s = min(self.best_s * (1 - self.options.tolerance), limit_s) - fill_s
            self.least_s = min(fill_s + self.load_s, self.best_s)
            if bound_s <= self.load_s:
                break
            if self.bounds >= self.options.max_bounds:
                return
            found = self._solve(bound_s)
            if found is None:
                break
            fill_s = found.fill_s
        self.least_s = self.best_s

    @property
    def best_s(self) -> float:
        """The smallest T so far."""
        return self.best.step_s if self.best is not None else math.inf

    # -- one bound ----------------------------------------------------------------------------

    def _solve(self, bound_s: float) -> Priced | None:
        """The shortest fill for a bound."""
        self.bounds += 1
        bands = self.reach.bands(bound_s)
        paths = [] if bands is None else self._paths(bound_s, bands)
        found = [priced(self.tables, picks, bound_s, self.options.allowed) for picks in paths]
        for one in found:
            self._remember(one)
        if self.progress is not None and self.best is not None:
            self.progress(self.bounds, self.best.step_s)
        return found[0] if found else None

    def _paths(self, bound_s: float, bands: Bands) -> list[tuple[Pick, ...]]:
        banded = BandedProgram(self.flat, bands, bound_s, self.levels)
        if banded.few:
            return banded.picks(_PATHS)
        free = self.program.paths(bound_s, _PATHS, free_memory=True)
        if free and not self._holds(free[0], bound_s):
            return self.program.paths(bound_s, _PATHS)
        return [picks for picks in free if self._holds(picks, bound_s)]

    def _holds(self, picks: tuple[Pick, ...], bound_s: float) -> bool:
        """Whether an answer that memory and the schedule had no part in stands."""
        found = priced(self.tables, picks, bound_s, self.options.allowed)
        return found.load_s <= bound_s * (1 + _ROUNDING) and fits(self.tables, found)

    def _remember(self, found: Priced) -> None:
        known = self.found.get(found.picks)
        if known is None or found.step_s < known.step_s:
            self.found[found.picks] = found
        if self.best is None or found.step_s < self.best.step_s:
            self.best = found

    def _result(self) -> InterOpResult:
        best = self.best
        if best is None:
            raise AssertionError("no result without a pipeline")
        return InterOpResult(
            best,
            tuple(p for p in self._met() if p is not best),
            self.gap,
            self.bounds,
            self.program.graph.name,
            self.interrupted,
        )
