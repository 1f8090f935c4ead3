from __future__ import annotations

from dataclasses import replace

import pytest

from hetpass.errors import ClusterError
from hetpass.ir.cluster import DeviceGroup, Link
from hetpass.planner.search import SearchOptions
from hetpass.planner.what_if import (
    AddGroup,
    Prices,
    RemoveGroup,
    ReplaceGroup,
    SetLink,
    changed,
    what_if,
)
from tests.planner.small_clusters import EXACT, FREE, cluster, equal_layers, kind

OPTIONS = SearchOptions(num_microbatches=(8,), tables=EXACT)


def test_a_device_less_and_a_faster_one():
    before = cluster()
    gone = what_if(equal_layers(), before, [RemoveGroup("slow")], OPTIONS)
    assert gone.before.step_s == pytest.approx(18.0)
    assert gone.after.step_s == pytest.approx(24.0)
    assert gone.speedup == pytest.approx(0.75)
    faster = DeviceGroup("second", kind("fast"), 1, 1)
    better = what_if(equal_layers(), before, [ReplaceGroup("slow", faster)], OPTIONS)
    assert better.after.step_s == pytest.approx((3 * 0.5) * (8 + 1))
    assert (before.groups[1].kind.name, better.before.cluster) == ("slow", before)


def test_links_are_kept_set_and_dropped_with_their_groups():
    links = {("a", "b"): Link(1.0, 2.0), ("b", "c"): Link(3.0, 4.0)}
    before = cluster({"a": 1, "b": 1, "c": 1}, links=links)
    new = DeviceGroup("d", kind("b"), 1, 2, FREE)
    after = changed(
        before,
        [
            ReplaceGroup("b", new),
            SetLink("d", "a", Link(5.0, 6.0)),
            AddGroup(DeviceGroup("e", kind("e"), 1, 1), {"c": Link(7.0, 8.0)}),
            RemoveGroup("a"),
        ],
    )
    assert [g.name for g in after.groups] == ["d", "c", "e"]
    assert after.link("c", "d") == Link(3.0, 4.0)
    assert after.link("e", "c") == Link(7.0, 8.0)
    assert after.link("d", "e") == FREE
    assert changed(before, [SetLink("b", "a", Link(9.0, 9.0))]).link("a", "b") == Link(9.0, 9.0)


def test_a_slower_link_leaves_a_device_idle():
    facts = equal_layers(boundary_bytes=1.0, gradient_boundary_bytes=1.0)
    result = what_if(facts, cluster(), [SetLink("fast", "slow", Link(0.0, 0.1))], OPTIONS)
    assert (result.before.idle_devices, result.after.idle_devices) == (0, 1)
    assert result.after.step_s == pytest.approx(24.0)
    assert "idle devices" in str(result)


def test_money_memory_and_tokens():
    prices = Prices({"fast": 3.0, "slow": 1.0}, tokens_per_example=100)
    facts = equal_layers(parameter_bytes=10.0)
    result = what_if(facts, cluster(), [RemoveGroup("slow")], OPTIONS, prices)
    assert result.before.units_per_s == pytest.approx(800 / 18)
    assert result.before.price_per_hour == pytest.approx(4.0)
    assert result.after.price_per_million == pytest.approx(3.0 / 3600 * 24 / 800 * 1e6)
    assert result.after.fullest_bytes == pytest.approx((60.0, 1e9))
    for text in ("44.44 tokens", "33.33 tokens", "price per hour", "0.75 times as fast"):
        assert text in str(result)
    unknown = what_if(facts, cluster(), [], OPTIONS, Prices({"fast": 3.0}))
    assert unknown.before.price_per_hour is None
    assert "price" not in str(unknown)
    assert "examples" in str(unknown)


def test_where_nothing_fits_it_says_why():
    facts = equal_layers(parameter_bytes=10.0)
    small = replace(cluster().groups[0], kind=kind("tiny", memory=15))
    facts = replace(facts, layers=tuple(replace(x, seconds={}) for x in facts.layers))
    result = what_if(facts, cluster(), [RemoveGroup("slow"), ReplaceGroup("fast", small)], OPTIONS)
    assert result.after.plan is None
    assert result.after.refusal.code == "HP-PLAN-MEMORY"
    assert "nothing fits" in str(result)
    assert "does not fit into the memory" in str(result)


@pytest.mark.parametrize(
    "change",
    [
        RemoveGroup("absent"),
        SetLink("fast", "absent", FREE),
        SetLink("fast", "fast", FREE),
        AddGroup(DeviceGroup("fast", kind("fast"), 1, 1)),
        ReplaceGroup("absent", DeviceGroup("x", kind("x"), 1, 1)),
        AddGroup(DeviceGroup("x", kind("x"), 1, 1), {"absent": FREE}),
    ],
)
def test_changes_that_make_no_sense_are_refused(change):
    with pytest.raises(ClusterError) as caught:
        changed(cluster(), [change])
    assert caught.value.code.startswith("HP-CLUSTER-")


def test_the_last_group_cannot_go():
    with pytest.raises(ClusterError, match="last group"):
        changed(cluster({"a": 1}), [RemoveGroup("a")])
    with pytest.raises(ClusterError):
        Prices({"a": -1.0})
