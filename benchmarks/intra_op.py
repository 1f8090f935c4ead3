"""How long the intra-op planner takes, and how good its answers are.

    python -m benchmarks.intra_op [--size 6.7B] [--devices 8] [--layers 100] [--out FILE]
    python -m benchmarks.planning --intra-op [the same]

The layers of a GPT in flax linen (half precision, float32 parameters, Adam; attention and MLP are
layers of their own) are read from the traced step, and planned for the devices of one A100 host.
Seconds are of processor time, cold: what is remembered between layers is forgotten before each. A
memory point is the fastest assignment found within one more limit on memory, with its gap to a
lower bound; the limits are spread evenly between the least memory and that of the fastest
assignment; what all limits share is done before. The same again exactly. Chaining gives every range
of a model of `--layers` layers; its gap is to a lower bound, 0 where it is exact.

Results are written to benchmarks/results/intra_op.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy

from benchmarks.models import gpt_linen
from benchmarks.models.sizes import GPT_SIZES
from hetpass.analysis.operation_graph import operation_graphs
from hetpass.cost import layouts, logical_meshes, reshard
from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.frontend.microbatch import split
from hetpass.frontend.segment import segment
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import DeviceGroup
from hetpass.ir.operation_graph import OperationGraph
from hetpass.planner.intra_op import strategies
from hetpass.planner.intra_op.answers import fastest
from hetpass.planner.intra_op.boundary import BoundaryTable, boundary_table
from hetpass.planner.intra_op.chain import chained
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.intra_op.linear_program import EXACT, Effort
from hetpass.planner.intra_op.memory_limits import MemoryLimits
from hetpass.planner.intra_op.program import Program, program
from hetpass.planner.intra_op.setting import Setting

MEMORY_POINTS = 9
RESULTS = Path(__file__).resolve().parent / "results" / "intra_op.json"
_REMEMBERING = (
    layouts._divisors,
    layouts._layouts,
    reshard._table,
    reshard._moves,
    strategies._strategies,
)


def layer_graphs(
    size: str, batch: int, num_microbatches: int
) -> tuple[tuple[OperationGraph, ...], tuple[int, ...]]:
    """Graphs of the layer kinds of a GPT with two blocks, and the kinds of its layers."""
    config = dataclasses.replace(
        GPT_SIZES[size], layers=2, remat=False, dtype="float16", param_dtype="float32"
    )
    create = gpt_linen.make_create_state(config, optax.adam(1e-3))
    state = jax.eval_shape(create, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, config.seq), jnp.int32)
    traced = trace(
        gpt_linen.train_step,
        (state, {"tokens": tokens, "labels": tokens}),
        {},
        Signature(batch_argnums=(1,)),
    )
    layered = segment(split(traced, num_microbatches))
    return operation_graphs(layered), tuple(layered.layer_kinds)


def layer(graph: OperationGraph, setting: Setting) -> tuple[BoundaryTable, dict[str, Any]]:
    """One layer kind on one mesh: seconds of each part of planning."""
    for function in _REMEMBERING:
        function.cache_clear()
    seconds: dict[str, float] = {}
    started = time.process_time()

    def lap(name: str) -> None:
        nonlocal started
        now = time.process_time()
        seconds[name], started = now - started, now

    made = program(graph, setting)
    lap("build_s")
    answer = fastest(made)
    lap("solve_s")
    assert answer is not None
    points = memory_points(made, Effort())
    lap("memory_points_s")
    exact = memory_points(made, EXACT)
    lap("exact_memory_points_s")
    table = boundary_table(made)
    lap("boundary_table_s")
    assert table is not None
    priced = evaluate(graph, setting, answer.assignment)
    lap("evaluate_s")
    return table, {
        **seconds,
        "memory_points": points,
        "exact_memory_points": exact,
        "operations": len(graph.operations),
        "strategies": sum(len(costs) for costs in made.seconds.nodes),
        "edge_entries": sum(costs.size for costs in made.seconds.edges.values()),
        "gap": answer.gap,
        "step_s": priced.step_s(setting.num_microbatches),
        "boundary_states": list(table.costs.shape),
        "collectives": {
            f"{when} {kind} {'x'.join(axes)}": [found.count, found.result_bytes]
            for (when, kind, axes), found in priced.collectives.items()
        },
    }


def memory_points(made: Program, effort: Effort) -> list[dict[str, float]]:
    """Limits one after the other, from loose to tight: seconds of processor time for each."""
    began = time.process_time()
    limits = MemoryLimits(made, effort)
    assert limits.fast is not None
    most, least = limits.fast.memory_bytes, limits.known[0].memory
    if most > least:
        limits.start(most)
    ready = time.process_time() - began
    found = []
    for k in reversed(range(MEMORY_POINTS)):
        limit = least + (k + 0.5) / MEMORY_POINTS * (most - least)
        began = time.process_time()
        answer = limits.fastest(limit)
        took = time.process_time() - began
        if answer is None:  # the least and the most are one
            continue
        assert answer.memory_bytes <= limit
        found.append(
            {
                "limit_bytes": limit,
                "step_s": answer.seconds,
                "gap": answer.gap,
                "parts": answer.branches + 1,
                "seconds": took,
            }
        )
    found[0]["seconds_before"] = ready  # the free solve, and what all limits share
    return found


def chain(
    tables: list[BoundaryTable], kinds: tuple[int, ...], layers: int, effort: Effort
) -> dict[str, Any]:
    """All ranges of a model whose inner layers repeat."""
    inner = kinds[1:-1]
    order = (kinds[0], *(inner * layers)[: layers - 2], kinds[-1])
    started = time.process_time()
    found = chained(tables, order, effort)
    took = time.process_time() - started
    known = np.isfinite(found.costs)
    gaps = found.costs[known] / found.lower[known] - 1
    return {
        "layers": layers,
        "ranges": int(known.sum()),
        "seconds": took,
        "largest_gap": float(gaps.max()),
        "whole_model_s": float(found.costs[0, -1]),
    }


def case(mesh: LinkedMesh, args: argparse.Namespace, group: DeviceGroup) -> dict[str, Any]:
    graphs, kinds = args.graphs
    setting = Setting(mesh, group.kind, args.microbatches, 4, alone=False)
    tables, rows = [], []
    for graph in graphs:
        table, row = layer(graph, setting)
        tables.append(table)
        rows.append(row)
    return {
        "mesh": dict(mesh.axes),
        "layer_kinds": rows,
        "all_ranges": chain(tables, kinds, args.layers, Effort(refinements=0)),
        "all_ranges_by_default": chain(tables, kinds, args.layers, Effort()),
        "all_ranges_exactly": chain(tables, kinds, args.layers, EXACT),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="6.7B", choices=[*GPT_SIZES])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.graphs = layer_graphs(args.size, args.batch, args.microbatches)
    group = DeviceGroup("a100", find_kind("A100-40"), 1, args.devices)
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "scipy": scipy.__version__,
        "model": f"GPT {args.size}, batch {args.batch}, {args.microbatches} microbatches",
        "cases": [
            case(mesh, args, group) for mesh in logical_meshes.logical_meshes(group, args.devices)
        ],
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for found in record["cases"]:
        for ranges in ("all_ranges", "all_ranges_by_default", "all_ranges_exactly"):
            row = found[ranges]
            print(
                f"{found['mesh']} {ranges}: {row['seconds']:.2f} s, "
                f"gap {row['largest_gap']:.1e}, {row['whole_model_s']:.6f} s a step"
            )
        for row in found["layer_kinds"]:
            total = row["build_s"] + row["solve_s"]
            print(
                f"  {row['operations']} operations: {total:.2f} s to build and solve, "
                f"{row['boundary_table_s']:.2f} s for the boundary table"
            )
            for name in ("memory_points", "exact_memory_points"):
                seconds = [point["seconds"] for point in row[name]]
                gaps = [point["gap"] for point in row[name]]
                print(
                    f"    {name}: {statistics.median(seconds):.2f} s each, {max(seconds):.2f} at "
                    f"most; gap {statistics.mean(gaps):.2%}, {max(gaps):.2%} at most"
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
