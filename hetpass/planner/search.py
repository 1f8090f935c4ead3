"""The planner: from facts and a cluster to a Plan. No JAX.

For every number of microbatches that divides the batch the inter-op program says at once what its T
cannot be below; the numbers are solved in the order of these bounds, and those that cannot come
near the best so far are left out. The best few pipelines, over all numbers, are judged again by the
simulator under real schedules, and the winner becomes the Plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hetpass.cost.tables import CostTables, TableOptions, cost_tables
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import counted, spelled
from hetpass.planner.as_plan import as_plan
from hetpass.planner.inter_op import InterOp, InterOpOptions
from hetpass.planner.judge import ADAPTIVE, AUTO, FAMILY, Judged, judged
from hetpass.planner.objective import (
    ANY,
    ONE_F_ONE_B,
    Deltas,
    Pick,
    Priced,
    cheapest,
    priced,
)
from hetpass.planner.run_order import in_better_order
from hetpass.planner.unfit import nothing_fits

_FIRST_MICROBATCHES = 64
_MOST_MICROBATCHES = 512
_ROUNDING = 1e-9

Tables = Callable[[int], CostTables]
"""The costs for a number of microbatches: analytic, or from whoever knows better."""

Progress = Callable[[int, float], None]
"""Called with a number of microbatches that is done, and the best T so far in seconds."""


@dataclass(frozen=True)
class SearchOptions:
    """What is searched.

    Attributes:
      num_microbatches: the numbers to try; None: all divisors of the batch up to 512.
      schedule: a name; "auto": the best of the 1F1B family; "adaptive" is searched for the winner.
      tables: what stages may do.
      order: group names in the only order that is allowed; None: any.
      judged: so many pipelines are judged by the simulator.
      slack: a number of microbatches is left out if its objective is above the best by more than
        this share.
      tolerance: of the inter-op program, relative.
    """

    num_microbatches: tuple[int, ...] | None = None
    schedule: str = AUTO
    tables: TableOptions = field(default_factory=TableOptions)
    order: tuple[str, ...] | None = None
    judged: int = 8
    slack: float = 0.03
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Candidate:
    """A pipeline that was judged.

    Attributes:
      plan: what it is.
      step_s: simulated.
      objective_s: T of the inter-op program.
      tables: per stage, which of the tables that were searched its costs are of.
    """

    plan: Plan
    step_s: float
    objective_s: float
    tables: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class SearchResult:
    """What was found.

    Attributes:
      plan: the winner, with its predictions.
      best: the same, as a candidate.
      rejected: the others that were judged, best first.
      bounds: solved by the inter-op program, over all numbers of microbatches.
      gap: of the inter-op program for the winner's number of microbatches.
      interrupted: the search was ended by a KeyboardInterrupt; the plan is the best so far, and
        its predictions say "interrupted".
    """

    plan: Plan
    best: Candidate
    rejected: tuple[Candidate, ...]
    bounds: int
    gap: float
    interrupted: bool = False

    def __repr__(self) -> str:
        step, others = spelled(self.best.step_s, "time"), len(self.rejected)
        return f"<SearchResult: step {step}, gap {self.gap:.2%}, {others} rejected>"


def search(
    facts: ProgramFacts,
    cluster: Cluster,
    options: SearchOptions = SearchOptions(),
    tables: Tables | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The plan with the shortest simulated step.

    Deterministic: equal facts, clusters and options give an equal plan, byte for byte.

    Args:
      tables: costs to use instead of the analytic ones.

    Raises:
      PlanError: HP-PLAN-MEMORY, -DTYPE or -MICROBATCHES; nothing fits, with need and have.
    """
    cost = tables or (lambda m: cost_tables(facts, cluster, m, options.tables))
    work = _Work(options, cost, progress)
    try:
        for m in microbatch_numbers(facts.batch_size, options.num_microbatches):
            work.begin(m)
        work.solve()
    except KeyboardInterrupt:
        work.keep_met()
        if not work.found:
            raise
        work.interrupted = True
    if not work.found:
        raise _nothing(facts, cluster, options, tables)
    result = _judge(facts, cluster, options, work.found, work.bounds)
    return _marked(result) if work.interrupted else result


