"""Says in words why a plan was chosen. No JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from hetpass.cost.analytic import Assumptions
from hetpass.cost.range_bytes import MemoryParts
from hetpass.ir.cluster import Cluster
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan_text import mesh_text
from hetpass.ir.quantities import counted, span_text, spelled
from hetpass.planner.baselines import Baseline
from hetpass.planner.evaluate import Evaluation, StageEvaluation, evaluate
from hetpass.planner.search import Candidate, SearchResult

_SHOWN = 5
_SMALL_SHARE = 0.005


def explain(
    evaluation: Evaluation,
    facts: ProgramFacts,
    cluster: Cluster,
    result: SearchResult | None = None,
    baselines: Sequence[Baseline] = (),
    assumed: Assumptions = Assumptions(),
) -> str:
    """The stages, what bounds the step, what was rejected and why, and the gain over others.

    Args:
      evaluation: of the plan.
      result: of the search that found it; None: it came from elsewhere.
      baselines: that the gain is told over; none if they were not planned.
      assumed: what the evaluation assumed of devices.
    """
    lines = [
        *_step(evaluation),
        *_stage_lines(evaluation, facts),
        *_memory_lines(evaluation),
        _idle(plan_groups(evaluation), cluster),
        _bounded(evaluation),
        *(f"cannot run: {text}" for text in evaluation.violations),
        *(_searched(result) if result is not None else []),
        *(_rejected(result, evaluation, facts, cluster, assumed) if result is not None else []),
        *_gains(evaluation, baselines),
        *_sources(facts, cluster, assumed),
    ]
    return "\n".join(line for line in lines if line)


def plan_groups(evaluation: Evaluation) -> dict[str, int]:
    """Devices used, by group."""
    used: dict[str, int] = {}
    for stage, lane_is_new in zip(evaluation.stages, _new_lanes(evaluation), strict=True):
        used[stage.group] = used.get(stage.group, 0) + lane_is_new * stage.devices
    return used


def _new_lanes(evaluation: Evaluation) -> list[bool]:
    """Per stage, whether it is the first on its submesh."""
    lanes = evaluation.plan.lane_of
    return [lane not in lanes[:i] for i, lane in enumerate(lanes)]


def _step(evaluation: Evaluation) -> list[str]:
    plan = evaluation.plan
    return [
        f"step {_time(evaluation.step_s)} by simulation: {counted(plan.num_stages, 'stage')}, "
        f"{counted(plan.num_microbatches, 'microbatch')}, schedule {plan.schedule}; balance "
        f"{evaluation.balance:.1%}"
    ]


def _time(seconds: float) -> str:
    return spelled(seconds, "time") if math.isfinite(seconds) else "never ends"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows in columns; columns without any text but a head are left out."""
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    return [indent + "  ".join(row[i].ljust(widths[i]) for i in kept).rstrip() for row in rows]


def _stage_lines(evaluation: Evaluation, facts: ProgramFacts) -> list[str]:
    head = ("stage", "devices", "group", "layers", "recompute", "parameters", "FLOPs", "F", "B",
            "transfer", "once", "in flight", "idle")  # fmt: skip
    rows = [head]
    for index, (stage, plan) in enumerate(
        zip(evaluation.stages, evaluation.plan.pipelines[0].stages, strict=True)
    ):
        inside = facts.layers[stage.first_layer : stage.last_layer + 1]
        parameters = sum(layer.parameter_bytes for layer in inside)
        rows.append(
            (
                str(index),
                f"{stage.devices} {stage.kind}",
                stage.group,
                span_text(stage.first_layer, stage.last_layer),
                plan.recompute if plan.recompute != "none" else "",
                spelled(parameters, "bytes"),
                _scaled(stage.flops),
                _time(stage.forward_s),
                _time(stage.backward_s),
                spelled(stage.send_s, "time") if stage.send_s else "",
                spelled(stage.once_s, "time") if stage.once_s else "",
                str(stage.in_flight),
                f"{max(0.0, 1 - stage.busy):.1%}"
                + (" <- bottleneck" if index == evaluation.bottleneck else ""),
            )
        )
    return [
        *table(rows),
        "  FLOPs, F, B and transfer (to the next stage and back) per microbatch; once: gradient "
        "sync and update",
    ]


def _memory_lines(evaluation: Evaluation) -> list[str]:
    """What every device of a stage holds, part by part, and what it may hold."""
    parts = [f.name for f in fields(MemoryParts)]
    rows = [("stage", "held", "limit", *(_PART_NAMES.get(p, p) for p in parts))]
    for index, stage in enumerate(evaluation.stages):
        price = evaluation.plan.pipelines[0].stages[index].price
        rows.append(
            (
                str(index),
                spelled(stage.fixed_bytes + stage.activation_bytes, "bytes"),
                spelled(stage.limit_bytes, "bytes"),
                # parts are known of stages that are sharded by axes
                *(_part(stage, name) if price is None else "" for name in parts),
            )
        )
    return ["memory of each device:", *table(rows)]


