"""Groups that really differ in speed: measured steps of plans and schedules beside predicted ones.

    python benchmarks/unlike.py speeds [--ratios 2 4] [--repeats]
    python benchmarks/unlike.py link [--shaped]
    python benchmarks/unlike.py overhead

Two processes, one per group. `speeds`: the second group is slower by a ratio; every way to cut the
layers between the groups, in both orders, is predicted from what was profiled, and measured; told
are the rank correlation, and our planner's plan against `even` and `single_group`. `link`: groups
of one speed over a slow link; schedules. `overhead`: what a task costs beside its computation.
With --shaped it is the kernel that slows the link: all of it runs in a network namespace of its
own, whose loopback interface lets so much through (`tc`, for root); the latency alone is added by
the transport.

A group's devices take their FLOPs over a rate that is below what a core can do, and sleep for the
rest: two processes on a busy machine then differ by what is asked for. With --repeats they compute
all the time instead (every executable runs k times on the slow group, each process on a core of
its own), which wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import ray
import scipy.stats

import hetpass as hp
from hetpass.backend.emulate import Emulation
from hetpass.ir.plan import Plan
from hetpass.ir.timeline import Timeline
from hetpass.pipeline import search_options, step_schedule
from hetpass.planner.baselines import BASELINES, baseline
from hetpass.planner.schedule_choice import choose_schedule
from hetpass.runtime.distributed.workers import WorkerOptions
from hetpass.runtime.transport.message import Slowness
from hetpass.runtime.watchdog import Limits
from hetpass.schedules.costs import LinkCost, PipelineCosts, StageCost
from hetpass.simulator import simulate

RESULTS = Path(__file__).resolve().parent / "results"
LAYERS, MICROBATCHES = 6, 8
LIMITS = Limits(silent_s=60)
INSIDE = "HETPASS_BENCHMARK_NAMESPACE"


@dataclass(frozen=True)
class Model:
    """Layers x + tanh(x @ w) on `rows` examples per microbatch.

    Attributes:
      layer_s: what one layer of one microbatch is to take, forward, on the faster group.
    """

    layers: int = LAYERS
    microbatches: int = MICROBATCHES
    rows: int = 16
    hidden: int = 128
    layer_s: float = 0.008

    @property
    def layer_flops(self) -> float:
        return 2.0 * self.rows * self.hidden**2

    def step(self, weights: Any, batch: Any) -> Any:
        def loss_fn(weights: Any) -> jax.Array:
            x = batch["x"]
            for number, w in enumerate(weights):
                x = x + jnp.tanh(x @ w)
                x = hp.stage_boundary(x) if number < len(weights) - 1 else x
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads), loss

    def create(self) -> Any:
        draw = np.random.default_rng(0)
        size = (self.hidden, self.hidden)
        return [draw.normal(size=size, scale=0.05).astype(np.float32) for _ in range(self.layers)]

    def batch(self) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(1)
        shape = (self.rows * self.microbatches, self.hidden)
        return {name: draw.normal(size=shape).astype(np.float32) for name in "xy"}


# Real products of matrices, some milliseconds of a core each: long beside what a task costs.
COMPUTING = Model(rows=384, hidden=1024)


class Bench:
    """Two processes, and steps of a model on them.

    Args:
      ratio: how much slower the group "slow" is.
      slowness: of their link. repeats: see the head of this module.
    """

    def __init__(
        self, model: Model, ratio: int, slowness: Slowness | None = None, repeats: bool = False
    ) -> None:
        self.model = model
        self.cluster = hp.Cluster.emulated({"fast": 1, "slow": 1}, speeds={"slow": 1 / ratio})
        rate = model.layer_flops / model.layer_s
        both = {("fast", "slow"): slowness, ("slow", "fast"): slowness} if slowness else {}
        self.workers = hp.Workers(
            options=WorkerOptions(
                limits=LIMITS,
                emulation={"fast": Emulation(), "slow": Emulation(repeats=ratio)}
                if repeats
                else {
                    "fast": Emulation(flops_per_s=rate),
                    "slow": Emulation(flops_per_s=rate / ratio),
                },
                cores={"fast": (0,), "slow": (1,)} if repeats else {},
                slowness=both,
            )
        )
        self.batch = model.batch()

    def compiled(self, plan: Plan | str | None, schedule: str = "1f1b") -> Any:
        step = hp.het_parallelize(
            self.model.step,
            cluster=self.cluster,
            num_microbatches=self.model.microbatches,
            plan=plan,
            schedule=schedule,
            runtime=self.workers,
        )
        return step.compiled_for(self.model.create(), self.batch)

    def measured(self, compiled: Any, steps: int) -> tuple[float, list[Timeline]]:
        """The median seconds of a step, by the clock on the wall, and timelines of two more."""
        state, loss = compiled(self.model.create(), self.batch)
        float(loss)
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            state, loss = compiled(state, self.batch)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - begin)
        timelines = []
        for _ in range(2):
            (state, _), timeline = compiled.timeline(state, self.batch)
            timelines.append(timeline)
        return statistics.median(seconds), timelines


@dataclass(frozen=True)
class Profile:
    """What was measured of a group: seconds per FLOP, forward and backward, and of the update."""

    forward_s: float
    backward_s: float
    update_s: float

    def stage(self, flops: tuple[float, float]) -> StageCost:
        forward, backward = flops
        return StageCost(
            forward * self.forward_s, backward * self.backward_s, update_s=self.update_s
        )


def stage_flops(compiled: Any) -> list[tuple[float, float]]:
    """Per stage, the FLOPs of a microbatch, forward and backward."""
    layered = compiled.planned.layered
    found = []
    for stage in compiled.planned.plan.pipelines[0].stages:
        span = slice(stage.first_layer, stage.last_layer + 1)
        found.append((sum(layered.forward_flops[span]), sum(layered.backward_flops[span])))
    return found


def spans(timelines: Sequence[Timeline], stage: int, kind: str) -> list[float]:
    found = [s for t in timelines for s in t.spans if s.kind == kind and s.stage == stage]
    return [s.duration_s for s in found]


def profiled(bench: Bench, compiled: Any) -> tuple[list[Profile], LinkCost]:
    """From one measured plan of two stages: what its groups and their link take."""
    _, timelines = bench.measured(compiled, 1)
    found = []
    for stage, (forward_flops, backward_flops) in enumerate(stage_flops(compiled)):
        forward_s = statistics.median(spans(timelines, stage, "F"))
        backward_s = statistics.median(spans(timelines, stage, "B"))
        update_s = sum(spans(timelines, stage, "update")) / len(timelines)
        found.append(Profile(forward_s / forward_flops, backward_s / backward_flops, update_s))
    sends = [statistics.median(spans(timelines, s, k)) for s, k in ((0, "send-F"), (1, "send-B"))]
    return found, LinkCost(*sends)


def predicted(compiled: Any, profiles: Sequence[Profile], link: LinkCost) -> float:
    """The step by the simulator, from profiles of the groups of its stages."""
    plan = compiled.planned.plan
    stages = [p.stage(f) for p, f in zip(profiles, stage_flops(compiled), strict=True)]
    costs = PipelineCosts(tuple(stages), (link,) * (len(stages) - 1))
    return simulate(step_schedule(compiled.staged, plan), costs).makespan_s


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    """Every cut in both orders, at each ratio of speeds."""
    rows = {}
    for ratio in args.ratios:
        bench = Bench(COMPUTING if args.repeats else Model(), ratio, repeats=args.repeats)
        even = bench.compiled(f"fast: 0-{LAYERS // 2 - 1} | slow: {LAYERS // 2}-{LAYERS - 1}")
        (fast, slow), link = profiled(bench, even)
        plans: dict[str, Plan | str] = {"fast alone": f"fast: 0-{LAYERS - 1}"}
        for cut in range(1, LAYERS):
            for first, second in (("fast", "slow"), ("slow", "fast")):
                name = f"{first} {cut} | {second} {LAYERS - cut}"
                plans[name] = f"{first}: 0-{cut - 1} | {second}: {cut}-{LAYERS - 1}"
        found = {}
        ours = bench.compiled(None, schedule="auto")
        plans |= baseline_plans(ours)
        for name, plan in [("ours", None), *plans.items()]:
            compiled = ours if plan is None else bench.compiled(plan)
            groups = [s.replicas[0].group for s in compiled.planned.plan.pipelines[0].stages]
            profiles = [{"fast": fast, "slow": slow}[g] for g in groups]
            measured_s, _ = bench.measured(compiled, args.steps)
            found[name] = {
                "plan": compiled.planned.plan.to_text(),
                "schedule": compiled.planned.plan.schedule,
                "predicted_s": round(predicted(compiled, profiles, link), 4),
                "measured_s": round(measured_s, 4),
            }
            row = found[name]
            print(
                f"{ratio}:1  {name:<18}{row['schedule']:<10} predicted {row['predicted_s']:.3f} s, "
                f"measured {row['measured_s']:.3f} s",
                flush=True,
            )
        bench.workers.close()
        rows[f"{ratio}:1"] = summary(found)
    return rows


def baseline_plans(compiled: Any) -> dict[str, Plan]:
    """What other ways to plan would choose, on the same facts."""
    traced = compiled.planned.traced
    options = search_options(traced.wanted, (MICROBATCHES,))
    found = {}
    for name in BASELINES:
        evaluation = baseline(name, compiled.planned.facts, traced.cluster, options).evaluation
        if evaluation is not None:
            found[name] = evaluation.plan
    return found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    even = found[f"fast {LAYERS // 2} | slow {LAYERS // 2}"]["measured_s"]
    names = [name for name in found if name != "ours" and name not in BASELINES]
    guesses = [found[n]["predicted_s"] for n in names]
    times = [found[n]["measured_s"] for n in names]
    best = names[guesses.index(min(guesses))]
    ours = found["ours"]
    result = {
        "plans": found,
        "ours_over_even": round(ours["measured_s"] / even, 3),
        "ours_over": {
            name: round(ours["measured_s"] / found[name]["measured_s"], 3)
            for name in BASELINES
            if name in found
        },
        "ours_over_fast_alone": round(ours["measured_s"] / found["fast alone"]["measured_s"], 3),
        "ours_error": round(ours["measured_s"] / ours["predicted_s"] - 1, 3),
        "rank_correlation": round(float(scipy.stats.spearmanr(guesses, times)[0]), 3),
        "best_by_prediction_over_best": round(found[best]["measured_s"] / min(times), 3),
    }
    print({k: v for k, v in result.items() if k != "plans"}, flush=True)
    return result


def link(args: argparse.Namespace) -> dict[str, Any]:
    """Schedules over a slow link: 200 Mbit/s and 20 ms."""
    bytes_per_s = None if args.shaped else args.mbits * 1e6 / 8
    slowness = Slowness(latency_s=args.latency, bytes_per_s=bytes_per_s)
    model = Model(microbatches=16, rows=256, hidden=256, layer_s=0.006)
    bench = Bench(model, 1, slowness)
    plan = f"fast: 0-{LAYERS // 2 - 1} | slow: {LAYERS // 2}-{LAYERS - 1}"
    first = bench.compiled(plan)
    profiles, seen = profiled(bench, first)
    sent_bytes = 4 * model.rows * model.hidden
    occupied_s = sent_bytes / (args.mbits * 1e6 / 8)
    seen_s = statistics.mean((seen.forward_s, seen.backward_s))
    print(
        f"one activation: {sent_bytes:,} bytes, {occupied_s * 1e3:.1f} ms on the wire, "
        f"{args.latency * 1e3:.0f} ms latency; seen {seen_s * 1e3:.1f} ms"
    )
    wire = LinkCost(occupied_s, occupied_s, latency_s=max(0.0, seen_s - occupied_s))
    stages = [p.stage(f) for p, f in zip(profiles, stage_flops(first), strict=True)]
    costs = PipelineCosts(tuple(stages), (wire,))
    rows = {}
    for name in ("1f1b", "gpipe", "eager-1f1b", "h-1f1b", "adaptive"):
        bare = dataclasses.replace(first.planned.plan, schedule=name, tasks=())
        bare = unscheduled(bare)
        chosen = choose_schedule(bare, costs, has_backward=True).plan
        compiled = bench.compiled(chosen)
        measured_s, _ = bench.measured(compiled, args.steps)
        timeline = simulate(step_schedule(compiled.staged, chosen), costs)
        rows[name] = {
            "in_flight": list(step_schedule(compiled.staged, chosen).in_flight),
            "predicted_s": round(timeline.makespan_s, 4),
            "measured_s": round(measured_s, 4),
        }
        print(f"{name:<12}{rows[name]}", flush=True)
    bench.workers.close()
    for row in rows.values():
        row["predicted_gain"] = round(rows["1f1b"]["predicted_s"] / row["predicted_s"], 3)
        row["measured_gain"] = round(rows["1f1b"]["measured_s"] / row["measured_s"], 3)
    print({name: (r["predicted_gain"], r["measured_gain"]) for name, r in rows.items()})
    return {
        "latency_s": args.latency,
        "mbit_per_s": args.mbits,
        "activation_bytes": sent_bytes,
        "seen_one_way_s": round(seen_s, 5),
        "schedules": rows,
    }


def in_a_namespace(mbits: float) -> None:
    """Starts this program again where the loopback interface passes so many Mbit/s."""
    if os.environ.get(INSIDE):
        return
    rules = (
        "ip link set lo up && "
        f"tc qdisc add dev lo root tbf rate {mbits}mbit burst 128k latency 2s && "
        'exec "$@"'
    )
    os.environ[INSIDE] = "1"
    again = ["unshare", "--net", "sh", "-c", rules, "sh", sys.executable, *sys.argv]
    os.execvp(again[0], again)


def unscheduled(plan: Plan) -> Plan:
    """Without in-flight counts."""
    pipelines = tuple(
        dataclasses.replace(
            p, stages=tuple(dataclasses.replace(s, in_flight=None) for s in p.stages)
        )
        for p in plan.pipelines
    )
    return dataclasses.replace(plan, pipelines=pipelines)


def request_s(bench: Bench) -> float:
    """The median seconds from asking a worker to its answer."""
    crew = bench.workers.talk(bench.cluster).crew
    seconds = []
    for _ in range(50):
        begin = time.perf_counter()
        crew.wait([crew.ask(0, "clock")])
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """16 microbatches of stages that take 20 ms, and tasks that compute nothing to speak of."""
    rows = {}
    for name, layer_s in (("20 ms", 0.02 / 3 / (LAYERS // 2)), ("empty", 1e-9)):
        bench = Bench(Model(microbatches=16, layer_s=layer_s), 1)
        compiled = bench.compiled(f"fast: 0-{LAYERS // 2 - 1} | slow: {LAYERS // 2}-{LAYERS - 1}")
        measured_s, timelines = bench.measured(compiled, args.steps)
        busy = [
            sum(sum(spans([t], stage, kind)) for kind in "FB")
            for t in timelines
            for stage in (0, 1)
        ]
        fills = [
            statistics.median(spans(timelines, stage, "F"))
            + statistics.median(spans(timelines, stage, "B"))
            for stage in (0, 1)
        ]
        bound_s = max(busy) + min(fills)
        rows[name] = {
            "measured_s": round(measured_s, 5),
            "makespan_s": round(statistics.median(t.makespan_s for t in timelines), 5),
            "busiest_stage_s": round(max(busy), 5),
            "fill_s": round(min(fills), 5),
            "over_bound": round(measured_s / bound_s - 1, 4),
            "tasks": 2 * 2 * 16,
            "transfers": 2 * 16,
            "median_transfer_s": round(
                statistics.median(spans(timelines, 0, "send-F") + spans(timelines, 1, "send-B")),
                6,
            ),
            "request_s": round(request_s(bench), 6),
        }
        bench.workers.close()
        print(name, rows[name], flush=True)
    rows["empty"]["step_s_per_task"] = round(rows["empty"]["measured_s"] / 64, 6)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speeds", "link", "overhead"), nargs="+")
    parser.add_argument("--ratios", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", action="store_true")
    parser.add_argument("--shaped", action="store_true")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds")
    parser.add_argument("--mbits", type=float, default=200.0, help="per second")
    parser.add_argument("--out", type=Path, default=RESULTS / "unlike.json")
    args = parser.parse_args()
    if args.shaped:
        in_a_namespace(args.mbits)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        logging_level="error",
    )
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.what:
        about = {
            "date": datetime.date.today().isoformat(),
            "cpus": os.cpu_count(),
            "load_average_before": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "ray": ray.__version__,
            "emulation": "repeats" if args.repeats else "rates",
        }
        found = {"speeds": speeds, "link": link, "overhead": overhead}[name](args)
        how = (", computing" if args.repeats else "") + (", shaped" if args.shaped else "")
        result[name + how] = {"machine": about, "found": found}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    ray.shutdown()
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
