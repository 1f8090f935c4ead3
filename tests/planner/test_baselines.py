from __future__ import annotations

import math

import pytest

from hetpass.ir.cluster import Cluster, DeviceGroup, Link
from hetpass.planner.baselines import BASELINES, averaged, baseline
from hetpass.planner.search import SearchOptions, search
from tests.planner.small_clusters import EXACT, cluster, equal_layers, kind, stages_text

OPTIONS = SearchOptions(num_microbatches=(8,), tables=EXACT)


def step_s(name, facts=None, machines=None):
    return baseline(name, facts or equal_layers(), machines or cluster(), OPTIONS)


def test_even_and_megatron_cut_by_count():
    for name in ("even", "megatron"):
        result = step_s(name)
        assert stages_text(result.evaluation.plan) == "fast[1]: 0-2 | slow[1]: 3-5"
        assert result.step_s == pytest.approx(25.5)


def test_megatron_cuts_groups_into_equal_stages():
    facts = equal_layers(seconds={"a": 1.0, "b": 1.0})
    result = step_s("megatron", facts, cluster({"a": 2, "b": 1}))
    assert stages_text(result.evaluation.plan) == "a[1]: 0-1 | a[1]: 2-3 | b[1]: 4-5"


def test_the_best_single_group():
    result = step_s("single_group")
    assert stages_text(result.evaluation.plan) == "fast[1]: 0-5"
    assert result.step_s == pytest.approx(24.0)


def test_harp_keeps_the_order_of_the_groups():
    facts = equal_layers(7, seconds={"a": 1.0, "b": 1.0}, activation_bytes=10.0)
    machines = cluster({"a": 1, "b": 1}, memory={"a": 45, "b": 90})
    free = search(facts, machines, OPTIONS)
    assert stages_text(free.plan).startswith("b[1]")
    fixed = step_s("harp", facts, machines)
    assert stages_text(fixed.evaluation.plan).startswith("a[1]")
    assert fixed.evaluation.schedule == "h-1f1b"
    assert fixed.step_s > free.best.step_s


def test_alpa_sees_one_average_kind():
    groups = (
        DeviceGroup("a", kind("a", 100), 1, 1),
        DeviceGroup("b", kind("b", 60), 1, 3, Link(1.0, 2.0)),
        DeviceGroup("c", kind("c", 80), 1, 4, Link(3.0, 4.0)),
    )
    seen = averaged(Cluster(groups, {("a", "b"): Link(0.0, 1.0)}, Link(3.0, 4.0)))
    assert {group.kind for group in seen.groups} == {seen.groups[0].kind}
    assert seen.groups[0].kind.memory_bytes == 60
    assert [group.num_devices for group in seen.groups] == [1, 3, 4]
    assert seen.link("a", "b") == Link(2.0, 3.0)
    assert seen.groups[0].intra_host == Link(2.0, 3.0)


def test_where_nothing_fits():
    facts = equal_layers(parameter_bytes=100.0)
    result = step_s("even", facts, cluster(memory={"fast": 10, "slow": 10}))
    assert result.evaluation is None
    assert math.isinf(result.step_s)


@pytest.mark.parametrize("name", BASELINES)
def test_none_is_better_than_the_search(name):
    facts = equal_layers(
        9,
        seconds={"ka": 0.5, "kb": 0.8, "average": 0.6},
        boundary_bytes=1.0,
        gradient_boundary_bytes=1.0,
        gradient_bytes=1.0,
    )
    groups = (
        DeviceGroup("x", kind("kb"), 1, 2, Link(0.0, 100.0)),
        DeviceGroup("y", kind("ka"), 1, 2, Link(0.0, 100.0)),
    )
    machines = Cluster(groups, default_link=Link(0.01, 5.0))
    ours = search(facts, machines, SearchOptions(tables=EXACT))
    theirs = baseline(name, facts, machines, SearchOptions(tables=EXACT))
    assert theirs.evaluation is not None
    assert ours.best.step_s <= theirs.step_s * (1 + 1e-9)
