"""The TPU compiler's own seconds for single layers, beside our analytic ones.

    python -m benchmarks.tpu_layers                 every case that results do not hold yet
    python -m benchmarks.tpu_layers gpt-1.3B        cases of one model

Needs `pip install "hetpass[dryrun-tpu]"`; no device. A model keeps its sizes and two of its blocks;
every layer is a stage of its own on one chip, in bfloat16, for microbatches of eight examples;
equal layers are compiled once. Neither number was measured: what the compiler and we disagree
on is what nobody here knows. Results go to benchmarks/results/tpu_layers.json after every case.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from scipy.stats import spearmanr

import hetpass as hp
from hetpass.cost.analytic import PEAK
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, Link
from hetpass.planner.evaluate import evaluate
from hetpass.stages import ASSUMED
from hetpass.tools.measure_devices import machine, versions
from hetpass.tools.models.steps import model_step

RESULTS = Path(__file__).parent / "results" / "tpu_layers.json"
NETWORK = Link(100e-6, 12.5e9)
EXAMPLES = 8
"""Of a microbatch; there are two."""

CASES = (
    *((f"gpt-{size}", "TPU-v5e") for size in ("125M", "350M", "1.3B", "2.6B", "6.7B")),
    ("moe-380M", "TPU-v5e"),
    ("llama-7B", "TPU-v5e"),
    *(("gpt-1.3B", kind) for kind in ("TPU-v4", "TPU-v5p", "TPU-v6e")),
)
"""Two blocks of an MoE are a plain one and one with experts."""


def run(name: str, kind: str) -> list[dict[str, Any]]:
    """One row per distinct layer; nothing is executed."""
    on = Cluster((DeviceGroup("tpu", find_kind(kind), 1, 4, None, NETWORK),), default_link=NETWORK)
    model = model_step(name, batch_size=2 * EXAMPLES, dtype="bfloat16", layers=2)
    traced = hp.het_parallelize(model.step, cluster=on).trace(model.state, model.batch)
    planned = traced.with_plan(
        " | ".join(f"tpu[1]: {layer}" for layer in range(4)), num_microbatches=2
    )
    found = planned.dryrun()
    ours = evaluate(planned.plan, planned.facts, on, ASSUMED)
    at_peak = evaluate(planned.plan, planned.facts, on, PEAK)
    second = "block with experts" if name.startswith("moe") else None
    rows = []
    for number, layer in enumerate(("embedding", "block", second, "head")):
        if layer is None:
            continue
        stage = found.stages[number]
        said = {
            fragment.role: seconds
            for fragment, seconds in zip(stage.fragments, stage.estimates_s, strict=True)
        }
        rows.append(
            {
                "layer": layer,
                "compiler": [said["forward"], said["backward"]],
                "analytic": _seconds(ours.stages[number]),
                "analytic at peak": _seconds(at_peak.stages[number]),
                "compile_s": sum(fragment.compile_s for fragment in stage.fragments),
            }
        )
    return rows


def _seconds(stage: Any) -> list[float]:
    return [stage.forward_s, stage.backward_s]


def summary(cases: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """How our seconds go with the compiler's, over all layers and both directions."""
    rows = [row for found in cases.values() for row in found]
    pairs = [
        (mine, peak, theirs)
        for row in rows
        for mine, peak, theirs in zip(
            row["analytic"], row["analytic at peak"], row["compiler"], strict=True
        )
        if theirs > 0 and mine > 0
    ]
    mine, peak, theirs = np.array(pairs).T
    logs = np.log(mine / theirs)
    return {
        "directions of layers": len(pairs),
        "analytic over compiler, median": float(np.median(mine / theirs)),
        "at peak over compiler, median": float(np.median(peak / theirs)),
        "spread of the ratio, standard deviation as a factor": math.exp(float(np.std(logs))),
        "rank correlation": float(spearmanr(mine, theirs).statistic),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    chosen = parser.parse_args().models or sorted({name for name, _ in CASES})
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    stored.update(machine=machine(), versions=versions(), examples=EXAMPLES)
    for name, kind in CASES:
        key = f"{name} on {kind}"
        if name in chosen and key not in stored["cases"]:
            stored["cases"][key] = run(name, kind)
            stored["summary"] = summary(stored["cases"])
            RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        for row in stored["cases"].get(key, ()):
            print(
                f"{key}, {row['layer']}: compiler "
                + " and ".join(f"{1e3 * s:.2f}" for s in row["compiler"])
                + " ms, ours "
                + " and ".join(f"{1e3 * s:.2f}" for s in row["analytic"])
                + f"; compiled in {row['compile_s']:.0f} s",
                flush=True,
            )
    print(stored.get("summary"))


if __name__ == "__main__":
    main()
