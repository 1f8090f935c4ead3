"""Random legal assignments against `jax.jit`, and what compiles against what was priced.

    python benchmarks/assignments.py layers --count 100   # of layers of up to 40 equations
    python benchmarks/assignments.py gpt --count 6        # of a whole GPT block
    python benchmarks/assignments.py models               # solved ones: priced = compiled?
    python benchmarks/assignments.py chained              # and what the solver's evaluator says?
    python benchmarks/assignments.py reshards             # all pairs on three meshes

Virtual CPU devices. Results are added to `benchmarks/results/assignments.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# Run as a script, the folder above this one holds `benchmarks`; JAX reads its flags on import.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from benchmarks.models.layer_steps import STEPS, gpt_step
from hetpass.analysis.operation_graph import operation_graphs
from hetpass.backend.compile import CompiledStep, compile
from hetpass.backend.compiled_collectives import compiled_collectives
from hetpass.backend.priced_collectives import collective_differences
from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import Link
from hetpass.ir.operation_graph import Mesh, OperationGraph
from hetpass.ir.plan import Plan
from hetpass.ir.program import Layered
from hetpass.planner.intra_op.boundary import boundary_table
from hetpass.planner.intra_op.chain import chained
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.range_assignments import range_assignments
from hetpass.planner.intra_op.setting import Setting
from hetpass.planner.intra_op.shared_parameters import agreed
from hetpass.planner.intra_op.solve import solve
from hetpass.planner.schedule_choice import plan_schedule
from hetpass.transforms.partition import partition
from tests.backend.assigned_cases import (
    CASES,
    MESHES,
    Case,
    assigned_plan,
    drawn,
    layered,
    outcome,
)
from tests.backend.reshard_pairs import all_pairs, resharded
from tests.equality import differences

RESULTS = Path(__file__).parent / "results" / "assignments.json"
MICROBATCHES = 2

RESHARD_MESHES: dict[str, tuple[Mesh, tuple[int, ...]]] = {
    "1x8": ((("data", 8),), (16, 8)),
    "2x4": ((("data", 2), ("model", 4)), (16, 8)),
    "2x2x2": ((("x", 2), ("y", 2), ("z", 2)), (8, 16)),
}
MODEL_MESHES: dict[str, Mesh] = {
    "1x8": (("data", 8),),
    "2x4": (("data", 2), ("model", 4)),
    "4x2": (("data", 4), ("model", 2)),
}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------------------------------------
# Against jax.jit


def check(case: Case, seed: int) -> dict[str, Any]:
    """One random assignment per layer kind, on a random mesh, run as one stage."""
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    source = layered(case, MICROBATCHES)
    (own,) = drawn(source, [mesh], rng)
    result = outcome(case, assigned_plan(source, [("a", mesh, own)]), {"a": 8})
    found = differences(result, jax.jit(case.step)(case.state, case.batch))
    return {
        "seed": seed,
        "mesh": [list(axis) for axis in mesh],
        "operations": [len(a.operations) for a in own],
        "equal": not found,
        "differences": [str(d) for d in found],
    }


def run_layers(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for seed in range(args.first, args.first + args.count):
        name = list(CASES)[seed % len(CASES)]
        rows.append({"case": name, **check(CASES[name](), seed)})
        say(f"{seed:>4} {name:<12} {'equal' if rows[-1]['equal'] else rows[-1]['differences']}")
    return rows


def run_gpt(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for seed in range(args.first, args.first + args.count):
        rows.append({"case": "gpt", **check(gpt_step(), seed)})
        say(f"{seed:>4} gpt {'equal' if rows[-1]['equal'] else rows[-1]['differences']}")
    return rows


# ---------------------------------------------------------------------------------------------
# Priced and compiled


def run_reshards(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, (axes, shape) in RESHARD_MESHES.items():
        pairs = all_pairs(shape, axes)
        different = []
        for start in range(0, len(pairs), 60):
            done = resharded(shape, axes, pairs[start : start + 60])
            different += [str(d) for d in done.differences]
            for result, expected in zip(done.call(*done.sources), done.whole, strict=True):
                np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-5)
        rows.append({"mesh": name, "pairs": len(pairs), "different": different})
        say(f"{name}: {len(pairs)} pairs, {len(different)} differences")
    return rows


def run_models(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Solved assignments of every layer kind, one stage, compiled."""
    rows = []
    fast, slow = Link(1e-8, 1e11), Link(1e-8, 5e10)
    for name in args.models.split(",") if args.models else STEPS:
        case = STEPS[name]()
        source = layered(case, MICROBATCHES)
        graphs = operation_graphs(source)
        for mesh_name, axes in MODEL_MESHES.items():
            linked = LinkedMesh(axes, (slow, fast)[2 - len(axes) :])
            setting = Setting(linked, find_kind("cpu"), num_microbatches=MICROBATCHES)
            own = []
            for graph in graphs:
                answer = solve(graph, setting)
                assert answer is not None
                own.append(answer.assignment)
            row = priced_and_compiled(assigned_plan(source, [("a", axes, tuple(own))]), source)
            rows.append({"model": name, "mesh": mesh_name, **row})
            say(
                f"{name:<12} {mesh_name}: {row['priced_bytes']:,.0f} bytes, "
                f"{row['different_bytes']:,.0f} differ ({row['share']:.3%})"
            )
    return rows


