"""The models of Alpa's suites, and LLaMA, planned on named clusters, beside other ways to plan.

    python -m benchmarks.suite                        all suites on their clusters
    python -m benchmarks.suite --suite moe --on harp-8-4
    python -m benchmarks.suite --page                 writes suite.md from the stored results

Every model is traced as a whole step (mixed precision, blocks recomputed, Adam) and
planned; nothing is compiled, no device is touched. Steps are simulated on analytic costs (half of
peak rates): plans are compared, not times promised. Seconds of tracing and planning are wall-clock
on the machine named in the results, benchmarks/results/suite.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from hetpass.tools.bench import SUITES, bench_model
from hetpass.tools.clusters import CLUSTERS
from hetpass.tools.measure_devices import machine, versions
from hetpass.tools.models.names import SIZES, TransformerSize

RESULTS = Path(__file__).parent / "results" / "suite.json"
PAGE = Path(__file__).parent / "suite.md"
BASELINES = ("even", "megatron", "alpa", "harp", "single_group")
HEAD = """\
All plans are of the same facts and before the same judge, our simulator on analytic costs: they are
compared, not promised. A column says how many times as long as ours the best plan of that kind
takes: `even` (layers by count), `megatron` (equal stages, tensor parallelism inside a host), `alpa`
(all devices taken for the average one), `harp` (groups in a fixed order, its own schedule),
`single_group` (the fastest alone). Each has its own best number of microbatches, mesh and
recomputation. Seconds of tracing and planning are wall-clock; the load is that of other programs,
when the runs began.
"""
RUNS = {"gpt": "harp-8-4", "llama": "three-groups", "moe": "harp-8-4", "wresnet": "harp-8-2-2"}


def row(name: str, cluster_name: str) -> dict[str, Any]:
    """One model on one cluster, with tokens (or images) per second and the share of peak."""
    result = bench_model(name, CLUSTERS[cluster_name](), BASELINES) | {"cluster": cluster_name}
    size = SIZES[name]
    if "step_s" in result:
        units = size.sequence if isinstance(size, TransformerSize) else 1
        result["units_per_s"] = result["batch"] * units / result["step_s"]
        result["unit"] = "tokens" if isinstance(size, TransformerSize) else "images"
    return result


def show(result: dict[str, Any]) -> str:
    head = f"{result['model']:<14}{result['cluster']:<14}"
    if "step_s" not in result:
        return f"{head}refused: {result['refused']}"
    gains = "  ".join(
        f"{name} {gain:.2f}" if gain else f"{name} none fits"
        for name, gain in result["times_ours"].items()
    )
    return (
        f"{head}trace {result['trace_s']:5.1f} s, plan {result['plan_s']:5.1f} s, step "
        f"{result['step_s']:8.3f} s, {result['units_per_s']:.4g} {result['unit']}/s; over ours: "
        f"{gains}"
    )


def page(results: dict[str, Any]) -> str:
    """The results as a page."""
    lines = [
        "# Models on clusters: ours beside other ways to plan",
        "",
        f"{results['date']}, {results['machine']}, load {results['load']:.1f}, jax "
        f"{results['versions']['jax']}; `python -m benchmarks.suite`.",
        "",
        HEAD,
        "| model | cluster | trace | plan | M | stages | step | per second | "
        + " | ".join(BASELINES)
        + " |",
        "| --- " * (8 + len(BASELINES)) + "|",
    ]
    for r in results["rows"]:
        if "step_s" not in r:
            cells = [
                r["model"],
                r["cluster"],
                f"{r['trace_s']:.1f} s",
                f"refused: `{r['refused']}`",
            ]
            lines.append("| " + " | ".join(cells) + " |")
            continue
        gains = [r["times_ours"][name] for name in BASELINES]
        cells = [
            r["model"],
            r["cluster"],
            f"{r['trace_s']:.1f} s",
            f"{r['plan_s']:.1f} s",
            str(r["microbatches"]),
            str(r["stages"]),
            f"{r['step_s']:.3g} s",
            f"{r['units_per_s']:.3g} {r['unit']}",
            *("none fits" if gain is None else f"{gain:.2f}" for gain in gains),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=tuple(SUITES), action="append")
    parser.add_argument("--on", choices=tuple(CLUSTERS))
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page(json.loads(RESULTS.read_text())), encoding="utf-8")
        return
    whole = not (arguments.suite or arguments.on)  # a part is not what the stored results are
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load": os.getloadavg()[0],
        "machine": machine(),
        "versions": versions(),
        "note": "steps are simulated on analytic costs; nothing was measured on these devices",
        "rows": [],
    }
    for suite in arguments.suite or tuple(SUITES):
        for name in SUITES[suite]:
            results["rows"].append(row(name, arguments.on or RUNS[suite]))
            print(show(results["rows"][-1]), flush=True)
            if whole:
                RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
