"""Dry runs: plans compiled for GPUs that are not here (and TPUs), by the real compiler.

    python -m benchmarks.dryrun               GPT-2.6B on H100 + A100 + V100
    python -m benchmarks.dryrun --tpu         GPT-350M on TPU-v5e + H100

Needs `pip install "hetpass[dryrun-cuda12]"`, and for TPUs `"hetpass[dryrun-tpu]"`; no driver, no
device. Results go to benchmarks/results/dryrun.json: memory and collectives of every fragment as
compiled, beside what the plan was predicted to hold. Fragments are compiled one after another,
equal ones once; their seconds are by the clock on the wall, those of all together also of a
processor, with the assemblers that the compiler starts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hetpass as hp
from hetpass.backend.dryrun import Clock, DryRun, DryStage, dryrun
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, Link
from hetpass.pipeline import step_schedule
from hetpass.planner.evaluate import StageEvaluation, evaluate
from hetpass.stages import ASSUMED, Planned
from hetpass.tools.measure_devices import machine, versions
from hetpass.tools.models.steps import model_step

RESULTS = Path(__file__).parent / "results" / "dryrun.json"
NETWORK = Link(100e-6, 12.5e9)
CASES = {
    "gpu": ("gpt-2.6B", ("H100-80", "A100-40", "V100-16"), "float16"),
    "tpu": ("gpt-350M", ("TPU-v5e", "H100-80"), "bfloat16"),
}


def cluster(kinds: tuple[str, ...]) -> Cluster:
    """One host of four devices of each kind."""
    groups = tuple(
        DeviceGroup(name.lower().replace("-", "_"), find_kind(name), 1, 4, None, NETWORK)
        for name in kinds
    )
    return Cluster(groups, default_link=NETWORK)


def run(case: str) -> dict[str, Any]:
    """Traces, plans and compiles; nothing is executed."""
    name, kinds, dtype = CASES[case]
    model, on = model_step(name, dtype=dtype), cluster(kinds)
    traced = hp.het_parallelize(model.step, cluster=on).trace(model.state, model.batch)
    planned = traced.plan(num_microbatches=64)
    expected = evaluate(planned.plan, planned.facts, on, ASSUMED)
    began = time.perf_counter(), processor_s()
    found = dryrun_of(planned, time.perf_counter)
    seconds = time.perf_counter() - began[0], processor_s() - began[1]
    print(planned.plan)
    print(found)
    return {
        "model": name,
        "kinds": kinds,
        "plan": str(planned.plan).splitlines(),
        "fits": found.fits,
        "elapsed_s": seconds[0],
        "processor_s": seconds[1],
        "programs": found.programs,
        "compiled": found.compiled,
        "stages": [_stage(s, e) for s, e in zip(found.stages, expected.stages, strict=True)],
    }


def dryrun_of(planned: Planned, clock: Clock) -> DryRun:
    """As `planned.dryrun()`, one fragment after another."""
    staged = planned.traced.settings.passes.partition(planned.layered, planned.plan)
    held = step_schedule(staged, planned.plan).held()
    cluster = planned.traced.cluster
    return dryrun(staged, planned.plan, cluster, held, threads=1, clock=clock)


def processor_s() -> float:
    """Of this process and of those that it waited for: assemblers are processes of their own."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _stage(stage: DryStage, expected: StageEvaluation) -> dict[str, Any]:
    predicted = expected.fixed_bytes + expected.activation_bytes
    return {
        "kind": stage.kind,
        "compiled peak_bytes": stage.peak_bytes,
        "predicted peak_bytes": predicted,
        "predicted over compiled": predicted / stage.peak_bytes,
        "limit_bytes": stage.limit_bytes,
        "longest compile_s": max(f.compile_s for f in stage.fragments),
        "analytic seconds": {
            "forward": expected.forward_s,
            "backward": expected.backward_s,
            "of peak rates": ASSUMED.flops,
        },
        "the compiler's seconds": {
            fragment.role: seconds
            for fragment, seconds in zip(stage.fragments, stage.estimates_s, strict=True)
            if seconds is not None and fragment.role in ("forward", "backward")
        },
        "fragments": [str(fragment) for fragment in stage.fragments],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tpu", action="store_true")
    case = "tpu" if parser.parse_args().tpu else "gpu"
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    stored["cases"][case] = {"machine": machine(), "versions": versions(), **run(case)}
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
