"""Trains a byte-level GPT on real text, as a pipeline over an emulated cluster of unlike groups.

    python benchmarks/gpt.py                       # eight virtual CPU devices in two groups
    python benchmarks/gpt.py --check               # beside jax.jit of the same step, step by step
    python benchmarks/gpt.py --plan "fast[4](data=2,model=2): 0-3 | slow: 4-8"
    python benchmarks/gpt.py --runtime ray --groups 4 2 1 --check   # a process per group

The text is the source of Python's own standard library. Virtual devices share the machine's cores,
so tokens per second say nothing about a real cluster; the loss and the check do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run as a script, the folder above this one holds `benchmarks`; JAX reads its flags on import.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax

import hetpass as hp
from benchmarks.models import gpt_linen, gpt_nnx
from benchmarks.models.sizes import GPT_SIZES, GPTConfig, alpa_step_flops, parameter_count
from benchmarks.text import TextBatches, standard_library_bytes

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


@dataclass(frozen=True)
class Job:
    """What is trained: the step, how its state is made, and the batches.

    Attributes:
      step: (state, batch) -> (state, {"loss", "grad_norm", ["grads"]}).
      create: key -> state.
      evaluate: (state, batch) -> the mean loss without dropout; None where the model has none.
    """

    config: GPTConfig
    step: Callable[[Any, Any], Any]
    create: Callable[[jax.Array], Any]
    evaluate: Callable[[Any, Any], jax.Array] | None
    batches: TextBatches
    text_bytes: int


def make_job(args: argparse.Namespace) -> Job:
    kind = "float64" if args.float64 else "float32"
    base = GPT_SIZES[args.size]
    config = dataclasses.replace(
        base,
        seq=args.seq or base.seq,
        dropout=args.dropout,
        scan=args.scan,
        remat=args.remat or base.remat,
        dtype=kind,
        param_dtype=kind,
    )
    optimizer = {"sgd": optax.sgd, "adamw": optax.adamw}[args.optimizer](args.rate)
    evaluate: Callable[[Any, Any], jax.Array] | None = None
    if args.model == "linen":

        def train_step(state: Any, batch: Any) -> Any:
            return gpt_linen.train_step(state, batch, keep_grads=args.check)

        evaluate = functools.partial(gpt_linen.eval_step, config=config)
    else:
        train_step = gpt_nnx.make_train_step(config, optimizer, keep_grads=args.check)
    library = {"linen": gpt_linen, "nnx": gpt_nnx}[args.model]
    create = library.make_create_state(config, optimizer)
    text = standard_library_bytes()
    batches = TextBatches(text, args.batch, config.seq, args.seed)
    return Job(config, train_step, create, evaluate, batches, len(text))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("linen", "nnx"), default="linen")
    parser.add_argument("--size", choices=tuple(GPT_SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="examples per step")
    parser.add_argument("--seq", type=int, help="tokens per example; default: the size's own")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--plan", help="a plan in one line, or a JSON file; default: by FLOPs")
    parser.add_argument("--cluster", help="TOML or JSON file; default: see --groups")
    parser.add_argument(
        "--groups",
        type=int,
        nargs="+",
        default=[4, 3, 1],
        help="virtual devices of the groups fast, slow, last; default: 4 3 1",
    )
    parser.add_argument(
        "--runtime",
        choices=("local", "ray"),
        default="local",
        help="ray: a process per group, started by Ray",
    )
    parser.add_argument(
        "--optimizer", choices=("sgd", "adamw"), help="default: adamw; sgd to check"
    )
    parser.add_argument("--rate", type=float, help="learning rate; default: 3e-3, 0.1 for sgd")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--remat", action="store_true", help="recompute blocks in the backward pass"
    )
    parser.add_argument("--scan", action="store_true", help="one scan over the blocks")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare every step with jax.jit")
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.microbatches, *args.groups) < 1:
        parser.error("--steps, --batch, --microbatches and --groups are at least 1")
    if len(args.groups) > 3:
        parser.error("--groups: at most three sizes")
    args.optimizer = args.optimizer or ("sgd" if args.check else "adamw")
    args.rate = args.rate or {"sgd": 0.1, "adamw": 3e-3}[args.optimizer]
    return args


SPEEDS = {"fast": 1.0, "slow": 0.4, "last": 0.7}


def make_cluster(args: argparse.Namespace) -> hp.Cluster:
    if args.cluster:
        return hp.Cluster.from_file(args.cluster)
    sizes = dict(zip(SPEEDS, args.groups, strict=False))
    return hp.Cluster.emulated(sizes, speeds={name: SPEEDS[name] for name in sizes})


# ---------------------------------------------------------------------------------------------
# Printing


def show(name: str, value: object) -> None:
    first, *rest = str(value).splitlines() or [""]
    print(f"{name:<10}{first}")
    for line in rest:
        print(" " * 10 + line)


def show_job(job: Job, args: argparse.Namespace, cluster: hp.Cluster) -> None:
    c = job.config
    params = parameter_count(c)
    extras = [name for name in ("remat", "scan") if getattr(c, name)]
    extras += [f"dropout {c.dropout}"] if c.dropout else []
    show(
        "model",
        f"GPT {args.size} in flax {args.model}: {c.layers} layers, hidden {c.hidden}, "
        f"{c.heads} heads, {params:,} parameters, {' '.join([c.dtype, *extras])}",
    )
    show(
        "training",
        f"{args.optimizer}, rate {args.rate:g}, batch {args.batch} x {c.seq} tokens, "
        f"{alpa_step_flops(c, args.batch) / 1e9:.2f} GFLOP a step",
    )
    show("text", f"{job.text_bytes:,} bytes of Python {sys.version.split()[0]}'s standard library")
    show("cluster", cluster)


def progress_steps(steps: int) -> set[int]:
    """About a dozen steps to report, the first and the last among them."""
    return {1, 2, steps, *range(0, steps + 1, max(1, steps // 10))}


# ---------------------------------------------------------------------------------------------
# Checking


@dataclass
class Check:
    """The same step under `jax.jit` on one device, run beside the pipeline.

    Attributes:
      losses: the largest relative difference so far.
      grads: the largest of any leaf of the first step's gradient, and the leaf's path.
      evaluated: the relative difference of the companion's loss on a batch; None without one.
    """

    step: Any
    state: Any
    loss: float = 0.0
    grads: tuple[float, str] | None = None
    evaluated: float | None = None

    @classmethod
    def of(cls, job: Job, state: Any) -> Check:
        device = jax.devices()[0]
        copies = jax.tree.map(lambda x: jax.device_put(on_host(x), device), hp.fetch(state))
        return cls(jax.jit(job.step), copies)

    def compare(self, batch: Any, metrics: Any) -> None:
        self.state, expected = self.step(self.state, batch)
        gap = abs(float(metrics["loss"]) / float(expected["loss"]) - 1)
        self.loss = max(self.loss, gap)
        if self.grads is None:
            self.grads = largest_difference(hp.fetch(metrics["grads"]), expected["grads"])

    def compare_evaluation(self, job: Job, step: Any, state: Any, batch: Any) -> None:
        if job.evaluate is not None:
            found = step.companion(job.evaluate, num_microbatches=2)(state, batch)
            expected = jax.jit(job.evaluate)(self.state, batch)
            self.evaluated = abs(float(found) / float(expected) - 1)


def on_host(x: Any) -> Any:
    """A numpy array; keys stay keys, on one device."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            np.asarray(jax.random.key_data(x)), impl=jax.random.key_impl(x)
        )
    return np.asarray(x)


