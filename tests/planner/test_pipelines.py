"""The price of several parallel pipelines, against sums by hand."""

from __future__ import annotations

import math

import pytest

from hetpass.cost.layer_costs import FactsCosts, MemoryOverhead, ProfiledCosts
from hetpass.cost.network import LinkNetwork
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.ir.profile import LayerSize, LayerTime, ModelProfile
from hetpass.planner.pipelines import Market, price

FAST = DeviceKind("fast", {"float32": 1e12}, 1000, 1e11)
SLOW = DeviceKind("slow", {"float32": 1e12}, 1000, 1e11)
INSIDE, ACROSS, BETWEEN = Link(0.0, 100.0), Link(0.0, 10.0), Link(0.0, 5.0)
CLUSTER = Cluster(
    (
        DeviceGroup("fast", FAST, 2, 2, INSIDE, ACROSS),
        DeviceGroup("slow", SLOW, 2, 2, INSIDE, ACROSS),
    ),
    default_link=BETWEEN,
)
SIZE = LayerSize(parameter_bytes=10.0, output_bytes=20.0, held_bytes=30.0)
EXACT = MemoryOverhead(4.0, 1.0, 0.0)


def market(overlaps=False, **more):
    def times(seconds):
        return {(b, 1): (LayerTime(b * seconds, 2 * b * seconds, 0.5),) * 4 for b in (1, 2)}

    profile = ModelProfile("m", {"fast": times(1.0), "slow": times(2.0)}, {1: (SIZE,) * 4})
    return Market(
        ProfiledCosts(profile, more.pop("memory", EXACT)),
        LinkNetwork(CLUSTER),
        CLUSTER,
        more.pop("batch_size", 8),
        overlaps,
        **more,
    )


def on(group, device, first=0, last=3, data=1):
    devices = tuple(range(device, device + data))
    return StagePlan(first, last, (Replica(group, devices, (("data", data),)),))


def plan(*pipelines):
    return Plan(tuple(Pipeline(tuple(stages), m) for m, *stages in pipelines))


def test_one_device_sums_its_layers():
    found = price(plan((8, on("fast", 0))), market())
    assert found.compute_s == pytest.approx(8 * 4 * 3.0)
    assert found.update_s == pytest.approx(4 * 0.5)
    assert found.sync_s == 0.0
    assert found.step_s == pytest.approx(98.0)
    assert found.peak_bytes == 4 * 40 + 4 * 30


def test_unlike_pipelines_take_unlike_shares():
    found = price(plan((5, on("fast", 0)), (3, on("slow", 0))), market())
    assert [p.compute_s for p in found.pipelines] == [60.0, 72.0]
    assert found.compute_s == 72.0


def test_a_transfer_holds_both_stages_unless_it_overlaps():
    stages = (on("fast", 0, 0, 1), on("fast", 2, 2, 3))
    # a microbatch of one example sends 20 bytes at 10 bytes per second, there and back
    held = price(plan((8, *stages)), market())
    assert held.compute_s == pytest.approx(8 * (6.0 + 4.0) + 6.0)
    free = price(plan((8, *stages)), market(overlaps=True))
    assert free.compute_s < held.compute_s


def test_inside_a_host_transfers_take_the_inner_link():
    near = price(plan((8, on("fast", 0, 0, 1), on("fast", 1, 2, 3))), market())
    assert near.compute_s == pytest.approx(8 * (6.0 + 0.4) + 6.0)


def test_a_row_takes_its_whole_share_however_many_rows_send_it():
    found = price(plan((4, on("fast", 0, 0, 0, 2), on("slow", 0, 1, 3))), market())
    # two examples, 40 bytes, in two messages over 5 bytes per second that two streams share: 16 s
    assert found.compute_s == pytest.approx(4 * (3 * 2 * 6.0 + 2 * 16.0) + 3.0)


def test_streams_of_one_host_share_its_network():
    one = price(plan((8, on("fast", 0, 0, 1), on("slow", 0, 2, 3))), market())
    two = price(
        plan(
            (4, on("fast", 0, 0, 1), on("slow", 0, 2, 3)),
            (4, on("fast", 1, 0, 1), on("slow", 1, 2, 3)),
        ),
        market(),
    )
    # 4 s alone, 8 s each together, over 12 s of the slow stage and 6 s of the fast one
    assert one.compute_s == pytest.approx(8 * (12.0 + 8.0) + 6.0)
    assert two.compute_s == pytest.approx(4 * (12.0 + 16.0) + 6.0)


