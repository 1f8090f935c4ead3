"""Schedules and the simulator against closed forms, published figures, bounds and optima.

    python -m benchmarks.schedules                        all, 500 random instances: some minutes
    python -m benchmarks.schedules --instances 20         a quick look
    python -m benchmarks.schedules --optimal 0            without ortools

Results are written to benchmarks/results/schedules.json. All times but `seconds` of search and
simulation are simulated, and so the same on every machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.optimal_schedule import cp_sat, exhaustive_s
from hetpass.ir.schedule import Schedule
from hetpass.planner.adaptive import AdaptiveProblem, adaptive
from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.simulator import makespan_s, simulate

RESULTS = Path(__file__).parent / "results" / "schedules.json"
_NAMED = ("gpipe", "1f1b", "eager-1f1b", "h-1f1b", "zb-h1", "zb-h2")


def made(name: str, costs: PipelineCosts, microbatches: int, stages_per_lane: int = 2) -> Schedule:
    """The named schedule for these costs."""
    return make_schedule(
        name,
        num_stages=len(costs.stages),
        num_microbatches=microbatches,
        costs=costs,
        stages_per_lane=stages_per_lane,
    )


def random_problem(
    chance: random.Random, most_stages: int = 6, most_microbatches: int = 32
) -> AdaptiveProblem:
    """Unequal stages and links, from free to twice a stage; mostly with tight memory.

    Activations are counted in microbatches: every stage's are 1 byte.
    """
    stages = chance.randint(2, most_stages)
    split = chance.random() < 0.5
    costs = PipelineCosts(
        tuple(
            StageCost(
                chance.uniform(0.3, 1.5),
                chance.uniform(0.5, 2.5),
                chance.uniform(0.2, 1.2),
                weight_bytes=chance.uniform(0.0, 0.6),
            )
            for _ in range(stages)
        ),
        tuple(_random_link(chance) for _ in range(stages - 1)),
    )
    limits = None
    if chance.random() < 0.7:
        limits = tuple(
            float(max(1, stages - i + chance.randint(-1, stages))) for i in range(stages)
        )
    microbatches = chance.randint(1, most_microbatches)
    return AdaptiveProblem(costs, microbatches, limits_bytes=limits, split_weights=split)


def _random_link(chance: random.Random) -> LinkCost:
    forward_s = chance.choice([0.0, 0.01, 0.1, 0.5, 1.0, 2.0]) * chance.random()
    backward_s = forward_s * chance.choice([1.0, 1.0, 0.5])
    return LinkCost(forward_s, backward_s, latency_s=chance.choice([0.0, 0.0, 0.1, 0.4]))


# ------------------------------------------------------------------------------- fixed figures


def closed_forms() -> list[dict[str, Any]]:
    """Equal stages, free transfers: steps in units where F = B = W = 1 per stage."""
    rows = []
    for lanes, microbatches in ((2, 8), (4, 16), (8, 64)):
        busy = 3 * microbatches
        for name, bubble in (
            ("gpipe", 3 * (lanes - 1)),
            ("1f1b", 3 * (lanes - 1)),
            ("zb-h1", lanes - 1),
            ("zb-h2", lanes - 1),
            ("zb-v", (lanes - 1) / 2),
            ("interleaved", 3 * (lanes - 1) / 2),
        ):
            halves = name in ("zb-v", "interleaved")
            unit = 0.5 if halves else 1.0
            stage = StageCost(unit, unit, unit, activation_bytes=unit, weight_bytes=unit)
            costs = PipelineCosts.equal(lanes * (2 if halves else 1), stage)
            run = simulate(made(name, costs, microbatches), costs)
            rows.append(
                {
                    "schedule": name,
                    "lanes": lanes,
                    "microbatches": microbatches,
                    "makespan": run.makespan_s,
                    "closed_form": busy + bubble,
                    "longest_stage": run.longest_stage_s,
                    "most_held": max(curve.peak_bytes for curve in run.memory),
                }
            )
    return rows


def slow_middle_link() -> list[dict[str, Any]]:
    """BENCHMARKS: four equal stages (1/3, 2/3), links 0.01, c, 0.01, 64 microbatches."""
    published = {0.345: (89.1, 67.7, 68.3), 0.8: (118.3, 80.8, 69.3), 0.99: (130.4, 89.6, 69.6)}
    rows = []
    for c, figures in published.items():
        costs = PipelineCosts(
            (StageCost(1 / 3, 2 / 3),) * 4,
            (LinkCost(0.01, 0.01), LinkCost(c, c), LinkCost(0.01, 0.01)),
        )
        row: dict[str, Any] = {"c": c}
        for name, figure in zip(("1f1b", "eager-1f1b", "h-1f1b"), figures, strict=True):
            row[name] = makespan_s(made(name, costs, 64), costs)
            row[f"{name}, published"] = figure
        memory = tuple(float(n) for n in made("h-1f1b", costs, 64).in_flight)
        row["adaptive"] = adaptive(AdaptiveProblem(costs, 64)).makespan_s
        row["adaptive, memory of h-1f1b"] = adaptive(
            AdaptiveProblem(costs, 64, limits_bytes=memory)
        ).makespan_s
        rows.append(row)
    return rows


def below_the_threshold() -> dict[str, Any]:
    """Two equal stages, c = 0.09, 64 microbatches."""
    costs = PipelineCosts.equal(2, StageCost(1 / 3, 2 / 3), LinkCost(0.09, 0.09))
    found = adaptive(AdaptiveProblem(costs, 64))
    return {
        "h-1f1b": found.named_s["h-1f1b"],
        "adaptive": found.makespan_s,
        "adaptive in flight": found.schedule.in_flight,
        "lower bound": found.bound_s,
    }


def zero_bubble_stages() -> list[dict[str, Any]]:
    """F = B = W, free transfers, 16 microbatches: published 96.0 and 52.2."""
    rows = []
    for scales, published in (((1.0, 1.5, 1.0, 2.0), 96.0), ((1.0,) * 4, 52.2)):
        costs = PipelineCosts(
            tuple(StageCost(x, x, x, weight_bytes=1.0) for x in scales), (LinkCost(0.0, 0.0),) * 3
        )
        schedules = {name: made(name, costs, 16) for name in ("1f1b", "zb-h1", "zb-h2")}
        schedules["adaptive"] = adaptive(AdaptiveProblem(costs, 16, split_weights=True)).schedule
        for name, schedule in schedules.items():
            run = simulate(schedule, costs)
            rows.append(
                {
                    "stages": scales,
                    "schedule": name,
                    "longest_stage": run.longest_stage_s,
                    "published_longest_stage": published,
                    "makespan": run.makespan_s,
                    "most_held": max(schedule.held()),
                }
            )
    return rows


# ----------------------------------------------------------------------------- random instances


def against_named(instances: int) -> dict[str, Any]:
    """The same memory limit for all: random limits, and each named schedule's own peaks."""
    chance = random.Random(2026)
    same: dict[str, list[float]] = {name: [] for name in _NAMED}
    own: dict[str, list[float]] = {name: [] for name in ("1f1b", "eager-1f1b", "h-1f1b", "zb-h1")}
    gaps, seconds, only = [], [], 0
    for _ in range(instances):
        problem = random_problem(chance)
        start_s = time.perf_counter()
        found = adaptive(problem)
        seconds.append(time.perf_counter() - start_s)
        gaps.append(found.makespan_s / found.bound_s - 1)
        only += not found.named_s
        for name, named_s in found.named_s.items():
            if name in same:
                same[name].append(named_s / found.makespan_s - 1)
        for name, gains in own.items():
            if problem.split_weights or not name.startswith("zb"):
                gains.append(_own_memory_gain(problem, name))
    return {
        "instances": instances,
        "no named schedule fits": only,
        "gain at the same limit": {name: _spread(gains) for name, gains in same.items()},
        "gain at the named schedule's own peak": {n: _spread(gains) for n, gains in own.items()},
        "gap to the lower bound": _spread(gaps),
        "seconds of search": _spread(seconds),
    }