@dataclass
class _Work:
    """The search in progress; local to `search`.

    Attributes:
      begun: problems in which something may fit, by number of microbatches.
      found: pipelines, over all numbers of microbatches.
      bounds: solved.
    """

    options: SearchOptions
    cost: Tables
    progress: Progress | None
    begun: list[InterOp] = field(default_factory=list)
    found: list[_Found] = field(default_factory=list)
    bounds: int = 0
    interrupted: bool = False

    def begin(self, m: int) -> None:
        """The problem of one number of microbatches, with a bound on its T."""
        tables = self.cost(m)
        for program in _programs(self.options):
            guess_s = self.begun[-1].high_s if self.begun else None
            problem = InterOp(tables, program, guess_s=guess_s)
            if math.isfinite(problem.least_s):
                self.begun.append(problem)

    def solve(self) -> None:
        """All that may come near the best, those first whose first answers are best."""
        for problem in sorted(self.begun, key=lambda p: p.least_s):
            problem.first(self._at_most_s())
        for problem in sorted(self.begun, key=lambda p: (p.best_s, p.least_s)):
            self._solve(problem)
            best_s = self._best_s()
            if self.interrupted:
                return
            if self.progress is not None and best_s < math.inf:
                self.progress(problem.tables.num_microbatches, best_s)
        self._meet_others()

    def _meet_others(self) -> None:
        """What the best should be held against: as many as are judged of its own problem, and more
        of others where there are too few."""
        judged = self.options.judged
        for problem in sorted(self.begun, key=lambda p: (p.best_s, p.least_s))[:1]:
            self._meet(problem, judged)
        for problem in sorted(self.begun, key=lambda p: (p.bounds > 0, p.least_s)):
            missing = judged - len(self.found)
            if missing > 0:
                self._meet(problem, 1 if problem.best is None else len(problem.found) + missing)

    def _meet(self, problem: InterOp, count: int) -> None:
        known = {f.priced.picks for f in self.found if f.tables is problem.tables}
        new = [p for p in problem.meet(count) if p.picks not in known]
        self.found += [_Found(problem.tables, p, problem.gap) for p in new]

    def keep_met(self) -> None:
        """What the programs have met so far, if none was solved to its end."""
        if not self.found:
            self.found = [
                _Found(problem.tables, p, problem.gap)
                for problem in self.begun
                for p in problem.found.values()
            ]

    def _best_s(self) -> float:
        return min((problem.best_s for problem in self.begun), default=math.inf)

    def _at_most_s(self) -> float:
        """A T above this is of no interest."""
        return self._best_s() * (1 + self.options.slack)

    def _solve(self, problem: InterOp) -> None:
        result = problem.result(self._at_most_s())
        if result is not None:
            self.bounds += result.bounds
            met = (result.best, *result.others)
            self.found += [_Found(problem.tables, p, result.gap) for p in met]
            self.interrupted = result.interrupted


def _marked(result: SearchResult) -> SearchResult:
    predictions = {**result.plan.predictions, "interrupted": 1.0}
    plan = replace(result.plan, predictions=predictions)
    return replace(result, plan=plan, best=replace(result.best, plan=plan), interrupted=True)


@dataclass(frozen=True, eq=False)
class _Found:
    tables: CostTables
    priced: Priced
    gap: float


def _judge(
    facts: ProgramFacts,
    cluster: Cluster,
    options: SearchOptions,
    found: list[_Found],
    bounds: int,
) -> SearchResult:
    found = sorted(found, key=lambda f: f.priced.step_s)
    results: list[tuple[Judged, _Found]] = []
    for candidate in found:
        if len(results) == options.judged * len(_programs(options)):
            break
        in_flight = candidate.priced.in_flight if options.schedule == AUTO else None
        judgement = _judged(options, candidate, candidate.priced.picks, in_flight)
        if judgement is not None:
            results.append((judgement, candidate))
    if not results:
        raise _schedule_does_not_fit(options.schedule, found)
    results.sort(key=lambda pair: pair[0].step_s)
    if options.order is None:
        results = _reordered(options, *results[0]) + results
    if options.schedule == ADAPTIVE:
        searched = judged(results[0][1].tables, results[0][1].priced.picks, ADAPTIVE)
        if searched is not None and searched.step_s <= results[0][0].step_s * (1 + _ROUNDING):
            results[0] = (searched, results[0][1])
    candidates = [_candidate(facts, cluster, *pair) for pair in results]
    return SearchResult(
        candidates[0].plan, candidates[0], tuple(candidates[1:]), bounds, results[0][1].gap
    )


