from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpass.errors import PlanError
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, Link
from hetpass.planner.default import default_plan, share_layers


def plan_text(sizes, speeds, layers=6, microbatch_size=8):
    cluster = Cluster.emulated(sizes, speeds=speeds)
    plan = default_plan(cluster, [1.0] * layers, 8, microbatch_size=microbatch_size)
    plan.check(cluster, layers, batch_size=8 * microbatch_size)
    return plan.to_text()


def test_unlike_groups_share_by_speed():
    assert plan_text({"a": 1, "b": 1}, {"a": 2.0}) == "a[1]: 0-3 | b[1]: 4-5"
    assert plan_text({"a": 1, "b": 1}, {"b": 2.0}) == "a[1]: 0-1 | b[1]: 2-5"
    assert plan_text({"a": 4, "b": 2}, {}) == "a[4]: 0-3 | b[2]: 4-5"


def test_a_far_slower_group_stays_idle():
    assert plan_text({"a": 1, "b": 1}, {"a": 20.0}) == "a[1]: 0-5"
    assert plan_text({"b": 1, "a": 1}, {"a": 20.0}) == "a[1]: 0-5"


def test_fewer_layers_than_groups():
    assert plan_text({"a": 1, "b": 1, "c": 1}, {}, layers=2).count("|") == 1
    assert plan_text({"a": 1, "b": 1, "c": 1}, {}, layers=1).count("|") == 0


def test_devices_that_do_not_divide_the_microbatch_stay_idle():
    assert plan_text({"a": 3, "b": 5}, {}, microbatch_size=4) == "a[2]: 0-1 | b[4]: 2-5"
    assert plan_text({"a": 4}, {}, microbatch_size=1) == "a[1]: 0-5"


def test_a_group_that_lacks_the_dtype_stays_idle():
    groups = (
        DeviceGroup("v100", find_kind("V100-16"), 1, 1),
        DeviceGroup("a100", find_kind("A100-40"), 1, 1),
    )
    cluster = Cluster(groups, default_link=Link(0, 1e9))
    plan = default_plan(cluster, [1.0] * 8, 2, microbatch_size=1, dtype="bfloat16")
    assert plan.to_text() == "a100[1]: 0-7"
    mixed = default_plan(cluster, [1.0] * 11, 2, microbatch_size=1, dtype="float32")
    assert mixed.to_text() == "v100[1]: 0 | a100[1]: 1-10"
    with pytest.raises(PlanError, match="float8"):
        default_plan(cluster, [1.0], 2, microbatch_size=1, dtype="float8")
    with pytest.raises(PlanError):
        default_plan(cluster, [], 2, microbatch_size=1)


@given(
    flops=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    speeds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_equal_to_brute_force(flops, speeds):
    def costs(cuts):
        ends = [*cuts, len(flops)]
        starts = [0, *cuts]
        return [sum(flops[a:b]) / s for a, b, s in zip(starts, ends, speeds, strict=True)]

    every = [
        costs(cuts)
        for cuts in combinations_with_replacement(range(len(flops) + 1), len(speeds) - 1)
    ]
    best = min((max(c), sum(c)) for c in every)
    runs = share_layers(flops, speeds)
    assert runs[0][0] == 0
    assert runs[-1][1] == len(flops)
    assert all(a[1] == b[0] for a, b in pairwise(runs))
    found = costs([run[1] for run in runs[:-1]])
    assert (max(found), sum(found)) == pytest.approx(best)


@given(
    flops=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    speeds=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_more_speed_never_makes_the_bottleneck_worse(flops, speeds):
    def bottleneck(rates):
        runs = share_layers(flops, rates)
        return max(sum(flops[a:b]) / rate for (a, b), rate in zip(runs, rates, strict=True))

    for group in range(len(speeds)):
        faster = [s + (i == group) for i, s in enumerate(speeds)]
        assert bottleneck(faster) <= bottleneck(speeds)
    assert bottleneck([*speeds, 1]) <= bottleneck(speeds)