def _own_memory_gain(problem: AdaptiveProblem, name: str) -> float:
    schedule = made(name, problem.costs, problem.num_microbatches)
    peaks = tuple(c.peak_bytes for c in simulate(schedule, problem.costs).memory)
    found = adaptive(
        AdaptiveProblem(
            problem.costs,
            problem.num_microbatches,
            limits_bytes=peaks,
            split_weights=problem.split_weights,
            max_plays=100,
        )
    )
    return makespan_s(schedule, problem.costs) / found.makespan_s - 1


def against_exhaustive(instances: int) -> dict[str, Any]:
    """Every order played: S × M of 2 × 5, 3 × 4, 4 × 3, and with W tasks 2 × 3 and 3 × 2."""
    chance = random.Random(11)
    sizes = [(2, 5, False), (3, 4, False), (4, 3, False), (2, 3, True), (3, 2, True)]
    gaps = []
    while len(gaps) < instances:
        stages, microbatches, split = sizes[len(gaps) % len(sizes)]
        problem = random_problem(chance, stages, microbatches)
        if len(problem.lanes) == stages:
            problem = AdaptiveProblem(
                problem.costs, microbatches, None, problem.limits_bytes, split
            )
            gaps.append(adaptive(problem).makespan_s / exhaustive_s(problem) - 1)
    return {"instances": instances, "gap": _spread(gaps)}


