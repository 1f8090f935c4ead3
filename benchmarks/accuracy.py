"""What is predicted against what was measured: layers, whole steps, memory.

    python -m benchmarks.accuracy            results/accuracy.json, docs/images/accuracy.svg
    python -m benchmarks.accuracy --plans    and the plans of benchmarks/measured_plans.py

Nothing is scored on figures that it was fitted on:

    layers, not calibrated   a device kind is predicted with curves fitted on all other kinds (the
                             two sorts of A100 count as one)
    layers, calibrated       curves are fitted on one model on a kind and all that other kinds tell,
                             and predict the other model
    steps                    measured layer seconds and bandwidths; the fixed part of the sum of
                             gradients is the median of the other model's steps
    memory                   the three overheads are fitted on the other model's steps; those on RTX
                             are predicted with the overheads of both models on GH200. A step that
                             reports less than parameters, Adam and one microbatch take by its own
                             profile is scored too, and the mean is told with and without it

See docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import spearmanr

from benchmarks import measured_plans
from benchmarks.measured import DATA, MACHINES, Step, kind, network, profile, steps
from benchmarks.transformer_work import MODELS, Setting, layer_work
from hetpass.cost.fit_efficiency import Sample, fitted
from hetpass.cost.layer_costs import MemoryOverhead, ProfiledCosts
from hetpass.cost.operations import Efficiency, work_s
from hetpass.ir.cluster import DeviceGroup, Link
from hetpass.ir.profile import LayerTime, ModelProfile
from hetpass.planner.pipelines import Market, PlanPrice, price

RESULTS = Path(__file__).parent / "results" / "accuracy.json"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
SHORTEST_S = 1e-4
"""Layers below are not scored: what they take is what it takes to look at the clock."""

PLAIN_FLOAT32 = frozenset({("OPT-30", "A100-40")})
"""Measured without tensor cores, as its rates tell: 17.4 of 19.5 TFLOP/s, where OPT-350 and GPT-Neo
reach up to 75 on the same kind."""


# -- layers -----------------------------------------------------------------------------------


ACROSS = {"GH-96": 1 / 0.629}
"""Hopper's fast matrix instructions take TF32 operands only with the summed dimension innermost;
others go through the older ones, at 62.9 % of the peak on average (Luo et al., "Benchmarking and
Dissecting the Nvidia Hopper GPU Architecture", 2024)."""

NVLINK = 1e11
"""Bytes per second of a link between two devices; below, it is PCI Express, which a host shares."""


@dataclass(frozen=True)
class Row:
    """One measured layer: of which model, on which kind, in which setting.

    Attributes:
      sample: as it was measured.
      known: as it is fitted: no slower than a larger microbatch.
    """

    model: str
    device: str
    setting: str
    sample: Sample
    known: Sample


def layer_rows() -> list[Row]:
    """All distinct layers of the profiles of `MODELS` above `SHORTEST_S`, each direction."""
    rows: list[Row] = []
    for model in MODELS:
        found = ModelProfile.read(DATA, model)
        for device in found.seconds:
            rows += _rows_on(found, device)
    return rows


def _rows_on(found: ModelProfile, device: str) -> list[Row]:
    rows = []
    measured, settled = network(), found.settled()
    own = kind(device)
    group = DeviceGroup("row", own, 1, MACHINES[device].per_host, Link(0.0, 1.0))
    dtype = "float32" if (found.model, device) in PLAIN_FLOAT32 else "tf32"
    bus = own.link is None or own.link.bandwidth < NVLINK
    last = found.num_layers - 1
    for (examples, ways), layers in found.seconds[device].items():

        def sum_s(size: float, ways: int = ways) -> float:
            return 2 * (ways - 1) / ways * size / measured.inside_rate(group, ways, size)

        for number, name in ((0, "embedding"), (1, "block"), (2, "block"), (last, "head")):
            for backward in (False, True):
                seconds = _seconds(layers[number], backward)
                if seconds < SHORTEST_S or (number == 0 and backward):
                    continue
                setting = Setting(examples, ways, backward, ACROSS.get(device, 1.0))
                work = layer_work(MODELS[found.model], name, setting, sum_s, bus)
                least = _seconds(settled.seconds[device][examples, ways][number], backward)
                rows.append(
                    Row(
                        found.model,
                        device,
                        f"{name} {number}, {'backward' if backward else 'forward'}, "
                        f"{examples} examples, {ways} ways",
                        Sample(work, own, dtype, seconds),
                        Sample(work, own, dtype, least),
                    )
                )
    return rows


def _seconds(time: LayerTime, backward: bool) -> float:
    return time.backward_s if backward else time.forward_s


def ratios(rows: Sequence[Row], efficiency: Efficiency) -> np.ndarray:
    """Predicted over measured."""
    return np.array(
        [
            work_s(r.sample.work, r.sample.kind, efficiency, r.sample.dtype) / r.sample.seconds
            for r in rows
        ]
    )


def _alike(device: str, other: str) -> bool:
    """Whether two kinds count as one: the two sorts of A100."""
    return device == other or all(name.startswith("A100") for name in (device, other))


def uncalibrated(rows: Sequence[Row]) -> tuple[list[Row], np.ndarray]:
    """Rows, and their ratios, each kind with curves of all others."""
    scored: list[Row] = []
    found: list[np.ndarray] = []
    for device in sorted({row.device for row in rows}):
        own = [row for row in rows if row.device == device]
        others = [row.known for row in rows if not _alike(row.device, device)]
        scored += own
        found.append(ratios(own, fitted(others).common))
    return scored, np.concatenate(found)


def calibrated(rows: Sequence[Row]) -> dict[str, Any]:
    """Every kind on which two models were measured: fitted on one, scored on the other.

    "alone": the same, where no kind at all tells of the model that is scored. "itself": the floor
    of curves of this form, fitted on what is scored.
    """
    pairs, errors = [], []
    for device in sorted({row.device for row in rows}):
        for model, other in (("OPT-350", "GPT-Neo-2.7"), ("GPT-Neo-2.7", "OPT-350")):
            own = [r.known for r in rows if (r.model, r.device) == (model, device)]
            theirs = [r for r in rows if (r.model, r.device) == (other, device)]
            if not own or not theirs:
                continue
            elsewhere = [r for r in rows if not _alike(r.device, device)]
            alone = [r.known for r in elsewhere if r.model != other]
            known = [r.known for r in elsewhere]
            found = ratios(theirs, fitted([*own, *known]).kinds[device])
            strict = ratios(theirs, fitted([*own, *alone]).kinds[device])
            itself = fitted([*[r.known for r in theirs], *known]).kinds[device]
            errors.append(abs(found - 1))
            pairs.append(
                {
                    "kind": device,
                    "fitted on": model,
                    "scored on": other,
                    **score(theirs, found),
                    "median error alone": float(np.median(abs(strict - 1))),
                    "median error itself": float(np.median(abs(ratios(theirs, itself) - 1))),
                }
            )
    together = np.concatenate(errors)
    return {
        "pairs": pairs,
        "all": {"layers": together.size, "median error": float(np.median(together))},
    }


def score(rows: Sequence[Row], found: np.ndarray) -> dict[str, float]:
    measured = np.array([row.sample.seconds for row in rows])
    return {
        "layers": len(rows),
        "median error": float(np.median(abs(found - 1))),
        "mean error": float(np.mean(abs(found - 1))),
        "rank correlation": float(spearmanr(measured, measured * found).statistic),
    }


def layers() -> tuple[dict[str, Any], tuple[list[Row], np.ndarray]]:
    """The part of the results on layers, and what its picture needs."""
    rows = layer_rows()
    scored, found = uncalibrated(rows)
    by_profile = {}
    for model, device in sorted({(row.model, row.device) for row in rows}):
        chosen = [i for i, r in enumerate(scored) if (r.model, r.device) == (model, device)]
        by_profile[f"{model} on {device}"] = score([scored[i] for i in chosen], found[chosen])
    return {
        "not calibrated": {"all": score(scored, found), **by_profile},
        "calibrated": calibrated(rows),
    }, (scored, found)


# -- steps ------------------------------------------------------------------------------------


def priced(
    step: Step, memory: MemoryOverhead | None = None, sync_overhead_s: float = 0.0
) -> PlanPrice:
    """A measured step as it is predicted, with transfers that hold their stages."""
    costs = ProfiledCosts(profile(step.model), memory or MemoryOverhead())
    return price(
        step.plan,
        Market(costs, network(), step.cluster, step.batch_size, False, sync_overhead_s),
    )


def sync_overhead_s(fitted_on: Sequence[Step]) -> float:
    """Median of what sums of gradients took beyond their rings, where there are several copies."""
    return float(
        np.median([s.sync_s - priced(s).sync_s for s in fitted_on if len(s.plan.pipelines) > 1])
    )


def memory_overhead(fitted_on: Sequence[Step]) -> MemoryOverhead:
    """Least squares of relative errors, none of the three negative."""
    rows, ones = [], []
    for step in fitted_on:
        parts = [
            priced(step, MemoryOverhead(*unit)).peak_bytes
            for unit in ((4.0, 1.0, 0.0), (5.0, 1.0, 0.0), (4.0, 2.0, 0.0))
        ]
        parameters, activations = parts[1] - parts[0], parts[2] - parts[0]
        rows.append(
            [parameters / step.peak_bytes, activations / step.peak_bytes, 1e9 / step.peak_bytes]
        )
        ones.append(1.0)
    found, _ = nnls(np.array(rows), np.array(ones))
    return MemoryOverhead(float(found[0]), float(found[1]), float(found[2]) * 1e9)


def least_bytes(step: Step) -> float:
    """What the profile says that the fullest device cannot do without: parameter, gradient and two
    moments of Adam, and the activations of one microbatch; no runtime, no temporaries."""
    one_each = tuple(
        replace(pipeline, stages=tuple(replace(stage, in_flight=1) for stage in pipeline.stages))
        for pipeline in step.plan.pipelines
    )
    bare = MemoryOverhead(4.0, 1.0, 0.0)
    return priced(replace(step, plan=replace(step.plan, pipelines=one_each)), bare).peak_bytes


def whole_steps() -> dict[str, Any]:
    """The part of the results on steps and their memory."""
    known = steps()
    models = {
        model: [s for s in known if s.site == "clariden" and s.model == model]
        for model in ("OPT-350", "GPT-Neo-2.7")
    }
    results: dict[str, Any] = {"steps": {}, "fitted": {}}
    overheads = {}
    for model, other in (("OPT-350", "GPT-Neo-2.7"), ("GPT-Neo-2.7", "OPT-350")):
        overheads[model] = sync_overhead_s(models[other]), memory_overhead(models[other])
    both = [*models["OPT-350"], *models["GPT-Neo-2.7"]]
    overheads["mit"] = 0.0, memory_overhead(both)
    for name, (sync_s, memory) in overheads.items():
        results["fitted"][f"for {name}"] = {
            "sync_overhead_s": sync_s,
            "parameter_copies": memory.parameter_copies,
            "activations": memory.activations,
            "fixed_bytes": memory.fixed_bytes,
        }
    for step in known:
        sync_s, memory = overheads["mit" if step.site == "mit" else step.model]
        found = priced(step, memory, sync_s)
        results["steps"][step.name] = {
            "part": "mixed RTX" if step.site == "mit" else f"GH200 {step.model}",
            "measured_s": step.step_s,
            "predicted_s": found.step_s,
            "error": found.step_s / step.step_s - 1,
            "sync measured_s": step.sync_s,
            "sync predicted_s": found.sync_s,
            "peak measured_bytes": step.peak_bytes,
            "peak predicted_bytes": found.peak_bytes,
            "peak error": found.peak_bytes / step.peak_bytes - 1,
            "peak at least_bytes": least_bytes(step),
        }
    results["summary"] = summary(results["steps"])
    results["order"] = order(known, results["steps"])
    return results


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        parts.setdefault(row["part"], []).append(row)
    return {
        part: {
            "steps": len(own),
            "mean error": float(np.mean([abs(r["error"]) for r in own])),
            "median error": float(np.median([abs(r["error"]) for r in own])),
            "mean peak error": float(np.mean([abs(r["peak error"]) for r in own])),
            "median peak error": float(np.median([abs(r["peak error"]) for r in own])),
            "mean peak error of those that can be": float(
                np.mean(
                    [
                        abs(r["peak error"])
                        for r in own
                        if r["peak measured_bytes"] >= r["peak at least_bytes"]
                    ]
                )
            ),
        }
        for part, own in parts.items()
    }


def order(known: Sequence[Step], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Pairs of plans of one size and workload that differ by more than a tenth."""
    right: list[str] = []
    wrong: list[str] = []
    for i, one in enumerate(known):
        for other in known[i + 1 :]:
            same = (one.model, one.batch_size, one.site, one.cluster.num_devices) == (
                other.model,
                other.batch_size,
                other.site,
                other.cluster.num_devices,
            )
            if not same or max(one.step_s, other.step_s) < 1.1 * min(one.step_s, other.step_s):
                continue
            ours = rows[one.name]["predicted_s"] < rows[other.name]["predicted_s"]
            (right if ours == (one.step_s < other.step_s) else wrong).append(
                f"{one.name} and {other.name}"
            )
    return {"right": right, "wrong": wrong}


# -- pictures and the command -----------------------------------------------------------------


def draw(scored: Sequence[Row], found: np.ndarray, rows: dict[str, dict[str, Any]]) -> None:
    """Scatter plots: predicted against measured."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hetpass"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5))
    measured = np.array([row.sample.seconds for row in scored])
    for device in sorted({row.device for row in scored}):
        own = np.array([row.device == device for row in scored])
        axes[0].plot(
            1e3 * measured[own], 1e3 * (measured * found)[own], ".", label=device, markersize=4
        )
    axes[0].set(xlabel="measured ms", ylabel="predicted ms", title="layers, not calibrated")
    for part in sorted({row["part"] for row in rows.values()}):
        chosen = [row for row in rows.values() if row["part"] == part]
        axes[1].plot(
            [r["measured_s"] for r in chosen], [r["predicted_s"] for r in chosen], "o", label=part
        )
    axes[1].set(xlabel="measured s", ylabel="predicted s", title="steps, from measured layers")
    for axis in axes:
        axis.set(xscale="log", yscale="log")
        ends = [min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], 1.0)]
        axis.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(IMAGES / "accuracy.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", action="store_true")
    chosen = parser.parse_args()
    layer_results, pictured = layers()
    step_results = whole_steps()
    results = {
        "python": platform.python_version(),
        "note": "measured figures: benchmarks/data/measured",
        "layers": layer_results,
        **step_results,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(*pictured, step_results["steps"])
    everything = layer_results["not calibrated"]["all"]
    print(
        f"layers, not calibrated: median error {everything['median error']:.1%}, rank correlation "
        f"{everything['rank correlation']:.3f}"
    )
    for row in layer_results["calibrated"]["pairs"]:
        print(
            f"layers on {row['kind']}, {row['fitted on']} to {row['scored on']}: "
            f"median error {row['median error']:.1%}, rank {row['rank correlation']:.3f}; "
            f"fitted on itself {row['median error itself']:.1%}"
        )
    print(f"all of these: {layer_results['calibrated']['all']['median error']:.1%}")
    for part, row in step_results["summary"].items():
        print(
            f"{part}: {row['steps']} steps, mean error {row['mean error']:.1%}; peak memory "
            f"{row['mean peak error']:.1%} mean, {row['median peak error']:.1%} median, "
            f"{row['mean peak error of those that can be']:.1%} mean of those that can be"
        )
    print(
        f"order: {len(step_results['order']['right'])} pairs right, wrong: "
        f"{step_results['order']['wrong'] or 'none'}"
    )
    if chosen.plans:
        measured_plans.main()


if __name__ == "__main__":
    main()
