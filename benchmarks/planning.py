"""The planner against other ways to plan, on the same facts and before the same judge.

    python -m benchmarks.planning                   all cases, each in a process of its own
    python -m benchmarks.planning --case harp-2-1   one of them, to standard output
    python -m benchmarks.planning --only harp-2-1   some of them; the others stay as they are stored

The last two cases, "from-jaxpr" and "from-jaxpr-deep", plan a traced GPT-2.6B of flax (66 layers)
and one half as deep again (98) from the jaxpr, pass by pass, and then for two changed clusters. In
all others facts are closed forms (benchmarks/gpt_facts.py). Costs are analytic (half of the peak
rates); steps are simulated, and so the same on every machine; seconds of planning are of one
thread's processor time. Each baseline has its own best number of microbatches, mesh and
recomputation. Gains are also given with schedule, M and recomputation held equal to the baseline's,
and then freed one by one.

Results are written to benchmarks/results/planning.json. The objective is that of
hetpass/planner/objective.py; stages may take what hetpass/cost/submeshes.py lists.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpt_facts import SIZES, gpt_facts
from hetpass.cost.tables import TableOptions, cost_tables
from hetpass.errors import PlanError
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, Link
from hetpass.ir.facts import ProgramFacts
from hetpass.planner.baselines import BASELINES, Baseline, baseline
from hetpass.planner.evaluate import evaluate
from hetpass.planner.search import SearchOptions, SearchResult, search

RESULTS = Path(__file__).parent / "results" / "planning.json"
_IN_HOST = Link(10e-6, 25e9)
_NEAR = Link(20e-6, 12.5e9)


def harp(v100: int, a100: int, far_a100: int = 0) -> Cluster:
    """V100 in hosts of four, A100 in hosts of two, maybe more A100 in another place; 5 Gbps."""
    hosts = [("v100", "V100-16", v100, 4), ("a100", "A100-40", a100, 2)]
    if far_a100:
        hosts.append(("a100_far", "A100-40", far_a100, 2))
    return Cluster(
        tuple(_group(name, kind, count, min(count, most)) for name, kind, count, most in hosts),
        default_link=Link(0.5e-3, 0.625e9),
    )


def mixed(**devices: int) -> Cluster:
    """Groups by kind and number of devices, in hosts of eight; 100 Gbps between all hosts."""
    groups = tuple(
        _group(name, name.replace("_", "-"), count, min(count, 8))
        for name, count in devices.items()
    )
    return Cluster(groups, default_link=Link(0.2e-3, 12.5e9))


def _group(name: str, kind: str, count: int, per_host: int) -> DeviceGroup:
    return DeviceGroup(name, find_kind(kind), count // per_host, per_host, _IN_HOST, _NEAR)


@dataclass(frozen=True)
class Case:
    """A model on a cluster.

    Attributes:
      model: in `SIZES`.
      pieces: into which a block is cut.
      cluster: makes the cluster.
      batch_size: examples in a step.
      microbatches: the numbers that are tried.
      held_equal: whether gains are also reported with M, schedule and recomputation held equal.
    """

    model: str
    pieces: int
    cluster: Callable[[], Cluster]
    batch_size: int = 1024
    microbatches: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    held_equal: bool = True


_EIGHT = ("A100_80", "V100_32", "H100_80", "T4", "A100_40", "V100_16", "RTX_3090", "L4")

CASES: Mapping[str, Case] = {
    "harp-2-1": Case("760M", 2, lambda: harp(2, 1)),
    "harp-8-4": Case("2.6B", 3, lambda: harp(8, 4)),
    "harp-8-2-2": Case("2.6B", 3, lambda: harp(8, 2, 2)),
    "harp-8-2-2-large": Case("6.7B", 3, lambda: harp(8, 2, 2)),
    "two-groups": Case("2.6B", 2, lambda: mixed(A100_40=8, V100_32=8)),
    "three-groups": Case("2.6B", 2, lambda: mixed(A100_40=8, V100_32=8, T4=8)),
    "four-groups": Case(
        "6.7B",
        2,
        lambda: mixed(H100_80=16, A100_40=32, V100_32=64, RTX_3090=8),
        microbatches=(32, 64, 128),
        held_equal=False,
    ),
    "eight-groups": Case(
        "39B",
        2,
        lambda: mixed(**dict.fromkeys(_EIGHT, 128)),
        4096,
        (256,),
        False,
    ),
}


def run(name: str) -> dict[str, Any]:
    """One case: our plan, the time it took, and every baseline."""
    case = CASES[name]
    facts = gpt_facts(SIZES[case.model], case.batch_size, case.pieces)
    cluster = case.cluster()
    options = SearchOptions(num_microbatches=case.microbatches)
    ours, seconds = timed_search(facts, cluster, options)
    judged = evaluate(ours.plan, facts, cluster)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    theirs = [baseline(other, facts, cluster, options) for other in BASELINES]
    best = min(theirs, key=lambda b: b.step_s)
    return {
        "model": case.model,
        "layers": facts.num_layers,
        "groups": {g.name: g.num_devices for g in cluster.groups},
        "batch": case.batch_size,
        "planning": {**seconds, "peak_bytes": peak_bytes, "bounds": ours.bounds, "gap": ours.gap},
        "ours": {
            "step_s": ours.best.step_s,
            "objective_s": ours.best.objective_s,
            "balance": judged.balance,
            "share_of_peak": share_of_peak(facts, cluster, ours.best.step_s),
            "tokens_per_s": case.batch_size * SIZES[case.model].sequence / ours.best.step_s,
            "plan": str(ours.plan).splitlines(),
        },
        "baselines": {b.name: compared(b, ours, facts, cluster, case, options) for b in theirs},
        "best": "ours" if ours.best.step_s <= best.step_s else best.name,
    }


def timed_search(
    facts: ProgramFacts, cluster: Cluster, options: SearchOptions
) -> tuple[SearchResult, dict[str, float]]:
    """The search, and its processor seconds by phase."""
    tabulating_s = 0.0
    searched = [time.process_time()]

    def tables(m: int) -> Any:
        nonlocal tabulating_s
        start = time.process_time()
        result = cost_tables(facts, cluster, m, options.tables)
        tabulating_s += time.process_time() - start
        return result

    start = searched[0]
    result = search(
        facts,
        cluster,
        options,
        tables,
        progress=lambda m, best_s: searched.append(time.process_time()),
    )
    end = time.process_time()
    return result, {
        "total_s": end - start,
        "tables_s": tabulating_s,
        "program_s": searched[-1] - start - tabulating_s,
        "judge_s": end - searched[-1],
    }


def share_of_peak(facts: ProgramFacts, cluster: Cluster, step_s: float) -> float:
    """The model's FLOPs, recomputation included, over the summed peak rates."""
    flops = sum(
        amount.of(facts.batch_size)
        for layer in facts.layers
        for flops in (layer.forward_flops, layer.backward_flops)
        for amount in flops.values()
    )
    peak = sum(g.kind.peak_flops.get("float16", 0.0) * g.num_devices for g in cluster.groups)
    return flops / step_s / peak