def largest_difference(actual: Any, expected: Any) -> tuple[float, str]:
    """The largest norm(actual - expected) / norm(expected) of a floating leaf, and its path."""
    worst = (0.0, "")
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, e), a in zip(leaves, jax.tree.leaves(actual), strict=True):
        if not jax.numpy.issubdtype(e.dtype, jax.numpy.floating):
            continue
        wide, other = np.asarray(e, np.float64), np.asarray(a, np.float64)
        size = np.linalg.norm(wide)
        gap = np.linalg.norm(wide - other)
        error = float(gap / size) if size else float(gap)
        worst = max(worst, (error, jax.tree_util.keystr(path, simple=True, separator=".")))
    return worst


def verdict(check: Check, state: Any, args: argparse.Namespace) -> bool:
    """Prints the comparison; whether it is within tolerance."""
    bound = TOLERANCE["float64" if args.float64 else "float32"]
    judged = args.optimizer == "sgd"
    assert check.grads is not None
    state_error, state_path = largest_difference(hp.fetch(state), check.state)
    show("check", f"against jax.jit of the same step on one device, tolerance {bound:g}")
    show("", f"loss       {check.loss:.1e}  largest relative difference of {args.steps} steps")
    show("", f"gradient   {check.grads[0]:.1e}  first step, largest of any leaf ({check.grads[1]})")
    show("", f"state      {state_error:.1e}  after step {args.steps}, largest leaf ({state_path})")
    if check.evaluated is not None:
        show("", f"evaluation {check.evaluated:.1e}  the companion's loss on one more batch")
    numbers = [check.grads[0]]
    if judged:
        numbers += [check.loss, state_error, check.evaluated or 0.0]
    else:
        show("", "adamw turns rounding noise into steps: only the gradient is judged")
    within = max(numbers) <= bound
    show("", "equal" if within else "NOT EQUAL")
    return within


