from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hetpass.cost.analytic import PEAK
from hetpass.errors import PlanError
from hetpass.ir.plan import Plan
from hetpass.ir.stage_plan import StagePrice
from hetpass.planner.evaluate import evaluate
from tests.planner.small_clusters import BATCH, cluster, equal_layers


def plan(text, machines, num_layers=6, microbatches=BATCH, schedule="1f1b"):
    return Plan.parse(
        text,
        cluster=machines,
        num_layers=num_layers,
        num_microbatches=microbatches,
        schedule=schedule,
    )


def priced(text, facts=None, machines=None, **more):
    machines = machines or cluster()
    return evaluate(plan(text, machines, **more), facts or equal_layers(), machines, PEAK)


def test_a_plan_by_hand():
    result = priced("fast: 0-3 | slow: 4-5")
    assert result.step_s == pytest.approx(18.0)
    assert result.objective_s == pytest.approx(18.0)
    assert result.in_flight == (2, 1)
    assert result.violations == ()
    assert result.balance == pytest.approx(1.0)
    first = result.stages[0]
    assert (first.group, first.first_layer, first.last_layer) == ("fast", 0, 3)
    assert (first.forward_s, first.backward_s) == pytest.approx((0.8, 1.2))
    assert first.busy == pytest.approx(16 / 18)
    assert "bottleneck" in str(result)


def test_the_bottleneck_and_the_balance():
    result = priced("fast: 0-2 | slow: 3-5")
    assert result.bottleneck == 1
    assert result.balance == pytest.approx(2.25 / 3)


@pytest.mark.parametrize(
    ("schedule", "step_s"), [("gpipe", 18.0), ("1f1b", 18.0), ("auto", 18.0), ("adaptive", 18.0)]
)
def test_schedules(schedule, step_s):
    assert priced("fast: 0-3 | slow: 4-5", schedule=schedule).step_s == pytest.approx(step_s)


def test_counts_of_the_plan_are_kept():
    machines = cluster()
    given = plan("fast: 0-3 | slow: 4-5", machines)
    stages = given.pipelines[0].stages
    one = tuple(replace(stage, in_flight=1) for stage in stages)
    given = replace(given, pipelines=(replace(given.pipelines[0], stages=one),))
    result = evaluate(given, equal_layers(), machines, PEAK)
    assert result.in_flight == (1, 1)
    assert result.step_s == pytest.approx(32.0)  # one microbatch at a time


def test_a_stage_costs_the_price_that_it_carries():
    machines = cluster()
    given = plan("fast: 0-3 | slow: 4-5", machines)
    first, second = given.pipelines[0].stages
    price = StagePrice(0.4, 0.6, 0.0, 7.0, 0.0)  # half of what its layers cost
    stages = (replace(first, price=price), second)
    given = replace(given, pipelines=(replace(given.pipelines[0], stages=stages),))
    result = evaluate(given, equal_layers(), machines, PEAK)
    assert (result.stages[0].forward_s, result.stages[0].backward_s) == (0.4, 0.6)
    assert result.stages[0].fixed_bytes == 7.0
    assert result.bottleneck == 1
    assert result.step_s == pytest.approx(8 * 2 + 1)


def test_memory_is_a_violation_with_numbers():
    facts = equal_layers(parameter_bytes=10.0)
    result = priced("fast: 0-3 | slow: 4-5", facts, cluster(memory={"fast": 35}))
    assert math.isinf(result.step_s)
    assert result.violations == (
        "stage 0: needs 40 B on each device of 'fast' for 1 microbatch in flight, and has 35 B",
    )


def test_a_schedule_that_holds_too_much():
    facts = equal_layers(activation_bytes=10.0)
    machines = cluster(memory={"fast": 85})
    assert priced("fast: 0-3 | slow: 4-5", facts, machines).violations == ()
    result = priced("fast: 0-3 | slow: 4-5", facts, machines, schedule="gpipe")
    assert result.violations == ("the schedule holds more microbatches than fit",)


def test_what_a_kind_cannot_compute():
    facts = equal_layers(seconds={"fast": 0.5})
    result = priced("fast: 0-3 | slow: 4-5", facts)
    assert result.violations == (
        "stage 1: slow of 'slow' cannot compute layers 4 to 5; it has float32",
    )


def test_a_batch_that_does_not_divide():
    assert "cannot be cut" in priced("fast: 0-3 | slow: 4-5", microbatches=3).violations[0]


def test_several_replicas_have_no_price():
    machines = cluster()
    with pytest.raises(PlanError) as caught:
        evaluate(plan("fast + slow: 0-5", machines), equal_layers(), machines, PEAK)
    assert caught.value.code == "HP-PLAN-UNPRICED"