def test_gradients_are_summed_inside_hosts_and_then_in_a_ring():
    inside = price(plan((4, on("fast", 0)), (4, on("fast", 1))), market())
    assert inside.sync_s == pytest.approx(2 * (1 / 2) * 40 / 100)
    across = price(plan((4, on("fast", 0)), (4, on("fast", 2))), market(sync_overhead_s=0.25))
    assert across.sync_s == pytest.approx(2 * (1 / 2) * 40 / 10 + 0.25)
    everywhere = price(plan(*((2, on(g, d)) for g in ("fast", "slow") for d in (0, 1))), market())
    assert everywhere.sync_s == pytest.approx(2 * (1 / 2) * 40 / 5 + 2 * (1 / 2) * 40 / 100)


def test_only_layers_that_are_shared_are_summed():
    cut = price(
        plan((4, on("fast", 0)), (4, on("slow", 0, 0, 0), on("slow", 2, 1, 3))),
        market(),
    )
    # host fast-0 does the ring of layer 0 with slow-0, then that of the others with slow-1
    assert cut.sync_s == pytest.approx(10 / 5 + 30 / 5)


def test_a_data_axis_shares_every_microbatch():
    found = price(plan((4, on("fast", 0, data=2))), market())
    assert found.compute_s == pytest.approx(4 * 12.0)
    assert found.sync_s == pytest.approx(40 / 100)


def test_rows_of_unlike_groups_in_one_stage_go_at_the_slower_pace():
    rows = (Replica("fast", (0,), (("data", 1),)), Replica("slow", (0,), (("data", 1),)))
    found = price(plan((4, StagePlan(0, 3, rows))), market())
    assert found.compute_s == pytest.approx(4 * 24.0)


def test_memory_bounds_what_is_in_flight():
    stages = (on("fast", 0, 0, 1), on("fast", 2, 2, 3))
    roomy = price(plan((8, *stages)), market())
    assert roomy.pipelines[0].in_flight == (2, 1)
    tight = MemoryOverhead(4.0, 1.0, 1000 - 80 - 60)
    found = price(plan((8, *stages)), market(memory=tight))
    assert found.pipelines[0].in_flight == (1, 1)
    assert found.peak_bytes == 1000
    assert found.compute_s > roomy.compute_s
    tighter = MemoryOverhead(4.0, 1.0, 1000 - 80 - 59)
    found = price(plan((8, *stages)), market(memory=tighter))
    assert math.isinf(found.step_s)
    assert "stage 0 needs" in found.violations[0]


def test_what_was_never_measured_is_a_violation():
    found = price(plan((2, on("fast", 0))), market())  # microbatches of four examples
    assert math.isinf(found.step_s)
    assert "nobody knows" in found.violations[0]


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(PlanError) as caught:
        price(plan((3, on("fast", 0))), market())
    assert caught.value.code == "HP-PLAN-MICROBATCHES"


def test_recomputation_runs_forward_again_and_holds_inputs():
    stage = StagePlan(0, 3, (Replica("fast", (0,), (("data", 1),)),), recompute="full")
    found = price(Plan((Pipeline((stage,), 8),)), market())
    assert found.compute_s == pytest.approx(8 * 4 * 4.0)
    assert found.peak_bytes == 4 * 40 + 4 * 30


def test_facts_price_alike():
    layers = 4 * [{"seconds": {"fast": (1.0, 2.0), "slow": (2.0, 4.0)}, "gradient_bytes": 10.0}]
    facts = ProgramFacts.synthetic(layers, 8)
    costs = FactsCosts(facts)
    found = price(
        plan((4, on("fast", 0)), (4, on("fast", 2))),
        Market(costs, LinkNetwork(CLUSTER), CLUSTER, 8),
    )
    assert found.compute_s == pytest.approx(4 * 12.0)
    assert found.sync_s == pytest.approx(40 / 10)
