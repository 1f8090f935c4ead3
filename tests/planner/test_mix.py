from __future__ import annotations

import itertools
import json

import pytest

from hetpass.cost.layer_costs import MemoryOverhead, ProfiledCosts
from hetpass.cost.network import LinkNetwork
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.plan import Plan
from hetpass.ir.profile import LayerSize, LayerTime, ModelProfile
from hetpass.planner.columns import columns
from hetpass.planner.mix import MixOptions, mix
from hetpass.planner.pipelines import Market, price
from hetpass.planner.sync_estimate import SyncEstimate

KINDS = {name: DeviceKind(name, {"float32": 1e12}, 1000, 1e11) for name in ("fast", "slow")}


def market(hosts=None, layers=4, slow=2.0, gradient=0.0, memory=0.0, batch=12, link=1e9):
    hosts = hosts or {"fast": 1, "slow": 1}
    groups = tuple(
        DeviceGroup(name, KINDS[name], count, 2, Link(0.0, 1e9), Link(0.0, link))
        for name, count in hosts.items()
    )
    cluster = Cluster(groups, default_link=Link(0.0, link))

    def times(seconds):
        return {
            (b, w): (LayerTime(b * seconds / w, 2 * b * seconds / w, 0.0),) * layers
            for b in (1, 2)
            for w in (1, 2)
        }

    sizes = {w: (LayerSize(gradient / w, 10.0, 1.0 / w),) * layers for w in (1, 2)}
    profile = ModelProfile("m", {"fast": times(1.0), "slow": times(slow)}, sizes)
    costs = ProfiledCosts(profile, MemoryOverhead(4.0, 1.0, memory))
    return Market(costs, LinkNetwork(cluster), cluster, batch)


def test_twice_as_fast_devices_take_twice_the_batch():
    found = mix(market(), MixOptions(examples=(1,)))
    # four devices, of which two do a microbatch in 12 s and two in 24 s: 48 s for all twelve
    assert found.price.compute_s == pytest.approx(48.0)
    assert found.plan.num_microbatches == 12
    assert found.plan.predictions["step_s"] == found.price.step_s


def test_devices_that_only_hold_up_are_left_idle():
    found = mix(market(slow=1000.0), MixOptions(examples=(1,)))
    groups = {r.group for p in found.plan.pipelines for s in p.stages for r in s.replicas}
    assert groups == {"fast"}


def test_dear_gradients_are_not_summed_over_a_slow_link():
    cheap = mix(market(gradient=1.0, link=1e9))
    dear = mix(market(gradient=100.0, link=10.0))
    assert len(cheap.plan.pipelines) > 1
    holders = [
        {r.group for p in dear.plan.pipelines for s in p.stages for r in s.replicas
         if s.first_layer <= layer <= s.last_layer}
        for layer in range(4)
    ]  # fmt: skip
    assert all(len(groups) == 1 for groups in holders)


def test_no_plan_of_one_sort_is_better():
    at = market({"fast": 1, "slow": 2}, gradient=5.0, link=50.0)
    best = mix(at).price.step_s
    for examples in (1, 2):
        for column in columns(at, examples, 4):
            copies = min(
                g.num_devices // u
                for g, u in zip(at.cluster.groups, column.devices, strict=True)
                if u
            )
            for count in range(1, copies + 1):
                if at.batch_size // examples % count == 0:
                    plan = equal_columns(at, column, count, at.batch_size // examples // count)
                    assert best <= price(plan, at).step_s * (1 + 1e-9)


def equal_columns(at, column, count, microbatches):
    """Copies of a column, each as it comes, by hand."""
    free = {group.name: itertools.count() for group in at.cluster.groups}
    pipelines = []
    for _ in range(count):
        stages = []
        for s in column.stages:
            name = at.cluster.groups[s.group].name
            devices = [next(free[name]) for _ in range(s.ways)]
            replica = {"group": name, "devices": devices, "mesh": [["model", s.ways]]}
            stages.append({"first_layer": s.first, "last_layer": s.end - 1, "replicas": [replica]})
        pipelines.append({"num_microbatches": microbatches, "stages": stages})
    data = {"format": "hetpass-plan/1", "pipelines": pipelines}
    return Plan.from_json(json.dumps(data))


def test_the_same_twice():
    assert mix(market()).plan.to_json() == mix(market()).plan.to_json()


def test_where_nothing_fits_an_error_says_so():
    with pytest.raises(PlanError) as caught:
        mix(market(memory=999.5, gradient=10.0))
    assert caught.value.code == "HP-PLAN-MEMORY"


def test_more_stages_are_tried_where_few_do_not_fit():
    # a device holds one layer, and takes no more
    at = market({"fast": 2, "slow": 2}, gradient=100.0, memory=550.0)
    found = mix(at, MixOptions(examples=(1,), most_stages=1))
    assert min(len(p.stages) for p in found.plan.pipelines) >= 2
    assert not found.price.violations


def test_the_estimate_of_sums_is_what_plans_come_to():
    at = market({"fast": 2, "slow": 2}, gradient=7.0, link=20.0)
    found = columns(at, 1, 4)
    estimate = SyncEstimate(at, found).alone_s()
    whole = [i for i, c in enumerate(found) if len(c.stages) == 1]
    assert whole
    for i in whole:
        column = found[i]
        copies = max(
            g.num_devices // u for g, u in zip(at.cluster.groups, column.devices, strict=True) if u
        )
        plan = equal_columns(at, column, copies, 3)
        # over two hosts half of the passes that an estimate for all four hosts has
        assert price(plan, at).sync_s == pytest.approx(
            estimate[i] * (2 * (1 / 2)) / (2 * (3 / 4)), rel=1e-3
        )
