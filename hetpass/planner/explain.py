"""Says in words why a plan was chosen. No JAX."""

from __future__ import annotations

from collections.abc import Sequence

from hetpass.ir.cluster import Cluster
from hetpass.ir.facts import ProgramFacts
from hetpass.planner.baselines import Baseline
from hetpass.planner.evaluate import Evaluation
from hetpass.planner.search import SearchResult

_SHOWN = 5


def explain(
    result: SearchResult,
    evaluation: Evaluation,
    facts: ProgramFacts,
    cluster: Cluster,
    baselines: Sequence[Baseline] = (),
) -> str:
    """The stages, what bounds the step, what was rejected and why, and the gain over others.

    Args:
      evaluation: of `result.plan`.
      baselines: that the gain is told over; none if they were not planned.
    """
    plan = result.plan
    lines = [
        f"{plan.num_stages} stages, {plan.num_microbatches} microbatches, schedule {plan.schedule}",
        str(evaluation),
        _idle(plan_groups(evaluation), cluster),
        _bounded(evaluation),
        f"the program: {result.bounds} bounds solved, gap {result.gap:.2%}",
        *_rejected(result),
        *_gains(evaluation, baselines),
        *_sources(facts, cluster),
    ]
    return "\n".join(line for line in lines if line)


def plan_groups(evaluation: Evaluation) -> dict[str, int]:
    """Devices used, by group."""
    used: dict[str, int] = {}
    for stage in evaluation.stages:
        used[stage.group] = used.get(stage.group, 0) + stage.devices
    return used


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


def _rejected(result: SearchResult) -> list[str]:
    if not result.rejected:
        return []
    lines = ["rejected after simulation:"]
    for other in result.rejected[:_SHOWN]:
        slower = other.step_s / result.best.step_s - 1
        groups = " | ".join(
            f"{s.replicas[0].group}[{len(s.replicas[0].devices)}]: {s.first_layer}-{s.last_layer}"
            for s in other.plan.pipelines[0].stages
        )
        lines.append(f"  {slower:.1%} slower: M = {other.plan.num_microbatches}, {groups}")
    return lines


def _gains(evaluation: Evaluation, baselines: Sequence[Baseline]) -> list[str]:
    lines = ["against other ways to plan:"] if baselines else []
    for other in baselines:
        if other.evaluation is None:
            lines.append(f"  {other.name}: none of its plans fits")
        else:
            gain = other.step_s / evaluation.step_s
            lines.append(f"  {other.name}: {other.step_s:.6g} s, {gain:.2f} times this step")
    return lines


def _sources(facts: ProgramFacts, cluster: Cluster) -> list[str]:
    """Whether a group's seconds were given, or derived from FLOPs and bytes."""
    lines = []
    for group in cluster.groups:
        given = sum(
            group.name in layer.seconds or group.kind.name in layer.seconds
            for layer in facts.layers
        )
        derived = facts.num_layers - given
        lines.append(
            f"seconds of layers on {group.name}: {given} measured, {derived} from peak rates"
        )
    return lines
