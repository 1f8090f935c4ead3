"""How long the compiler's own passes take, in units of one `jax.make_jaxpr` of the step.

    python benchmarks/frontend.py [--out benchmarks/results/frontend.json] [--layers 6,12,24,48]

trace, split, segment and partition of a GPT, unrolled, by depth; and with `lax.scan` over the
layers, where the time should not depend on the depth. Nothing is compiled and no array is made.
Seconds are of processor time (the machine may be shared), the least of `--rounds` fresh runs.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax

import hetpass as hp
from benchmarks.models import gpt_linen
from benchmarks.models.sizes import GPTConfig
from hetpass.frontend.trace import Signature
from hetpass.pipeline import Passes, PassRecord, Wanted

DEFAULT_OUT = Path(__file__).resolve().parent / "results" / "frontend.json"
PASSES = ("trace", "split", "segment", "partition")
GOALS = {"times make_jaxpr": 3.5, "plus seconds": 3.0, "exponent": 1.2, "scan, 96 to 12": 1.5}
BATCH, MICROBATCHES = 32, 8
CLUSTER = hp.Cluster.emulated({"fast": 4, "slow": 2, "last": 1}, speeds={"slow": 0.5})


def make_step(layers: int, scan: bool) -> tuple[Callable[..., Any], Any, Any]:
    """The GPT's train step, and the shapes of its state and batch."""
    config = GPTConfig(hidden=256, layers=layers, heads=8, vocab=1024, seq=128, scan=scan)
    create = gpt_linen.make_create_state(config, optax.adamw(1e-3))
    state = jax.eval_shape(create, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((BATCH, config.seq), np.int32)
    return gpt_linen.train_step, state, {"tokens": tokens, "labels": tokens}


def run_passes(step: Callable[..., Any], state: Any, batch: Any) -> dict[str, float]:
    """Seconds by pass; "make_jaxpr" and "equations" beside them."""
    forget()
    seconds: dict[str, float] = {}

    began = time.process_time()
    jax.make_jaxpr(step)(state, batch)
    seconds["make_jaxpr"] = time.process_time() - began
    forget()
    last = time.process_time()

    def observe(record: PassRecord) -> None:
        nonlocal last
        seconds[record.name], last = time.process_time() - last, time.process_time()

    passes = Passes(observe, verifying=False)
    traced = passes.trace(step, (state, batch), {}, Signature(), ())
    wanted = Wanted(MICROBATCHES, "1f1b", planner="even")
    decided = passes.plan(traced, CLUSTER, wanted, {})
    layered = decided.step.layered
    passes.partition(layered, decided.plan)
    seconds["equations"] = len(traced.jaxpr.eqns)
    seconds["layers"] = layered.num_layers
    return seconds


def forget() -> None:
    jax.clear_caches()
    gc.collect()


def measure(layers: int, scan: bool, rounds: int) -> dict[str, Any]:
    runs = [run_passes(*make_step(layers, scan)) for _ in range(rounds)]
    best = {name: min(r[name] for r in runs) for name in runs[0]}
    total = sum(best[name] for name in PASSES)
    result = {name: round(value, 3) for name, value in best.items()}
    result |= {"total": round(total, 3), "times make_jaxpr": round(total / best["make_jaxpr"], 2)}
    print(f"{'scan' if scan else 'unrolled'}, {layers} layers: {result}", flush=True)
    return result


def exponent(rows: dict[str, dict[str, Any]]) -> float:
    """Of the total in the number of equations, by least squares in logarithms."""
    x = np.log([row["equations"] for row in rows.values()])
    y = np.log([row["total"] for row in rows.values()])
    return float(np.polyfit(x, y, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--layers", default="6,12,24,48")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    depths = [int(n) for n in args.layers.split(",")]
    measure(1, False, 1)  # imports and first uses
    unrolled = {str(n): measure(n, False, args.rounds) for n in depths}
    scanned = {str(n): measure(n, True, args.rounds) for n in (12, 96)}
    deepest = unrolled[str(depths[-1])]
    allowed = GOALS["times make_jaxpr"] * deepest["make_jaxpr"] + GOALS["plus seconds"]
    found = {
        "seconds over allowed": round(deepest["total"] / allowed, 3),
        "exponent": round(exponent(unrolled), 3),
        "scan, 96 to 12": round(scanned["96"]["total"] / scanned["12"]["total"], 3),
    }
    met = {
        "seconds over allowed": found["seconds over allowed"] <= 1,
        "exponent": found["exponent"] <= GOALS["exponent"],
        "scan, 96 to 12": found["scan, 96 to 12"] <= GOALS["scan, 96 to 12"],
    }
    record = {
        "command": f"python benchmarks/frontend.py --layers {args.layers} --rounds {args.rounds}",
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "seconds of": "processor time",
        "unrolled, by layers": unrolled,
        "scan, by layers": scanned,
        "found": found,
        "goals": GOALS,
        "met": met,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(found, met)
    if not all(math.isfinite(v) for v in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