def _judged(
    options: SearchOptions,
    found: _Found,
    picks: tuple[Pick, ...],
    in_flight: tuple[int, ...] | None = None,
) -> Judged | None:
    schedule = AUTO if options.schedule == ADAPTIVE else options.schedule
    return judged(found.tables, picks, schedule, in_flight)


def _reordered(
    options: SearchOptions, judgement: Judged, found: _Found
) -> list[tuple[Judged, _Found]]:
    """The winner with its groups in an order that shortens the step; nothing if none does."""
    picks, better = in_better_order(
        found.tables,
        found.priced.picks,
        judgement,
        lambda picks: _judged(options, found, picks),
    )
    if better is judgement:
        return []
    allowed = _programs(options)[0].allowed
    again = cheapest(found.tables, picks, allowed) or priced(found.tables, picks, allowed=allowed)
    return [(better, replace(found, priced=again))]


def _candidate(
    facts: ProgramFacts, cluster: Cluster, judgement: Judged, found: _Found
) -> Candidate:
    plan = as_plan(
        found.tables,
        cluster,
        found.priced.picks,
        # counts in a plan mean 1F1B; an order of tasks is searched again for the plan's own costs
        schedule="1f1b" if judgement.schedule in FAMILY else judgement.schedule,
        in_flight=judgement.in_flight if judgement.schedule in FAMILY else None,
        fingerprint=facts.fingerprint,
        predictions={"objective_s": found.priced.step_s, "step_s": judgement.step_s},
    )
    chosen = tuple(pick.table for pick in found.priced.picks)
    return Candidate(plan, judgement.step_s, found.priced.step_s, chosen)


def _schedule_does_not_fit(schedule: str, found: list[_Found]) -> PlanError:
    counts = " ".join(str(count) for count in found[0].priced.in_flight)
    return PlanError(
        "HP-PLAN-SCHEDULE",
        f"the schedule {schedule!r} holds more microbatches than fit, in every pipeline found",
        details=[
            f"{counted(len(found), 'pipeline')}; the best was planned with {counts} in flight, "
            "per stage, of "
            f"{counted(found[0].tables.num_microbatches, 'microbatch')}"
        ],
        ways_out=['use the schedule "auto" or "1f1b"', "recompute activations"],
    )


def microbatch_numbers(batch_size: int, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """Divisors of the batch, those first from which the others are most likely ruled out."""
    numbers = range(1, min(batch_size, _MOST_MICROBATCHES) + 1) if wanted is None else wanted
    legal = [m for m in numbers if m >= 1 and batch_size % m == 0]
    first = _FIRST_MICROBATCHES
    return tuple(sorted(legal, key=lambda m: (max(m, first) / min(m, first), m)))


def _nothing(
    facts: ProgramFacts, cluster: Cluster, options: SearchOptions, tables: Tables | None
) -> PlanError:
    def tables_of(changed: Cluster, m: int) -> CostTables:
        if tables is not None and changed == cluster:
            return tables(m)
        return cost_tables(facts, changed, m, options.tables)

    numbers = microbatch_numbers(facts.batch_size, options.num_microbatches)
    return nothing_fits(facts, cluster, tables_of, numbers, _programs(options)[0])


def _programs(options: SearchOptions) -> list[InterOpOptions]:
    """The program's part of the options; some schedules leave no choice of in-flight counts, and
    what H-1F1B chooses is near what others leave free or near that of 1F1B."""
    allowed = {
        "1f1b": (ONE_F_ONE_B,),
        "eager-1f1b": (Deltas(2, 2),),
        "h-1f1b": (ANY, ONE_F_ONE_B),
    }
    return [
        InterOpOptions(order=options.order, allowed=deltas, tolerance=options.tolerance)
        for deltas in allowed.get(options.schedule, (ANY,))
    ]
