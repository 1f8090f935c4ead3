"""The memory model against the compiler: whole models as one stage on H100s that are not here.

    python -m benchmarks.memory_sweep               every case that results do not hold yet
    python -m benchmarks.memory_sweep gpt-125M      cases of one model
    python -m benchmarks.memory_sweep --predict     predictions anew for what results hold

Needs `pip install "hetpass[dryrun-cuda12]"`; no driver, no device. Cases are compiled one after
another, equal fragments once. Each case is a model in bfloat16 with Adam in float32, four
microbatches, one stage; what the plan is predicted to hold on its fullest device stands beside what
the compiler says. Results go to benchmarks/results/memory_sweep.json after every case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hetpass as hp
from benchmarks.dryrun import NETWORK, dryrun_of, processor_s
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.planner.evaluate import evaluate
from hetpass.stages import ASSUMED, Planned
from hetpass.tools.measure_devices import machine, versions
from hetpass.tools.models.steps import model_step

RESULTS = Path(__file__).parent / "results" / "memory_sweep.json"
KIND = "H100-80"
MICROBATCHES, EXAMPLES = 4, 4
"""Of a step; and examples of a microbatch on one row of devices."""

MODELS = ("gpt-125M", "moe-380M", "gpt-350M")
"""Twelve layers, eight with experts in every second, and twenty-four."""

MESHES = ((1, 1), (4, 1), (8, 1), (2, 4))
"""Rows of data parallelism, and devices of a row."""


def cases() -> list[tuple[str, tuple[int, int], str]]:
    """Model, mesh, recomputation."""
    return list(itertools.product(MODELS, MESHES, ("none", "full")))


def run(name: str, mesh: tuple[int, int], recompute: str) -> dict[str, Any]:
    """One case, compiled; nothing is executed."""
    planned = planned_for(name, mesh, recompute)
    began = processor_s()
    compiled = dryrun_of(planned, processor_s).stages[0]
    return {
        "compiled peak_bytes": compiled.peak_bytes,
        **predicted(planned, compiled.peak_bytes),
        "processor_s": processor_s() - began,
        "longest compile, processor_s": max(f.compile_s for f in compiled.fragments),
        "fragments": [str(fragment) for fragment in compiled.fragments],
    }


def planned_for(name: str, mesh: tuple[int, int], recompute: str) -> Planned:
    """All layers as one stage."""
    rows, ways = mesh
    group = DeviceGroup("h100", find_kind(KIND), 1, 8, None, NETWORK)
    on = Cluster((group,), default_link=NETWORK)
    model = model_step(name, batch_size=MICROBATCHES * EXAMPLES * rows, dtype="bfloat16")
    traced = hp.het_parallelize(model.step, cluster=on).trace(model.state, model.batch)
    layers = traced.plan(num_microbatches=MICROBATCHES).facts.num_layers
    axes = (("data", rows), *((("model", ways),) if ways > 1 else ()))
    replica = Replica(group.name, tuple(range(rows * ways)), axes)
    stage = StagePlan(0, layers - 1, (replica,), recompute=recompute)
    return traced.with_plan(Plan((Pipeline((stage,), MICROBATCHES),)))


def predicted(planned: Planned, compiled_bytes: int) -> dict[str, float]:
    """What the plan is expected to hold, beside what was compiled."""
    stage = evaluate(planned.plan, planned.facts, planned.traced.cluster, ASSUMED).stages[0]
    held = stage.fixed_bytes + stage.activation_bytes
    return {
        "predicted peak_bytes": held,
        "predicted over compiled": held / compiled_bytes,
        "predicted fixed_bytes": stage.fixed_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--predict", action="store_true")
    options = parser.parse_args()
    chosen = options.models or MODELS
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    stored.update(machine=machine(), versions=versions(), date=time.strftime("%Y-%m-%d"))
    for name, mesh, recompute in cases():
        key = f"{name}, {mesh[0]}x{mesh[1]}, {recompute}"
        if name not in chosen or (key in stored["cases"]) != options.predict:
            continue
        if options.predict:
            row = stored["cases"][key]
            planned = planned_for(name, mesh, recompute)
            row.update(predicted(planned, row["compiled peak_bytes"]))
        else:
            row = stored["cases"][key] = run(name, mesh, recompute)
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        print(
            f"{key}: compiled {row['compiled peak_bytes'] / 1e9:.2f} GB, predicted "
            f"{row['predicted peak_bytes'] / 1e9:.2f}, {row['predicted over compiled']:.2f}; "
            f"{row['processor_s']:.0f} s of a processor",
            flush=True,
        )


if __name__ == "__main__":
    main()