def compared(
    theirs: Baseline,
    ours: SearchResult,
    facts: ProgramFacts,
    cluster: Cluster,
    case: Case,
    options: SearchOptions,
) -> dict[str, Any]:
    """A baseline's plan, and our gain over it: with all held equal, then freed one by one."""
    found = theirs.evaluation
    if found is None:
        return {"step_s": None, "why": "no plan of its own fits"}
    row = {
        "step_s": theirs.step_s,
        "gain": theirs.step_s / ours.best.step_s,
        "microbatches": found.plan.num_microbatches,
        "schedule": found.schedule,
        "balance": found.balance,
        "stages": [f"{s.group}[{s.devices}]: {s.first_layer}-{s.last_layer}" for s in found.stages],
    }
    if not case.held_equal:
        return row
    recompute = tuple(sorted({s.recompute for s in found.plan.pipelines[0].stages}, reverse=True))
    equal = replace(
        options,
        num_microbatches=(found.plan.num_microbatches,),
        schedule=found.schedule if theirs.name != "single_group" else options.schedule,
        tables=TableOptions(recompute=recompute),
    )

    def gain(freed: SearchOptions) -> float | None:
        """None where no plan of ours fits so."""
        try:
            return theirs.step_s / search(facts, cluster, freed).best.step_s
        except PlanError:
            return None

    steps = {
        "all equal": equal,
        "schedule free": replace(equal, schedule=options.schedule),
        "and M free": replace(
            equal, schedule=options.schedule, num_microbatches=options.num_microbatches
        ),
        "and recomputation free": options,
    }
    row["gain with"] = {name: gain(freed) for name, freed in steps.items()}
    return row