def run_chained(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The best assignment of the whole model on one stage, as plans have it: bytes by the solver's
    own evaluator, as emitted, as compiled; of one microbatch, and of what happens once."""
    rows = []
    fast, slow = Link(1e-8, 1e11), Link(1e-8, 5e10)
    for name in args.models.split(",") if args.models else STEPS:
        source = layered(STEPS[name](), MICROBATCHES)
        graphs = operation_graphs(source)
        for mesh_name, axes in MODEL_MESHES.items():
            linked = LinkedMesh(axes, (slow, fast)[2 - len(axes) :])
            plan, priced = chained_plan(source, graphs, linked)
            rows.append(
                {"model": name, "mesh": mesh_name, **evaluated_and_emitted(plan, source, priced)}
            )
            say(
                f"{name:<12} {mesh_name}: evaluated {rows[-1]['evaluated_bytes']:,.0f}, emitted "
                f"{rows[-1]['emitted_bytes']:,.0f}, {rows[-1]['different_bytes']:,.0f} differ "
                f"({rows[-1]['share']:.2%}); compiled: {rows[-1]['compiled_differ_bytes']:,.0f}"
            )
    return rows


def chained_plan(
    source: Layered, graphs: Sequence[OperationGraph], linked: LinkedMesh
) -> tuple[Plan, Counter[str]]:
    """The best assignment of all layers on one stage; bytes of collectives by the evaluator."""
    setting = Setting(linked, find_kind("cpu"), MICROBATCHES, alone=False)
    made = agreed([program(graph, setting) for graph in graphs])
    tables = [boundary_table(own) for own in made]
    chain = chained([t for t in tables if t is not None], source.layer_kinds)
    own = range_assignments(chain, 0, source.num_layers)
    priced = Counter[str]()
    for kind, assignment in zip(source.layer_kinds, own, strict=True):
        found = evaluate(graphs[kind], setting, assignment)
        assert not found.violations
        for key, c in found.collectives.items():
            priced[_key(*key)] += c.result_bytes
    plan = assigned_plan(source, [("a", linked.axes, None)])
    (pipeline,) = plan.pipelines
    stage = replace(pipeline.stages[0], assignments=own)
    return replace(plan, pipelines=(replace(pipeline, stages=(stage,)),)), priced


def _key(when: str, kind: str, axes: Sequence[str]) -> str:
    return f"{when} {kind} {'x'.join(axes)}"


def evaluated_and_emitted(plan: Plan, source: Any, priced: Counter[str]) -> dict[str, Any]:
    emitted, reasons = Counter[str](), dict[str, list[str]]()
    compiled_differ = 0.0
    compiled = []
    for executable in compiled_step(plan, source).executables:
        own = executable.program
        when = own.role if own.role in ("forward", "backward") else "once"
        for e in own.emitted():
            emitted[_key(when, e.kind, e.axes)] += e.result_bytes * e.count
            line = f"{e.reason}: {e.count} of {e.result_bytes:,.0f} bytes"
            reasons.setdefault(_key(when, e.kind, e.axes), []).append(line)
        made = compiled_collectives(executable.call.as_text() or "", own.mesh)
        for d in collective_differences(own.emitted(), made, own.mesh):
            compiled_differ += d.difference_bytes
            compiled.append(f"{own.role} {own.phase}: {d}")
    differ = {k: (priced[k], emitted[k]) for k in sorted({*priced, *emitted})}
    differ = {k: v for k, v in differ.items() if abs(v[0] - v[1]) > 0.5}
    total = sum(emitted.values())
    different = sum(abs(one - other) for one, other in differ.values())
    return {
        "evaluated_bytes": sum(priced.values()),
        "emitted_bytes": total,
        "different_bytes": different,
        "share": different / max(total, 1.0),
        "compiled_differ_bytes": compiled_differ,
        "compiled_differ": compiled,
        "differ": {k: {"bytes": v, "emitted for": reasons.get(k, [])} for k, v in differ.items()},
    }


def compiled_step(plan: Plan, source: Any) -> CompiledStep:
    staged = partition(source, plan)
    schedule = plan_schedule(plan, has_backward=True, num_microbatches=staged.num_microbatches)
    return compile(staged, plan, {"a": jax.devices()}, schedule)


def priced_and_compiled(plan: Plan, source: Any) -> dict[str, Any]:
    compiled = compiled_step(plan, source)
    priced = different = 0.0
    kinds: dict[str, float] = {}
    found = []
    for executable in compiled.executables:
        own = executable.program
        made = compiled_collectives(executable.call.as_text() or "", own.mesh)
        for e in own.emitted():
            priced += e.result_bytes * e.count
            kinds[e.kind] = kinds.get(e.kind, 0.0) + e.count
        for d in collective_differences(own.emitted(), made, own.mesh):
            different += d.difference_bytes
            found.append(f"{own.role} {own.phase}: {d}")
    return {
        "priced_bytes": priced,
        "different_bytes": different,
        "share": different / max(priced, 1.0),
        "collectives": kinds,
        "differences": found,
    }


# ---------------------------------------------------------------------------------------------


def save(part: str, rows: list[dict[str, Any]], seconds: float) -> None:
    """Adds rows to the stored ones of the part; a row of the same keys is replaced."""
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(str(row.get(k)) for k in ("case", "model", "mesh", "seed"))

    old = {key(row): row for row in stored.get(part, {}).get("rows", [])}
    old.update({key(row): row for row in rows})
    stored[part] = {
        "rows": list(old.values()),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds_of_last_run": round(seconds, 1),
    }
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


PARTS = {
    "layers": run_layers,
    "gpt": run_gpt,
    "models": run_models,
    "chained": run_chained,
    "reshards": run_reshards,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--models", help="some of " + ", ".join(STEPS))
    args = parser.parse_args(argv)
    began = time.perf_counter()
    rows = PARTS[args.part](args)
    save(args.part, rows, time.perf_counter() - began)
    wrong = [row for row in rows if not row.get("equal", True) or row.get("different")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
