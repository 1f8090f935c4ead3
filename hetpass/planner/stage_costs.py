"""Seconds and bytes of a plan's stages and links, from FLOPs, peak rates and bandwidths. No JAX.

Coarse on purpose: enough to order tasks and to choose in-flight counts, which depend on the ratios
of stages and links and not on the last percent of either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Plan, StagePlan
from hetpass.planner.default import peak_rate
from hetpass.schedules.costs import LinkCost, PipelineCosts, StageCost

ATTAINED_SHARE = 0.5
"""Of a device's peak rate, by matrix products of ordinary sizes."""

LAUNCH_S = 50e-6
"""To start one task on one stage."""

WEIGHT_SHARE = 0.5
"""Of a backward part: a product costs as much for its weights as for its input."""


@dataclass(frozen=True)
class StageNumbers:
    """Of one stage, per microbatch unless said otherwise.

    Attributes:
      forward_flops, backward_flops: the latter for input and weight gradients together.
      sent_bytes: to the next stage in the forward direction; as much comes back.
      activation_bytes: held from forward to backward.
      fixed_bytes: held all the time.
    """

    forward_flops: float
    backward_flops: float
    sent_bytes: float
    activation_bytes: float
    fixed_bytes: float


def pipeline_costs(
    plan: Plan, cluster: Cluster, numbers: tuple[StageNumbers, ...], dtype: str = "float32"
) -> PipelineCosts:
    """The costs of the plan's first pipeline; one entry of `numbers` per stage."""
    stages = plan.pipelines[0].stages
    received = (0.0, *(n.sent_bytes for n in numbers))
    costs = [
        _stage(stage, cluster, replace(n, activation_bytes=r) if _again(stage) else n, dtype)
        for stage, n, r in zip(stages, numbers, received, strict=False)
    ]
    lanes = plan.lane_of
    links = [
        _link(cluster, (stages[i], stages[i + 1]), (lanes[i], lanes[i + 1]), numbers[i].sent_bytes)
        for i in range(len(stages) - 1)
    ]
    return PipelineCosts(tuple(costs), tuple(links))


def limits_bytes(plan: Plan, cluster: Cluster) -> tuple[float, ...]:
    """Per lane, the memory of its devices together."""
    limits = {}
    for lane, stage in zip(plan.lane_of, plan.pipelines[0].stages, strict=True):
        limits[lane] = float(
            sum(len(r.devices) * cluster.group(r.group).kind.memory_bytes for r in stage.replicas)
        )
    return tuple(limits[lane] for lane in sorted(limits))


def _stage(stage: StagePlan, cluster: Cluster, numbers: StageNumbers, dtype: str) -> StageCost:
    rate = ATTAINED_SHARE * sum(
        len(r.devices) * peak_rate(cluster.group(r.group).kind, dtype) for r in stage.replicas
    )
    if not rate:  # a plan by hand, on devices that emulate the format
        rate = float(
            sum(len(r.devices) * cluster.group(r.group).kind.best_flops for r in stage.replicas)
        )
    forward_s, backward_s = numbers.forward_flops / rate, numbers.backward_flops / rate
    if _again(stage):
        backward_s += forward_s
    return StageCost(
        forward_s=forward_s + LAUNCH_S,
        backward_s=backward_s * (1 - WEIGHT_SHARE) + LAUNCH_S,
        weight_s=backward_s * WEIGHT_SHARE,
        activation_bytes=numbers.activation_bytes,
        weight_bytes=numbers.activation_bytes,
        fixed_bytes=numbers.fixed_bytes,
    )


def _again(stage: StagePlan) -> bool:
    """Whether its backward part runs the forward part again, and holds only what it received."""
    return stage.recompute == "full"


def _link(
    cluster: Cluster,
    ends: tuple[StagePlan, StagePlan],
    lanes: tuple[int, int],
    sent_bytes: float,
) -> LinkCost:
    first, second = (stage.replicas[0].group for stage in ends)
    link = cluster.link(first, second)
    if link is None or lanes[0] == lanes[1]:
        return LinkCost(0.0, 0.0)
    seconds = sent_bytes / link.bandwidth
    return LinkCost(
        seconds,
        seconds,
        link.latency_s,
        forward_wires=(f"{lanes[0]}→{lanes[1]}",),
        backward_wires=(f"{lanes[1]}→{lanes[0]}",),
    )
