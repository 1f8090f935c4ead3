"""`hetpass bench`: plans of the models by name on named clusters, beside other ways to plan."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import Any

from hetpass.errors import ToolError
from hetpass.ir.cluster import Cluster
from hetpass.ir.records import nearest
from hetpass.tools.answer import Answer, Command, Table
from hetpass.tools.clusters import CLUSTERS
from hetpass.tools.models.names import SIZES, default_batch_size
from hetpass.tools.sorts import CLUSTER
from hetpass.tools.steps import on_this_processor
from hetpass.tools.terminal import Terminal

SUITES = {
    "gpt": ("gpt-350M", "gpt-1.3B", "gpt-2.6B", "gpt-6.7B"),
    "llama": ("llama-7B", "llama-8B"),
    "moe": ("moe-380M", "moe-1.3B", "moe-2.4B"),
    "wresnet": ("wresnet-250M", "wresnet-500M", "wresnet-1B"),
}


def bench(arguments: Namespace, terminal: Terminal) -> Answer:
    """One row per model: the plan found, its step by simulation, the gain over others."""
    on_this_processor()
    cluster = _cluster(arguments.on)
    names = arguments.model or SUITES[arguments.suite]
    for name in names:
        if name not in SIZES:
            raise ToolError("HP-TOOL-MODEL", f"{name!r} names no model", where="--model",
                            ways_out=nearest(name, SIZES))  # fmt: skip
    results = []
    for name in names:
        with terminal.working(name):
            results.append(bench_model(name, cluster, tuple(arguments.against)))
    others = arguments.against
    head = ("model", "trace", "plan", "M", "stages", "step", "examples/s",
            *(f"{n} / ours" for n in others))  # fmt: skip
    rows = tuple(_row(result, others) for result in results)
    note = "steps are simulated on analytic costs; NAME / ours: its step over ours"
    return Answer(
        [Table(head, rows, f"on {arguments.on}: {_groups(cluster)}"), note],
        {"cluster": cluster.to_dict(), "results": results},
    )


def _cluster(name: str) -> Cluster:
    if name.endswith((".toml", ".json")):
        return CLUSTER.load(name)
    if name not in CLUSTERS:
        raise ToolError("HP-TOOL-CLUSTER", f"{name!r} names no cluster", where="--on",
                        ways_out=[*nearest(name, CLUSTERS), "--on FILE.toml"])  # fmt: skip
    return CLUSTERS[name]()


def _groups(cluster: Cluster) -> str:
    return ", ".join(f"{g.num_devices} {g.kind.name}" for g in cluster.groups)


def bench_model(name: str, cluster: Cluster, against: tuple[str, ...] = ()) -> dict[str, Any]:
    """Plans one model; figures by name, seconds of tracing and planning apart.

    Args:
      against: names of `hetpass.planner.baselines.BASELINES`, on the same facts and judge.
    """
    from hetpass.api import het_parallelize
    from hetpass.cost.analytic import ASSUMED
    from hetpass.errors import PlanError
    from hetpass.planner.baselines import baseline
    from hetpass.planner.search import SearchOptions
    from hetpass.tools.models.steps import model_step

    model = model_step(name)
    began = time.perf_counter()
    traced = het_parallelize(model.step, cluster=cluster).trace(model.state, model.batch)
    traced_s = time.perf_counter() - began
    result: dict[str, Any] = {
        "model": name,
        "parameters": model.parameter_count,
        "batch": default_batch_size(name),
        "trace_s": traced_s,
    }
    try:
        planned = traced.plan()
    except PlanError as refusal:
        return result | {"refused": refusal.code}
    result["plan_s"] = time.perf_counter() - began - traced_s
    facts, plan = planned.facts, planned.plan
    step_s = plan.predictions["step_s"]
    options = SearchOptions()
    options = replace(options, tables=replace(options.tables, assumed=ASSUMED))
    gains = {}
    for other in against:
        found = baseline(other, facts, cluster, options)
        gains[other] = found.step_s / step_s if found.evaluation is not None else None
    return result | {
        "layers": facts.num_layers,
        "microbatches": plan.num_microbatches,
        "stages": plan.num_stages,
        "step_s": step_s,
        "plan": str(plan).splitlines(),
        "times_ours": gains,
    }


def _row(result: dict[str, Any], others: list[str]) -> tuple[str, ...]:
    if "refused" in result:
        refused = (result["model"], f"{result['trace_s']:.1f} s", "", "", "", result["refused"], "")
        return refused + ("",) * len(others)
    gains = result["times_ours"]
    return (
        result["model"],
        f"{result['trace_s']:.1f} s",
        f"{result['plan_s']:.1f} s",
        str(result["microbatches"]),
        str(result["stages"]),
        f"{result['step_s']:.3g} s",
        f"{result['batch'] / result['step_s']:.3g}",
        *("none fits" if gains[n] is None else f"{gains[n]:.2f}" for n in others),
    )


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("--suite", choices=tuple(SUITES), default="gpt")
    parser.add_argument("--model", action="append", metavar="NAME", help="instead of a suite")
    parser.add_argument("--on", default="harp-8-4", metavar="CLUSTER",
                        help=f"{', '.join(CLUSTERS)}, or a file")  # fmt: skip
    parser.add_argument("--against", action="append", default=[], metavar="PLANNER",
                        choices=("even", "single_group", "megatron", "alpa", "harp"),
                        help="may be given again")  # fmt: skip


COMMANDS = (Command("bench", "plan the models of a suite on a named cluster", _declare, bench),)