FROM_JAXPR = {"from-jaxpr": 32, "from-jaxpr-deep": 48}
"""Case -> blocks. A block is two layers; GPT-2.6B has 32, 48 of its blocks are 98 layers."""


def from_jaxpr(blocks: int) -> dict[str, Any]:
    """Processor seconds by pass, from the jaxpr of GPT-2.6B's blocks to their plan on (8,2,2)."""
    import jax
    import optax

    import hetpass as hp
    from benchmarks.models import gpt_linen
    from benchmarks.models.sizes import GPT_SIZES

    config = replace(GPT_SIZES["2.6B"], layers=blocks, remat=False, dtype="float16")
    state = jax.eval_shape(
        gpt_linen.make_create_state(config, optax.adamw(1e-4)), jax.random.key(0)
    )
    tokens = jax.ShapeDtypeStruct((1024, config.seq), np.int32)
    last, seconds = time.process_time(), {}

    def observe(record: Any) -> None:
        nonlocal last
        now = time.process_time()
        seconds[record.name] = seconds.get(record.name, 0.0) + now - last
        last = now

    step = hp.het_parallelize(
        gpt_linen.train_step,
        cluster=harp(8, 2, 2),
        options=hp.Options(observer=observe, verify=False),
    )
    traced = step.trace(state, {"tokens": tokens, "labels": tokens})
    tracing = dict(seconds)
    rows: dict[str, Any] = {"trace_s": tracing["trace"]}
    for name, cluster in {
        "first": harp(8, 2, 2),
        "a group less": harp(8, 2),
        "two devices more": harp(8, 4, 2),
    }.items():
        seconds.clear()
        began = last = time.process_time()
        planned = traced.on(cluster).plan()
        rows[name] = {
            "total_s": time.process_time() - began,
            "by_pass_s": dict(seconds),
            "layers": planned.num_layers,
            "microbatches": planned.plan.num_microbatches,
            "step_s": planned.plan.predictions["step_s"],
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, *FROM_JAXPR])
    parser.add_argument("--only", nargs="+", choices=[*CASES, *FROM_JAXPR])
    parser.add_argument(
        "--intra-op", action="store_true", help="the figures of benchmarks/intra_op.py instead"
    )
    arguments, others = parser.parse_known_args()
    if arguments.intra_op:
        from benchmarks import intra_op

        raise SystemExit(intra_op.main(others))
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    chosen = arguments.case
    if chosen:
        case = from_jaxpr(FROM_JAXPR[chosen]) if chosen in FROM_JAXPR else run(chosen)
        json.dump(case, sys.stdout, indent=1)
        return
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if arguments.only else {}
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "note": "steps are simulated on analytic costs; nothing here was measured on hardware",
        "cases": stored.get("cases", {}),
    }
    for name in arguments.only or [*CASES, *FROM_JAXPR]:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.planning", "--case", name],
            capture_output=True,
            text=True,
            check=True,
        )
        case = results["cases"][name] = json.loads(child.stdout)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        if name in FROM_JAXPR:
            print(f"{name}: {case['first']['layers']} layers, {case['first']['total_s']:.1f} s")
            continue
        print(
            f"{name}: ours {case['ours']['step_s']:.3f} s, planned in "
            f"{case['planning']['total_s']:.1f} s"
        )
        for other, row in case["baselines"].items():
            step_s = row["step_s"] or math.inf
            print(f"  {other}: {step_s:.3f} s, {step_s / case['ours']['step_s']:.2f} times")


if __name__ == "__main__":
    main()
