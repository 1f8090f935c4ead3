"""Predicted against measured stage seconds on virtual devices, after `hetpass profile`.

    python -m benchmarks.calibration

A GPT is planned by hand over one to three groups of one virtual device each, from even to lopsided
cuts. Predictions come from a profile of the layers that was measured before (kind by kind, each
layer alone); the run is measured by the runtime's own timeline. One microbatch is in flight at a
time, so that stages do not compete for the machine's cores; the least of several steps counts on
both sides. Without a profile the same cost model takes the catalogue's round figures for a
processor: that error stands beside, as does that of rates and bandwidth measured alone.

Results are written to benchmarks/results/calibration.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import hetpass as hp
from benchmarks.models import gpt_linen
from benchmarks.models.sizes import GPTConfig
from hetpass.cost.analytic import ASSUMED
from hetpass.cost.calibrate import calibrated_cluster
from hetpass.ir.plan import Pipeline
from hetpass.planner.plan_tables import plan_costs
from hetpass.tools.measure_devices import measure_devices
from hetpass.tools.measure_layers import measure_layers
from hetpass.tools.target import Target

RESULTS = Path(__file__).parent / "results" / "calibration.json"
CONFIG = GPTConfig(hidden=384, layers=6, heads=6, vocab=4096, seq=128)
BATCH, MICROBATCHES = 8, 2


def make_target() -> Target:
    """The step, and shapes of its arguments."""
    import optax

    create = gpt_linen.make_create_state(CONFIG, optax.adamw(1e-3))
    tokens = jax.ShapeDtypeStruct((BATCH, CONFIG.seq), np.int32)
    arguments = (jax.eval_shape(create, jax.random.key(0)), {"tokens": tokens, "labels": tokens})
    return Target("gpt", gpt_linen.train_step, arguments)


def cuts(num_layers: int) -> list[list[int]]:
    """Last layers of the stages of each plan."""
    end = num_layers - 1
    return [
        [end],
        [end // 2, end],
        [end // 4, end],
        [3 * end // 4, end],
        [end // 3, 2 * end // 3, end],
        [end // 6, end // 2, end],
        [end // 2, 5 * end // 6, end],
    ]


def stage_plan(ends: list[int], traced: Any) -> Any:
    """Stage i on group i, one microbatch in flight."""
    firsts = [0, *(end + 1 for end in ends[:-1])]
    parts = [f"g{i}: {a}-{b}" for i, (a, b) in enumerate(zip(firsts, ends, strict=True))]
    plan = traced.with_plan(" | ".join(parts), num_microbatches=MICROBATCHES).plan
    stages = tuple(replace(stage, in_flight=1) for stage in plan.pipelines[0].stages)
    single = Pipeline(stages, MICROBATCHES)
    return traced.with_plan(replace(plan, pipelines=(single,), schedule="1f1b", tasks=()))


def measured_s(planned: Any, steps: int) -> list[dict[str, float]]:
    """Per stage, the least forward and backward seconds of a microbatch."""
    compiled = planned.compile()
    state, batch = (jax.tree.map(made_up, a) for a in planned.traced.call.args)
    least: dict[tuple[int, str], float] = {}
    for _ in range(steps):
        (state, _), timeline = compiled.timeline(state, batch)
        for lane in timeline.lanes:
            for span in timeline.on(lane):
                if span.kind in ("F", "B"):
                    key = (span.stage, span.kind)
                    least[key] = min(least.get(key, span.duration_s), span.duration_s)
    count = len(planned.plan.pipelines[0].stages)
    return [{kind: least[stage, kind] for kind in ("F", "B")} for stage in range(count)]


def made_up(shape: Any) -> Any:
    """Small positive numbers; tokens and counts are zero."""
    if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if np.issubdtype(shape.dtype, np.floating):
        return np.full(shape.shape, 0.02, shape.dtype)
    return np.zeros(shape.shape, shape.dtype)


def run(steps: int) -> dict[str, Any]:
    """All plans: a row per stage."""
    target = make_target()
    cluster = hp.Cluster.emulated({f"g{i}": 1 for i in range(3)})
    names = argparse.Namespace(
        microbatches=MICROBATCHES, schedule=None, per_microbatch=False, sharding=None
    )
    devices = measure_devices(jax.devices())
    profile = replace(devices, layers=measure_layers(target, names, print))
    rows = []
    step = hp.het_parallelize(target.step, cluster=cluster, donate_argnums=())
    traced = step.trace(*target.arguments)
    options = replace(step.settings.options, profile=profile)
    profiled = hp.het_parallelize(target.step, cluster=cluster, donate_argnums=(), options=options)
    known = profiled.trace(*target.arguments)
    num_layers = traced.facts.num_layers
    for ends in cuts(num_layers):
        planned = stage_plan(ends, known)
        plain = stage_plan(ends, traced)
        rates = calibrated_cluster(cluster, profile)
        predictions = {
            "layers": plan_costs(planned.plan, planned.facts, cluster, ASSUMED),
            "rates": plan_costs(plain.plan, plain.facts, rates, ASSUMED),
            "catalogue": plan_costs(plain.plan, plain.facts, cluster, ASSUMED),
        }
        for stage, seconds in enumerate(measured_s(planned, steps)):
            row: dict[str, Any] = {"plan": ends, "stage": stage, "measured": seconds}
            for name, costs in predictions.items():
                cost = costs.stages[stage]
                row[name] = {"F": cost.forward_s, "B": cost.backward_s + cost.weight_s}
            rows.append(row)
            print(row, flush=True)
    return {
        "date": profile.date,
        "machine": profile.machine,
        "versions": dict(profile.versions),
        "rows": rows,
        "median_error": {
            name: statistics.median(errors(rows, name)) for name in ("layers", "rates", "catalogue")
        },
    }


def errors(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Relative, of forward and backward of every stage."""
    return [abs(row[name][kind] / row["measured"][kind] - 1) for row in rows for kind in ("F", "B")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    results = run(parser.parse_args().steps)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{'plan':<14}{'stage':>6}{'F ms':>9}{'said':>9}{'B ms':>9}{'said':>9}")
    for row in results["rows"]:
        seen, said = row["measured"], row["layers"]
        numbers = [1e3 * x for x in (seen["F"], said["F"], seen["B"], said["B"])]
        cut = "|".join(map(str, row["plan"]))
        print(f"{cut:<14}{row['stage']:>6}" + "".join(f"{x:9.1f}" for x in numbers))
    for name, error in results["median_error"].items():
        print(f"median error, {name}: {error:.1%}")


if __name__ == "__main__":
    main()
