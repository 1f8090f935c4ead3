"""What the local runtime costs, as ratios measured in one run.

    python benchmarks/runtime.py [--out benchmarks/results/runtime.json]

For 2 and 4 stages, 4 and 16 microbatches, the pipelined step is timed against (a) the same
fragments and transfers with a wait after each, and (b) `jax.jit` of the whole step on one device.
Rounds of the three are interleaved; figures are medians. Every stage has one virtual CPU device,
and all share the machine's cores, so (a) shows what overlap gains and (b) what the cuts cost.
The driver's time per task and transfer is taken on a model too small to compute anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax

import hetpass as hp
from benchmarks.models import gpt_linen
from benchmarks.models.sizes import GPT_SIZES, GPTConfig
from benchmarks.text import TextBatches, standard_library_bytes
from hetpass.runtime.dispatch import Move, Run
from hetpass.runtime.local import LocalRuntime

STAGES = (2, 4)
MICROBATCHES = (4, 16)
DEFAULT_OUT = Path(__file__).resolve().parent / "results" / "runtime.json"
GOALS = {"back to back": 0.8, "jit": 1.2, "driver_s": 3e-4}


def batch_of(config: GPTConfig, size: int) -> dict[str, Any]:
    return next(iter(TextBatches(standard_library_bytes(100_000), size, config.seq)))


def compiled_step(config: GPTConfig, stages: int, microbatches: int, batch: Any) -> tuple[Any, Any]:
    """The pipelined step with one device per stage, and its state."""
    optimizer = optax.sgd(0.1)
    cluster = hp.Cluster.emulated({f"g{i}": 1 for i in range(stages)})
    step = hp.het_parallelize(
        gpt_linen.train_step, cluster=cluster, num_microbatches=microbatches, schedule="1f1b"
    )
    key = jax.random.key(0)
    create = gpt_linen.make_create_state(config, optimizer)
    compiled = step.trace(jax.eval_shape(create, key), batch).plan().compile()
    return compiled, compiled.init_state(create, key)


def waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: jax.block_until_ready(call(*arguments))


def back_to_back(compiled: Any) -> Any:
    """The same step with a wait after every fragment and transfer."""
    step = compiled.runtime.compiled
    executables = tuple(dataclasses.replace(e, call=waiting(e.call)) for e in step.executables)
    links = tuple(waiting(link) for link in step.links)
    alone = dataclasses.replace(step, executables=executables, links=links)
    return dataclasses.replace(compiled, runtime=LocalRuntime(alone))


def timed(step: Callable[..., Any], state: Any, batch: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - begin, state


def compare(config: GPTConfig, stages: int, microbatches: int, size: int, rounds: int) -> dict:
    """Median seconds of the three ways, and their ratios."""
    batch = batch_of(config, size)
    compiled, state = compiled_step(config, stages, microbatches, batch)
    copy = functools.partial(jax.tree.map, jax.numpy.copy)
    local = jax.device_put(copy(state), jax.devices()[0])
    steps = {
        "pipelined": (compiled, copy(state)),
        "back to back": (back_to_back(compiled), copy(state)),
        "jit": (jax.jit(gpt_linen.train_step, donate_argnums=0), local),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, (step, current) in steps.items():
            taken, new = timed(step, current, batch)
            steps[name] = (step, new)
            if number >= 2:  # the first rounds compile and warm up
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "stages": stages,
        "microbatches": microbatches,
        "median_s": {name: round(value, 5) for name, value in medians.items()},
        "ratio_to_back_to_back": round(medians["pipelined"] / medians["back to back"], 3),
        "ratio_to_jit": round(medians["pipelined"] / medians["jit"], 3),
    }


def driver_time(stages: int, microbatches: int, rounds: int) -> dict:
    """Seconds of the driver per task and transfer: the call, where nothing computes for long."""
    config = GPTConfig(hidden=8, layers=4, heads=1, vocab=16, seq=4)
    batch = {k: v % config.vocab for k, v in batch_of(config, 16).items()}
    compiled, state = compiled_step(config, stages, microbatches, batch)
    counts = {
        kind: sum(isinstance(i, kind) for i in compiled.runtime.program.instructions)
        for kind in (Run, Move)
    }
    spent = []
    for number in range(rounds + 2):
        begin = time.perf_counter()
        state, metrics = compiled(state, batch)
        sent = time.perf_counter() - begin
        jax.block_until_ready((state, metrics))
        if number >= 2:
            spent.append(sent)
    sends = sum(counts.values())
    return {
        "stages": stages,
        "microbatches": microbatches,
        "tasks": counts[Run],
        "transfers": counts[Move],
        "driver_s_per_send": round(statistics.median(spent) / sends, 7),
    }


def machine() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "cpus": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 1),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "hetpass": hp.__version__,
        "XLA_FLAGS": os.environ["XLA_FLAGS"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    args = parser.parse_args()
    config = dataclasses.replace(GPT_SIZES["tiny"], hidden=args.hidden, seq=64)
    about = machine() | {"batch": args.batch, "model": dataclasses.asdict(config)}
    print(f"{'stages':>6}{'microbatches':>14}{'pipelined':>12}{'/ back to back':>16}{'/ jit':>8}")
    steps = []
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            found = compare(config, stages, microbatches, args.batch, args.rounds)
            steps.append(found)
            print(
                f"{stages:>6}{microbatches:>14}{found['median_s']['pipelined']:>10.3f} s"
                f"{found['ratio_to_back_to_back']:>16.2f}{found['ratio_to_jit']:>8.2f}",
                flush=True,
            )
    print(f"\n{'stages':>6}{'microbatches':>14}{'tasks':>8}{'transfers':>11}{'driver, each':>16}")
    drivers = []
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            cost = driver_time(stages, microbatches, args.rounds)
            drivers.append(cost)
            print(
                f"{stages:>6}{microbatches:>14}{cost['tasks']:>8}{cost['transfers']:>11}"
                f"{cost['driver_s_per_send'] * 1e3:>13.3f} ms",
                flush=True,
            )
    result = {"machine": about, "goals": GOALS, "steps": steps, "driver": drivers}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {args.out}")


if __name__ == "__main__":
    main()