def against_cp_sat(instances: int, limit_s: float = 10.0) -> dict[str, Any]:
    """Proved optima (transfers and microbatches in any order), S ≤ 4, M ≤ 8."""
    chance = random.Random(5)
    gaps, unproved = [], 0
    for _ in range(instances):
        problem = random_problem(chance, 4, 8)
        solved = cp_sat(problem, limit_s)
        if solved.proved:
            gaps.append(adaptive(problem).makespan_s / solved.makespan_s - 1)
        else:
            unproved += 1
    return {
        "instances": instances,
        "not proved in time": unproved,
        "ortools": metadata.version("ortools"),
        "gap (with up to 0.1 ms per task and transfer of rounding)": _spread(gaps),
    }


def simulator_seconds(repeats: int = 20) -> dict[str, float]:
    """Median wall time for 8 stages × 128 microbatches."""
    costs = PipelineCosts.equal(8, StageCost(1 / 3, 2 / 3), LinkCost(0.09, 0.09))
    blocking = PipelineCosts.equal(8, StageCost(1 / 3, 2 / 3), LinkCost(0.09, 0.09, overlaps=False))
    schedule = made("1f1b", costs, 128)
    problem = AdaptiveProblem(costs, 128, limits_bytes=(8.0,) * 8)
    return {
        "make 1f1b": _median_s(lambda: made("1f1b", costs, 128), repeats),
        "makespan_s": _median_s(lambda: makespan_s(schedule, costs), repeats),
        "simulate (Timeline)": _median_s(lambda: simulate(schedule, costs), repeats),
        "simulate, no overlap": _median_s(lambda: simulate(schedule, blocking), repeats),
        "adaptive, 8 held per stage": _median_s(lambda: adaptive(problem), 1),
    }


def _median_s(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def _spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    return {
        "count": len(ordered),
        "least": ordered[0],
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "most": ordered[-1],
    }


def _conditions() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "hetpass": _version("hetpass"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from the source tree"


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--exhaustive", type=int, default=100)
    parser.add_argument("--optimal", type=int, default=30, help="instances for CP-SAT")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    results: dict[str, Any] = {
        "conditions": _conditions(),
        "closed forms": closed_forms(),
        "slow middle link": slow_middle_link(),
        "below the threshold": below_the_threshold(),
        "zero bubble on unequal stages": zero_bubble_stages(),
        "wall time, seconds": simulator_seconds(),
        "adaptive against named": against_named(chosen.instances),
        "adaptive against every order": against_exhaustive(chosen.exhaustive),
    }
    if chosen.optimal:
        results["adaptive against CP-SAT"] = against_cp_sat(chosen.optimal)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(results, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
