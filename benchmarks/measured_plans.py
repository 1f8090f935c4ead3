"""Plans for OPT-350 on mixed clusters, from measured layer seconds; beside the naive plan.

    python -m benchmarks.measured_plans

The clusters are of A100-40 and V100-16 in hosts of four; the global batch is 1,024 sequences of
2,048 tokens, in float32. Costs are those of benchmarks/data/measured; nothing is fitted here. Steps
are simulated (hetpass/planner/pipelines.py), ours and the naive plan's by the same judge:

    blocking      a transfer holds both stages, as in the measured runs of data/measured, on which
                  this judge was tried (docs/accuracy.md)
    overlapping   stages compute while they send and receive, as hetpass' own runtime lets them

Plans, ours and the naive one, are chosen for the smallest geometric mean of both; `alone` in the
results holds the seconds of those that are chosen by one judge alone.

*Naive*: one device kind per stage, as many copies of every stage, one tensor parallelism per kind,
layers cut so that the slowest stage is fastest; devices that do not divide stay idle. All of it is
tried. The *bound* is compute alone at each kind's best measured rate, perfectly balanced.

Plans are written to benchmarks/results/plans, with all that another judge needs.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.measured import cluster, network, profile
from hetpass.cost.layer_costs import ProfiledCosts
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.planner.columns import Column, Segment, column_of
from hetpass.planner.mix import MixOptions, mix, robust_mix
from hetpass.planner.pipelines import Market, PlanPrice, Pricer

RESULTS = Path(__file__).parent / "results"
MODEL = "OPT-350"
BATCH = 1024
EFFORT = (
    (32, MixOptions(promising=8, judged=4)),
    (128, MixOptions(promising=12, judged=10)),
    (320, MixOptions(promising=20, judged=24)),
)
"""Up to so many devices: what is tried."""

JUDGES = ("blocking", "overlapping")

SYNC_OVERHEAD_S = 0.033
"""Median over the measured GPT-Neo steps: see benchmarks/accuracy.py."""

CLUSTERS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "16+16": {"A100-40": 4, "V100-16": 4},
        "16+48": {"A100-40": 4, "V100-16": 12},
        "32+96": {"A100-40": 8, "V100-16": 24},
        "80+240": {"A100-40": 20, "V100-16": 60},
        "32+0": {"A100-40": 8},
        "80+0": {"A100-40": 20},
    }
)
"""By GPUs of each kind: hosts of four."""


def market(hosts: Mapping[str, int], *, overlaps: bool) -> Market:
    """What plans are priced by."""
    return Market(
        ProfiledCosts(profile(MODEL)), network(), cluster(hosts), BATCH, overlaps, SYNC_OVERHEAD_S
    )


def bound_s(at: Market, sizes: Sequence[int] = (1, 2, 4, 8)) -> float:
    """No plan with microbatches of these sizes is faster: every layer at its best measured rate on
    each kind, perfectly shared.

    With two kinds a layer goes where its kind is faster in comparison: that is the balance of the
    fractional cut at which both kinds are busy all the time.
    """
    costs = at.costs
    seconds = []
    for group in at.cluster.groups:
        best = [math.inf] * costs.num_layers
        for ways in costs.ways(group):
            for examples in sizes:
                row = costs.row(group, ways, examples)
                if row is not None:
                    each = (row.forward_s + row.backward_s) * ways / examples
                    best = [min(a, float(b)) for a, b in zip(best, each, strict=True)]
        seconds.append([b / group.num_devices for b in best])
    if len(seconds) == 1:
        return BATCH * math.fsum(seconds[0])
    return BATCH * _balanced_s(*seconds)


def _balanced_s(one: list[float], other: list[float]) -> float:
    """Layers in order of comparative speed; the first ones on `one`, the rest on `other`."""
    order = sorted(range(len(one)), key=lambda i: one[i] / other[i])
    mine, theirs = 0.0, math.fsum(other)
    for layer in order:
        theirs -= other[layer]
        if mine + one[layer] >= theirs:
            # a share x of this layer on `one`: mine + x·one = theirs + (1 - x)·other
            share = (theirs + other[layer] - mine) / (one[layer] + other[layer])
            return mine + max(0.0, share) * one[layer]
        mine += one[layer]
    return mine


def above_the_bound(at: Market, plan: Plan, found: PlanPrice) -> dict[str, float]:
    """Where the seconds go that a plan takes beyond the bound; they add up."""
    own = bound_s(at, (BATCH // plan.num_microbatches,))
    busy = max(
        pipeline.num_microbatches * max(priced.stage_s)
        for pipeline, priced in zip(plan.pipelines, found.pipelines, strict=True)
    )
    return {
        "microbatches of this size": own - bound_s(at),
        "whole layers and rows": busy - own,
        "filling, draining, transfers": found.compute_s - busy,
        "sums of gradients": found.sync_s,
        "updates": found.update_s,
    }


def naive(markets: Sequence[Market]) -> tuple[Plan, list[PlanPrice]]:
    """The best plan of equal columns with one kind per stage, with its price in each market."""
    pricers = [Pricer(market) for market in markets]
    best: tuple[float, Plan, list[PlanPrice]] | None = None
    for plan in _naive_plans(markets[0]):
        found = [pricer.price(plan) for pricer in pricers]
        product = math.prod(one.step_s for one in found)
        if not any(one.violations for one in found) and (best is None or product < best[0]):
            best = product, plan, found
    if best is None:
        raise ValueError("no naive plan fits")
    return best[1:]


def _naive_plans(at: Market) -> Iterator[Plan]:
    groups = at.cluster.groups
    for examples in (1, 2, 4, 8):
        for copies in (n for n in range(1, BATCH + 1) if BATCH % (examples * n) == 0):
            for ways in itertools.product(*[at.costs.ways(group) for group in groups]):
                stages = [g.num_devices // (copies * w) for g, w in zip(groups, ways, strict=True)]
                if min(stages) < 1 or sum(stages) > 8:
                    continue
                parts = [Segment(i, ways[i], stages[i]) for i in range(len(groups))]
                for order in itertools.permutations(parts):
                    column = column_of(at, examples, order)
                    if column is not None:
                        yield _copied(at, column, copies, BATCH // examples // copies)


def _copied(at: Market, column: Column, copies: int, microbatches: int) -> Plan:
    """Copies of a column, the copies of a stage side by side."""
    used = [0] * len(at.cluster.groups)
    stages: list[list[StagePlan]] = [[] for _ in range(copies)]
    for stage in column.stages:
        for copy in range(copies):
            start = used[stage.group]
            used[stage.group] += stage.ways
            mesh = (("data", 1), ("model", stage.ways))
            devices = tuple(range(start, start + stage.ways))
            replica = Replica(at.cluster.groups[stage.group].name, devices, mesh)
            stages[copy].append(StagePlan(stage.first, stage.end - 1, (replica,)))
    return Plan(tuple(Pipeline(tuple(parts), microbatches) for parts in stages))


def described(plan: Plan, found: PlanPrice) -> dict[str, Any]:
    """A plan as another judge reads it: equal pipelines once, with their number."""
    pipelines: dict[str, dict[str, Any]] = {}
    for pipeline, priced in zip(plan.pipelines, found.pipelines, strict=True):
        stages = [
            {
                "layers": [stage.first_layer, stage.last_layer + 1],
                "device": stage.replicas[0].group,
                "tensor_parallel": len(stage.replicas[0].devices),
                "in_flight": count,
            }
            for stage, count in zip(pipeline.stages, priced.in_flight, strict=True)
        ]
        row = {"microbatches": pipeline.num_microbatches, "stages": stages}
        known = pipelines.setdefault(json.dumps(row), {"data_parallel": 0, **row})
        known["data_parallel"] += 1
    return {
        "global_batch": BATCH,
        "microbatch": BATCH // plan.num_microbatches,
        "pipelines": list(pipelines.values()),
    }


def prices(found: PlanPrice) -> dict[str, float]:
    """What a judge said."""
    return {
        "step_s": found.step_s,
        "compute_s": found.compute_s,
        "sync_s": found.sync_s,
        "update_s": found.update_s,
        "peak_bytes": found.peak_bytes,
    }


def run(name: str) -> dict[str, Any]:
    """One cluster; our plan is saved beside the results."""
    hosts = CLUSTERS[name]
    markets = [market(hosts, overlaps=overlaps) for overlaps in (False, True)]
    at = markets[0]
    options = next(o for most, o in EFFORT if at.cluster.num_devices <= most)
    start = time.perf_counter(), time.process_time()
    ours = robust_mix(markets, options)
    spent = time.perf_counter() - start[0], time.process_time() - start[1]
    folder = RESULTS / "plans"
    folder.mkdir(exist_ok=True)
    ours.plan.save(folder / f"opt350-{name}.json")
    theirs, their_prices = naive(markets)
    again = Pricer(markets[1]).price(uncounted(ours.plan))
    alone = {
        judge: {
            "ours_s": mix(own, options).price.step_s,
            "naive_s": naive([own])[1][0].step_s,
        }
        for judge, own in zip(JUDGES, markets, strict=True)
    }
    row: dict[str, Any] = {
        "devices": {group.name: group.num_devices for group in at.cluster.groups},
        "bound_s": bound_s(at),
        "search_s": {"elapsed": spent[0], "processor": spent[1], "columns": ours.columns},
        "ours": {
            **described(ours.plan, ours.price),
            "blocking": prices(ours.price),
            "overlapping": prices(again),
        },
        "naive": {
            **described(theirs, their_prices[0]),
            "blocking": prices(their_prices[0]),
            "overlapping": prices(their_prices[1]),
        },
    }
    row["over the bound"] = {
        judge: row["ours"][judge]["step_s"] / row["bound_s"] for judge in JUDGES
    }
    row["above the bound"] = {
        judge: above_the_bound(own, ours.plan, found)
        for judge, own, found in zip(JUDGES, markets, (ours.price, again), strict=True)
    }
    row["alone"] = alone
    row["gain over naive"] = {
        judge: row["naive"][judge]["step_s"] / row["ours"][judge]["step_s"] for judge in JUDGES
    }
    return row


def uncounted(plan: Plan) -> Plan:
    """Without in-flight counts, which another judge chooses anew."""
    pipelines = tuple(
        replace(p, stages=tuple(replace(stage, in_flight=None) for stage in p.stages))
        for p in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def main() -> None:
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "note": "simulated on measured layer seconds; nothing here was run",
        "clusters": {},
    }
    for name in CLUSTERS:
        row = results["clusters"][name] = run(name)
        (RESULTS / "measured_plans.json").write_text(
            json.dumps(results, indent=1) + "\n", encoding="utf-8"
        )
        print(name, end=": ")
        for judge in JUDGES:
            print(
                f"{judge} {row['ours'][judge]['step_s']:.2f} s, naive "
                f"{row['naive'][judge]['step_s']:.2f} s, {row['over the bound'][judge]:.2f} of the "
                "bound",
                end="; ",
            )
        print(f"found in {row['search_s']['processor']:.1f} s of a processor")


if __name__ == "__main__":
    main()