# ---------------------------------------------------------------------------------------------
# Training


def compile_step(
    job: Job, args: argparse.Namespace, cluster: hp.Cluster
) -> tuple[Any, Any, Any, Iterator[dict[str, np.ndarray]]]:
    """(step, compiled step, fresh state, batches), with the time of every stage printed."""
    step = hp.het_parallelize(
        job.step,
        cluster=cluster,
        num_microbatches=args.microbatches,
        schedule=args.schedule,
        plan=hp.Plan.load(args.plan) if (args.plan or "").endswith(".json") else args.plan,
        runtime=args.runtime,
    )
    batches = iter(job.batches)
    first = next(batches)
    key = jax.random.key(args.seed)
    begin = time.perf_counter()
    shapes = jax.eval_shape(job.create, key)
    traced = step.trace(shapes, first)
    traced_s = time.perf_counter()
    planned = traced.plan()
    planned_s = time.perf_counter()
    show("plan", planned.plan)
    compiled = step.compiled_for(shapes, first) if args.check else planned.compile()
    compiled_s = time.perf_counter()
    state = compiled.init_state(job.create, key)
    jax.block_until_ready(state)
    created_s = time.perf_counter()
    show(
        "time",
        f"trace {traced_s - begin:.1f} s, plan {planned_s - traced_s:.2f} s, "
        f"compile {compiled_s - planned_s:.1f} s, state {created_s - compiled_s:.1f} s",
    )
    return step, compiled, state, itertools.chain([first], batches)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.float64:
        jax.config.update("jax_enable_x64", True)
    job, cluster = make_job(args), make_cluster(args)
    show_job(job, args, cluster)
    step, compiled, state, batches = compile_step(job, args, cluster)
    check = Check.of(job, state) if args.check else None
    print(f"\n{'step':>6}{'loss':>10}{'tokens/s':>12}")
    reported = progress_steps(args.steps)
    tokens, spent_s = 0, 0.0
    for number, batch in zip(range(1, args.steps + 1), batches, strict=False):
        begin = time.perf_counter()
        state, metrics = compiled(state, batch)
        loss = float(metrics["loss"])
        spent_s += time.perf_counter() - begin
        tokens += batch["tokens"].size
        if check is not None:
            check.compare(batch, metrics)
        if number in reported:
            print(f"{number:>6}{loss:>10.4f}{tokens / spent_s:>12,.0f}", flush=True)
            tokens, spent_s = 0, 0.0
    print()
    if check is not None:
        check.compare_evaluation(job, step, state, next(batches))
    return 0 if check is None or verdict(check, state, args) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except hp.HetpassError as refusal:
        sys.exit(str(refusal))
