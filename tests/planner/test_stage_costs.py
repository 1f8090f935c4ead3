"""Seconds and bytes of stages and links, by hand."""

from __future__ import annotations

import pytest

from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.planner.stage_costs import (
    ATTAINED_SHARE,
    LAUNCH_S,
    StageNumbers,
    limits_bytes,
    pipeline_costs,
)

CLUSTER = Cluster.emulated({"a": 2, "b": 1}, speeds={"a": 3.0})


def plan(*groups: str, recompute: str = "none") -> Plan:
    places = {"a": Replica("a", (0, 1), (("data", 2),)), "b": Replica("b", (0,), ())}
    stages = tuple(StagePlan(i, i, (places[g],), recompute=recompute) for i, g in enumerate(groups))
    return Plan((Pipeline(stages, 4),))


def numbers(count: int) -> tuple[StageNumbers, ...]:
    return (StageNumbers(6e9, 12e9, 1e6, 5e6, 7e6),) * count


def test_devices_share_the_work_of_a_stage():
    costs = pipeline_costs(plan("a", "b"), CLUSTER, numbers(2))
    fast, slow = ((s.forward_s - LAUNCH_S) for s in costs.stages)
    assert slow == pytest.approx(6 * fast)
    rate = CLUSTER.group("b").kind.peak_flops["float32"] * ATTAINED_SHARE
    assert slow == pytest.approx(6e9 / rate)
    assert costs.stages[0].backward_s - LAUNCH_S == pytest.approx(costs.stages[0].weight_s)


def test_links_take_latency_and_bandwidth():
    costs = pipeline_costs(plan("a", "b"), CLUSTER, numbers(2))
    link = CLUSTER.link("a", "b")
    assert costs.links[0].one_way_s == pytest.approx(link.seconds(1e6))


def test_recomputation_costs_a_forward_and_holds_what_was_received():
    plain = pipeline_costs(plan("a", "b"), CLUSTER, numbers(2)).stages[1]
    again = pipeline_costs(plan("a", "b", recompute="full"), CLUSTER, numbers(2)).stages[1]
    assert again.busy_s - plain.busy_s == pytest.approx(plain.forward_s - LAUNCH_S)
    assert (plain.activation_bytes, again.activation_bytes) == (5e6, 1e6)


def test_stages_on_one_submesh_share_memory_and_wires():
    wound = plan("a", "b", "a", "b")
    memory = [g.kind.memory_bytes * g.num_devices for g in CLUSTER.groups]
    assert limits_bytes(wound, CLUSTER) == tuple(memory)
    links = pipeline_costs(wound, CLUSTER, numbers(4)).links
    assert links[0].forward_wires == links[1].backward_wires == links[2].forward_wires
    assert links[0].forward_wires != links[0].backward_wires