_PART_NAMES = {"in_flight": "in flight", "buffers": "transfers"}


def _part(stage: StageEvaluation, name: str) -> str:
    size = getattr(stage.memory, name) * (stage.in_flight if name == "in_flight" else 1)
    held = stage.fixed_bytes + stage.activation_bytes
    return spelled(size, "bytes") if size > _SMALL_SHARE * held else ""


def _scaled(value: float) -> str:
    return spelled(value, "flops").removesuffix("FLOP/s").strip() if value else ""


def _idle(used: dict[str, int], cluster: Cluster) -> str:
    idle = [
        f"{group.num_devices - used.get(group.name, 0)} of {group.name}"
        for group in cluster.groups
        if used.get(group.name, 0) < group.num_devices
    ]
    return f"idle devices: {', '.join(idle)}" if idle else ""


def _bounded(evaluation: Evaluation) -> str:
    stage = evaluation.stages[evaluation.bottleneck]
    return (
        f"bounded by stage {evaluation.bottleneck} on {stage.group}: it computes "
        f"{stage.busy:.1%} of the step"
    )


def _searched(result: SearchResult) -> list[str]:
    stopped = "; interrupted, the best so far" if result.interrupted else ""
    return [f"the search: {result.bounds} bounds solved, gap {result.gap:.2%}{stopped}"]


def _rejected(
    result: SearchResult,
    evaluation: Evaluation,
    facts: ProgramFacts,
    cluster: Cluster,
    assumed: Assumptions,
) -> list[str]:
    """The next best plans, and where each loses its time."""
    if not result.rejected:
        return []
    lines = ["rejected after simulation:"]
    for other in result.rejected[:_SHOWN]:
        theirs = evaluate(other.plan, facts, cluster, assumed)
        slower = theirs.step_s / evaluation.step_s - 1
        lines.append(f"  {slower:.1%} slower, {_reason(theirs, evaluation)}: {_short(other)}")
    return lines


def _reason(theirs: Evaluation, ours: Evaluation) -> str:
    """Whether the slowest stage works longer, or the step waits longer beside it."""
    work = [e.stages[e.bottleneck].busy * e.step_s for e in (theirs, ours)]
    waits = [e.step_s - w for e, w in zip((theirs, ours), work, strict=True)]
    if work[0] - work[1] >= waits[0] - waits[1]:
        stage = theirs.stages[theirs.bottleneck]
        more = work[0] / work[1] - 1
        return f"its slowest stage ({theirs.bottleneck}, on {stage.group}) works {more:.1%} longer"
    return (
        f"filling, draining and transfers take {spelled(waits[0], 'time')} "
        f"instead of {spelled(waits[1], 'time')}"
    )


def _short(other: Candidate) -> str:
    texts = []
    for stage in other.plan.pipelines[0].stages:
        place = stage.replicas[0]
        again = ", recomputed" if stage.recompute == "full" else ""
        layers = span_text(stage.first_layer, stage.last_layer)
        texts.append(f"{place.group}[{len(place.devices)}]{mesh_text(place)}: {layers}{again}")
    return f"M = {other.plan.num_microbatches}, {' | '.join(texts)}"


def _gains(evaluation: Evaluation, baselines: Sequence[Baseline]) -> list[str]:
    lines = ["against other ways to plan:"] if baselines else []
    for other in baselines:
        if other.evaluation is None:
            lines.append(f"  {other.name}: has no plan that can run")
        else:
            gain = other.step_s / evaluation.step_s
            lines.append(f"  {other.name}: {_time(other.step_s)}, {gain:.2f} times this step")
    return lines


def _sources(facts: ProgramFacts, cluster: Cluster, assumed: Assumptions) -> list[str]:
    """Whether a group's seconds were measured, or derived from FLOPs and bytes."""
    lines = []
    derived_any = False
    for group in cluster.groups:
        given = sum(
            group.name in layer.seconds or group.kind.name in layer.seconds
            for layer in facts.layers
        )
        derived = facts.num_layers - given
        derived_any |= derived > 0
        lines.append(
            f"seconds of layers on {group.name}: {given} measured, {derived} from peak rates"
        )
    if derived_any:
        lines.append(
            f"assumed: {assumed.flops:.0%} of peak FLOP/s, {assumed.bandwidth:.0%} of memory "
            "bandwidth"
        )
    lines.append(
        f"bytes are counted on the program; links are the cluster's; {assumed.memory:.0%} of "
        "memory may be used"
    )
    return lines
