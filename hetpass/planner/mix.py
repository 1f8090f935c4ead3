"""The plan of parallel pipelines with the shortest step: which columns, and how many. No JAX.

For every microbatch size all columns are made (`planner.columns`). A plan takes so many of one
sort and so many of another, as the devices allow: with G groups the best fractional mixture needs
no more sorts than groups, and two are tried here whatever G. Columns are promising if they give the
most microbatches per second for what their devices are worth, at some price of one group in terms
of another. The microbatches are shared out so that all columns end together; sums of gradients are
estimated. The best few mixtures become plans and are priced as any plan is (`planner.pipelines`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetpass.errors import PlanError
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.planner.columns import Column, ColumnStage, columns
from hetpass.planner.pipelines import Market, PlanPrice, Pricer
from hetpass.planner.shares import Pace, shared_out
from hetpass.planner.sync_estimate import SyncEstimate

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_WORTHS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)
"""Of a device of one group, in devices of the group that is worth most."""


@dataclass(frozen=True)
class MixOptions:
    """What is searched.

    Attributes:
      examples: microbatch sizes; None: all divisors of the batch for which costs are known.
      most_stages: of a column; doubled until something fits.
      promising: columns kept for each worth of the groups.
      judged: mixtures that are priced as plans, for each microbatch size.
    """

    examples: tuple[int, ...] | None = None
    most_stages: int = 6
    promising: int = 12
    judged: int = 16


@dataclass(frozen=True)
class MixResult:
    """What was found.

    Attributes:
      plan: the best, with its predictions.
      price: of it.
      rejected: others that were priced, best first, with their steps in seconds.
      columns: that were made, over all microbatch sizes.
    """

    plan: Plan
    price: PlanPrice
    rejected: tuple[tuple[Plan, float], ...]
    columns: int


@dataclass(frozen=True)
class _Mixture:
    """So many columns of each sort, and when they would be done."""

    parts: tuple[tuple[Column, int], ...]
    examples: int
    step_s: float


def mix(market: Market, options: MixOptions = MixOptions()) -> MixResult:
    """The best plan of parallel pipelines.

    Deterministic: equal markets and options give an equal plan.

    Raises:
      PlanError: HP-PLAN-MEMORY: no pipeline fits.
    """
    return _best(Pricer(market), options)


def _best(pricer: Pricer, options: MixOptions) -> MixResult:
    most, market = options.most_stages, pricer.market
    while True:
        result = _mix(pricer, replace(options, most_stages=most))
        if result is not None:
            return result
        if most >= market.costs.num_layers:
            raise PlanError(
                "HP-PLAN-MEMORY",
                "no pipeline fits the devices at any microbatch size whose costs are known",
                details=[str(group) for group in market.cluster.groups],
                ways_out=["add devices, or devices with more memory", "profile smaller batches"],
            )
        most = min(2 * most, market.costs.num_layers)


def robust_mix(markets: Sequence[Market], options: MixOptions = MixOptions()) -> MixResult:
    """The plan that does best under several markets alike, such as with and without overlap of
    transfers and compute: of what is found for each, the smallest geometric mean of steps.

    The markets differ in costs, network or overlap, not in cluster or batch. The price, and the
    plan's predictions, are the first market's.

    Raises:
      PlanError: HP-PLAN-MEMORY: no pipeline fits.
    """
    pricers = [Pricer(market) for market in markets]
    found = [_best(pricer, options) for pricer in pricers]
    plans = {
        _uncounted(plan): None
        for result in found
        for plan in (result.plan, *(other for other, _ in result.rejected))
    }
    judged = [(plan, [pricer.price(plan) for pricer in pricers]) for plan in plans]
    judged = [pair for pair in judged if not any(p.violations for p in pair[1])]
    judged.sort(key=lambda pair: math.prod(p.step_s for p in pair[1]))
    plan, prices = judged[0]
    return MixResult(
        _predicted(plan, prices[0]),
        prices[0],
        tuple((other, p[0].step_s) for other, p in judged[1:]),
        sum(result.columns for result in found),
    )


def _uncounted(plan: Plan) -> Plan:
    """Without in-flight counts, which every market chooses anew, and without predictions."""
    pipelines = tuple(
        replace(p, stages=tuple(replace(stage, in_flight=None) for stage in p.stages))
        for p in plan.pipelines
    )
    return replace(plan, pipelines=pipelines, predictions={})


def _mix(pricer: Pricer, options: MixOptions) -> MixResult | None:
    made, market = 0, pricer.market
    mixtures: list[_Mixture] = []
    for examples in _sizes(market, options):
        found = columns(market, examples, options.most_stages)
        made += len(found)
        if found:
            mixtures += _mixtures(market, examples, found, options)
    priced: dict[Plan, PlanPrice] = {}
    for mixture in sorted(mixtures, key=lambda mixture: mixture.step_s):
        _price_plans(pricer, mixture, priced)
    ranked = sorted(priced.items(), key=lambda pair: pair[1].step_s)
    ranked = [(plan, found) for plan, found in ranked if not found.violations]
    if not ranked:
        return None
    plan, best = ranked[0]
    rejected = tuple((other, found.step_s) for other, found in ranked[1:])
    return MixResult(_predicted(plan, best), best, rejected, made)


def _predicted(plan: Plan, found: PlanPrice) -> Plan:
    """The plan with its in-flight counts and what it is expected to take."""
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, in_flight=count)
                for stage, count in zip(pipeline.stages, priced.in_flight, strict=True)
            ),
        )
        for pipeline, priced in zip(plan.pipelines, found.pipelines, strict=True)
    )
    return replace(
        plan,
        pipelines=pipelines,
        predictions={
            "step_s": found.step_s,
            "compute_s": found.compute_s,
            "sync_s": found.sync_s,
            "update_s": found.update_s,
            "peak_bytes": found.peak_bytes,
        },
    )


def _sizes(market: Market, options: MixOptions) -> tuple[int, ...]:
    wanted = options.examples or range(1, market.batch_size + 1)
    return tuple(size for size in wanted if market.batch_size % size == 0 and _known(market, size))


def _known(market: Market, examples: int) -> bool:
    costs = market.costs
    return any(
        costs.row(group, ways, examples) is not None
        for group in market.cluster.groups
        for ways in costs.ways(group)
    )


# -- mixtures ---------------------------------------------------------------------------------


def _mixtures(
    market: Market, examples: int, found: Sequence[Column], options: MixOptions
) -> list[_Mixture]:
    """The best mixtures of at most two sorts, by estimate."""
    microbatches = market.batch_size // examples
    devices = np.array([group.num_devices for group in market.cluster.groups])
    kept = _promising(market, examples, found, options.promising)
    use = np.array([column.devices for column in kept])
    rows: list[tuple[int, int, int, int]] = []
    for i, j in itertools.product(range(len(kept)), repeat=2):
        most = int(min(d // u for d, u in zip(devices, use[i], strict=True) if u))
        if i == j:
            even = [n for n in range(1, most) if microbatches % n == 0]
            rows += [(i, n, j, 0) for n in (*even, most)]
            continue
        counts = np.arange(1, most + 1)
        left = devices[None, :] - counts[:, None] * use[i][None, :]
        with np.errstate(divide="ignore"):
            others = np.where(use[j] > 0, left // np.maximum(use[j], 1), 1 << 30).min(axis=1)
        rows += [(i, int(n), j, int(o)) for n, o in zip(counts, others, strict=True) if o > 0]
    table = np.array(rows)
    sync_s = SyncEstimate(market, kept).pairs_s()
    one, _, other, several = table.T
    step_s = _ends_s(kept, table, microbatches) + np.where(
        several > 0, np.maximum(sync_s[one, other], sync_s[other, one]), sync_s[one, one]
    )
    order = [int(row) for row in np.argsort(step_s, kind="stable")]
    alone = [row for row in order if not table[row, 3]]
    chosen = dict.fromkeys(_first(table, order, options.judged))
    chosen.update(dict.fromkeys(_first(table, alone, options.judged // 2)))
    result = []
    for row in chosen:
        i, n, j, o = (int(x) for x in table[row])
        parts = ((kept[i], n), (kept[j], o)) if o else ((kept[i], n),)
        result.append(_Mixture(parts, examples, float(step_s[row])))
    return result


def _first(table: Counts, order: Sequence[int], count: int) -> list[int]:
    """The first rows, at most two of one pair of sorts."""
    result: list[int] = []
    seen: dict[frozenset[int], int] = {}
    for row in order:
        pair = frozenset((int(table[row, 0]), int(table[row, 2])))
        seen[pair] = seen.get(pair, 0) + 1
        if seen[pair] <= 2:
            result.append(row)
        if len(result) == count:
            break
    return result


def _promising(market: Market, examples: int, found: Sequence[Column], count: int) -> list[Column]:
    """The columns that do best alone, and those that give most for what they take, at some worth of
    each group.

    The first microbatch and the sum of gradients are counted over the share of the batch that such
    columns alone would have.
    """
    devices = np.array([group.num_devices for group in market.cluster.groups], dtype=np.float64)
    use = np.array([column.devices for column in found], dtype=np.float64)
    period = np.array([column.period_s for column in found])
    first = np.array([column.first_s for column in found])
    sync = SyncEstimate(market, found).alone_s()
    microbatches = market.batch_size / examples
    with np.errstate(divide="ignore"):
        copies = np.where(use > 0, devices // np.maximum(use, 1), np.inf).min(axis=1)
    alone = first + (np.ceil(microbatches / copies) - 1) * period + sync
    kept = {int(index): None for index in np.argsort(alone, kind="stable")[:count]}
    for worth in itertools.product(_WORTHS, repeat=len(devices)):
        if max(worth) < 1.0 or (len(devices) > 3 and len(set(worth)) > 2):
            continue
        share = (use * np.array(worth)).sum(axis=1) / (devices * np.array(worth)).sum()
        seconds = first + (np.maximum(microbatches * share, 1.0) - 1) * period + sync
        for index in np.argsort(seconds, kind="stable")[:count]:
            kept[int(index)] = None
    return [found[index] for index in kept]


def _ends_s(kept: Sequence[Column], table: Counts, microbatches: int) -> Floats:
    """When all microbatches are done, for each row (sort, count, sort, count)."""
    period = np.array([column.period_s for column in kept])
    first = np.array([column.first_s for column in kept])
    one, n, other, o = table.T
    low: Floats = np.zeros(len(table))
    high: Floats = np.maximum(first[one] + microbatches * period[one], first[other])
    for _ in range(40):
        middle = (low + high) / 2
        done = n * _done(middle, first[one], period[one]) + o * _done(
            middle, first[other], period[other]
        )
        enough = done >= microbatches
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    return high


def _done(seconds: Floats, first: Floats, period: Floats) -> Floats:
    """Microbatches that a column has done by then."""
    result: Floats = np.where(seconds >= first, np.floor((seconds - first) / period) + 1, 0.0)
    return result


# -- plans ------------------------------------------------------------------------------------


def _price_plans(pricer: Pricer, mixture: _Mixture, priced: dict[Plan, PlanPrice]) -> None:
    """The mixture with the stages of a column side by side, and with equal stages side by side;
    each once more with shares of the batch that its own price corrects."""
    market = pricer.market
    microbatches = market.batch_size // mixture.examples
    expected = [Pace(c.first_s, c.period_s, count) for c, count in mixture.parts]
    shares = shared_out(microbatches, expected)
    for by_column in (True, False):
        plan = _placed(market, mixture, shares, by_column)
        if plan in priced:
            continue
        priced[plan] = pricer.price(plan)
        moved = shared_out(microbatches, _corrected(expected, shares, priced[plan]))
        if moved != shares:
            again = _placed(market, mixture, moved, by_column)
            priced.setdefault(again, pricer.price(again))


def _corrected(
    expected: Sequence[Pace], shares: Sequence[Sequence[int]], found: PlanPrice
) -> list[Pace]:
    """Paces whose first microbatch takes what is left of the priced time for the others."""
    paces, index = [], 0
    for pace, numbers in zip(expected, shares, strict=True):
        used = [n for n in numbers if n]
        seconds = found.pipelines[index].compute_s if used else math.inf
        if math.isfinite(seconds):
            pace = replace(pace, first_s=max(0.0, seconds - (used[0] - 1) * pace.period_s))
        paces.append(pace)
        index += len(used)
    return paces


def _placed(
    market: Market, mixture: _Mixture, shares: Sequence[Sequence[int]], by_column: bool
) -> Plan:
    """Devices for every row: larger rows first, so that none lies across hosts."""
    rows: list[tuple[int, int, int, int, ColumnStage]] = []
    for sort, ((column, _), numbers) in enumerate(zip(mixture.parts, shares, strict=True)):
        for place, n in enumerate(numbers):
            if n:
                rows += [(sort, place, s, n, stage) for s, stage in enumerate(column.stages)]

    def order(row: tuple[int, int, int, int, ColumnStage]) -> tuple[int, ...]:
        sort, place, s, _, stage = row
        return (-stage.ways, sort, place, s) if by_column else (-stage.ways, sort, s, place)

    next_device = [0] * len(market.cluster.groups)
    devices: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for sort, place, s, _, stage in sorted(rows, key=order):
        start = next_device[stage.group]
        next_device[stage.group] = start + stage.ways
        devices[sort, place, s] = tuple(range(start, start + stage.ways))
    pipelines: dict[tuple[int, int], tuple[int, list[StagePlan]]] = {}
    for sort, place, s, n, stage in rows:
        mesh = (("data", 1), ("model", stage.ways)) if stage.ways > 1 else (("data", 1),)
        name = market.cluster.groups[stage.group].name
        replica = Replica(name, devices[sort, place, s], mesh)
        stages = pipelines.setdefault((sort, place), (n, []))[1]
        stages.append(StagePlan(stage.first, stage.end - 1, (replica,)))
    return Plan(tuple(Pipeline(tuple(stages), n) for n, stages in pipelines.values()))
