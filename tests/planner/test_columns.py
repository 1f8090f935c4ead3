"""Columns: cuts against trying all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpass.cost.layer_costs import MemoryOverhead, ProfiledCosts
from hetpass.cost.network import LinkNetwork
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.profile import LayerSize, LayerTime, ModelProfile
from hetpass.planner.columns import columns
from hetpass.planner.pipelines import Market

KINDS = [DeviceKind(name, {"float32": 1e12}, 1000, 1e11) for name in ("fast", "slow")]


def market(speeds, held, overlaps=True, memory=1000.0, devices=(2, 2)):
    """Per group the seconds of each layer's forward; backward takes twice as long."""
    groups = tuple(
        DeviceGroup(kind.name, kind, 1, n, Link(0.0, 1e3), Link(0.0, 1e3))
        for kind, n in zip(KINDS, devices, strict=True)
    )
    cluster = Cluster(groups, default_link=Link(0.0, 100.0))
    seconds = {
        kind.name: {(1, 1): tuple(LayerTime(t, 2 * t, 0.0) for t in times)}
        for kind, times in zip(KINDS, speeds, strict=True)
    }
    sizes = {1: tuple(LayerSize(0.0, 50.0, h) for h in held)}
    costs = ProfiledCosts(ModelProfile("m", seconds, sizes), MemoryOverhead(1, 1, 1000 - memory))
    return Market(costs, LinkNetwork(cluster), cluster, 8, overlaps)


def slowest_s(at, order, cuts):
    """The slowest stage of a cut, infinite where what is in flight does not fit; by hand."""
    worst = 0.0
    for position, (group, (first, end)) in enumerate(
        zip(order, itertools.pairwise(cuts), strict=True)
    ):
        times = at.costs.profile.seconds[KINDS[group].name][1, 1][first:end]
        held = sum(s.held_bytes for s in at.costs.profile.sizes[1][first:end])
        if (len(order) - position) * held > at.costs.usable_bytes(at.cluster.groups[group]):
            return float("inf")
        worst = max(worst, sum(t.forward_s + t.backward_s for t in times))
    return worst


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cuts_are_as_good_as_trying_all(data):
    layers = data.draw(st.integers(2, 6))
    numbers = st.lists(st.integers(1, 9).map(float), min_size=layers, max_size=layers)
    at = market(
        [data.draw(numbers), data.draw(numbers)],
        data.draw(numbers),
        memory=data.draw(st.sampled_from([15.0, 30.0, 1000.0])),
    )
    found = {tuple(s.group for s in column.stages): column for column in columns(at, 1, 4)}
    for stages in range(1, 5):
        for order in itertools.product((0, 1), repeat=stages):
            runs = len(list(itertools.groupby(order)))
            if runs > 3 or max(order.count(0), order.count(1)) > 2 or stages > layers:
                assert order not in found
                continue
            inner = itertools.combinations(range(1, layers), stages - 1)
            best = min(slowest_s(at, order, (0, *cut, layers)) for cut in inner)
            if best == float("inf"):
                assert order not in found
            else:
                assert found[order].period_s == pytest.approx(max(best, 0.5 if runs > 1 else 0.05))


def test_transfers_count_where_they_hold_the_stages():
    free = market([[1.0] * 4, [1.0] * 4], [1.0] * 4)
    held = market([[1.0] * 4, [1.0] * 4], [1.0] * 4, overlaps=False)
    order = (0, 1)

    def two(at):
        return next(c for c in columns(at, 1, 2) if tuple(s.group for s in c.stages) == order)

    # two layers of 3 s each, and 50 bytes over two streams of a link of 100 bytes per second
    assert two(free).period_s == pytest.approx(6.0)
    assert two(held).period_s == pytest.approx(6.0 + 2 * 1.0)
    assert two(held).first_s == pytest.approx(12.0 + 2 * 1.0)


def test_columns_take_no_more_devices_than_there_are():
    at = market([[1.0] * 6, [1.0] * 6], [1.0] * 6, devices=(1, 3))
    for column in columns(at, 1, 6):
        assert column.devices[0] <= 1
        assert column.devices[1] <= 3
