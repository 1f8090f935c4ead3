"""What a plan leaves open about its schedule, and what it says once that is decided."""

from __future__ import annotations

import random

import pytest

from hetpass.errors import PlanError, ScheduleError
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.planner.schedule_choice import ScheduleChoice, choose_schedule, plan_schedule
from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.simulator import makespan_s


def plan(places: str, schedule: str, microbatches: int = 8, **per_stage) -> Plan:
    stages = tuple(
        StagePlan(
            i,
            i,
            (Replica(group, (0, 1), (("data", 2),)),),
            **{name: values[i] for name, values in per_stage.items()},
        )
        for i, group in enumerate(places.split())
    )
    return Plan((Pipeline(stages, microbatches),), schedule)


def costs(stages: int, link_s: float = 0.8, **stage) -> PipelineCosts:
    one = StageCost(1 / 3, 1 / 3, 1 / 3, **stage)
    return PipelineCosts.equal(stages, one, LinkCost(link_s, link_s))


def chosen(given: Plan, prices: PipelineCosts, **more) -> ScheduleChoice:
    return choose_schedule(given, prices, has_backward=True, **more)


def counts(given: Plan) -> list[int | None]:
    return [stage.in_flight for stage in given.pipelines[0].stages]


def test_auto_over_free_links_is_1f1b_by_name():
    found = chosen(plan("a b c", "auto"), costs(3, 0.0))
    assert found.plan.schedule == "1f1b"
    assert counts(found.plan) == [None] * 3
    assert found.plan.tasks == ()
    assert found.plan.predictions["pipeline_s"] == pytest.approx(10)


def test_auto_over_slow_links_looks_further_ahead():
    prices = costs(3)
    found = chosen(plan("a b c", "auto"), prices)
    played = makespan_s(plan_schedule(found.plan, has_backward=True), prices)
    assert played == pytest.approx(found.plan.predictions["pipeline_s"])
    for name in ("1f1b", "eager-1f1b", "h-1f1b", "gpipe"):
        named = make_schedule(name, num_stages=3, num_microbatches=8, costs=prices)
        assert played <= makespan_s(named, prices) * (1 + 1e-9)


def test_auto_keeps_to_the_memory():
    prices = costs(3, activation_bytes=1.0)
    found = chosen(plan("a b c", "auto"), prices, limits_bytes=(3.0, 3.0, 3.0))
    schedule = plan_schedule(found.plan, has_backward=True)
    assert max(schedule.in_flight) <= 3


def test_where_nothing_fits_the_least_is_held_and_said():
    prices = costs(3, activation_bytes=5.0)
    found = chosen(plan("a b c", "auto"), prices, limits_bytes=(3.0, 3.0, 3.0))
    assert found.plan.schedule == "1f1b"
    assert "memory may not suffice" in found.notes[0]
    assert "lane 0 needs 5 B and has 3 B" in found.notes[0]


def test_h_1f1b_becomes_counts():
    prices = costs(3)
    found = chosen(plan("a b c", "h-1f1b"), prices).plan
    usual = make_schedule("h-1f1b", num_stages=3, num_microbatches=8, costs=prices)
    assert tuple(counts(found)) == usual.in_flight
    assert plan_schedule(found, has_backward=True) == usual


@pytest.mark.parametrize(("name", "places"), [("zb-h1", "a b c"), ("zb-v", "a b b a")])
def test_zero_bubble_orders_are_written_out(name, places):
    prices = costs(len(places.split()))
    found = chosen(plan(places, name), prices).plan
    usual = make_schedule(name, num_stages=len(places.split()), num_microbatches=8, costs=prices)
    assert plan_schedule(found, has_backward=True).lanes == usual.lanes
    assert chosen(found, prices).plan == found


def test_shared_submeshes_take_any_order_that_runs():
    found = chosen(plan("a b a b", "auto"), costs(4)).plan
    schedule = plan_schedule(Plan.from_json(found.to_json()), has_backward=True)
    assert schedule.lane_of == (0, 1, 0, 1)


def test_counts_in_a_plan_stand():
    given = plan("a b c", "auto", in_flight=[5, None, 1])
    found = chosen(given, costs(3)).plan
    assert found.schedule == "1f1b"
    assert plan_schedule(found, has_backward=True).in_flight == (5, 2, 1)


def test_tasks_that_hold_more_than_the_plan_allows_are_refused():
    tasks = ("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1")
    given = plan("a b", "adaptive", 2)
    fine = Plan(given.pipelines, "adaptive", tasks=tasks)
    assert plan_schedule(fine, has_backward=True).in_flight == (2, 1)
    bound = Plan(plan("a b", "adaptive", 2, in_flight=[1, 1]).pipelines, "adaptive", tasks=tasks)
    with pytest.raises(ScheduleError, match="HP-SCHEDULE-INFLIGHT"):
        plan_schedule(bound, has_backward=True)


@pytest.mark.parametrize(
    ("tasks", "code"),
    [
        (("F0.0 B0.0",), "HP-PLAN-SCHEDULE"),
        (("F0.0 B0.0", "F1.0"), "HP-SCHEDULE-TASKS"),
        (("B0.0 F0.0", "F1.0 B1.0"), "HP-SCHEDULE-ORDER"),
        (("F0.0 B0.0", "F0.0 B0.0"), "HP-SCHEDULE-TASKS"),
    ],
)
def test_tasks_written_by_hand_into_nonsense_are_refused(tasks, code):
    given = Plan(plan("a b", "adaptive", 1).pipelines, "adaptive", tasks=tasks)
    with pytest.raises((PlanError, ScheduleError)) as caught:
        chosen(given, costs(2))
    assert caught.value.code == code


def test_words_that_are_no_tasks_are_refused_when_the_plan_is_made():
    with pytest.raises(PlanError) as caught:
        Plan(plan("a b", "auto").pipelines, "auto", tasks=("F0.0 X1.2", ""))
    assert caught.value.code == "HP-PLAN-TASKS"
    assert "tasks[0]" in str(caught.value)


def test_a_step_without_backward_runs_forward_only():
    found = choose_schedule(plan("a b", "auto"), costs(2), has_backward=False).plan
    assert found.schedule == "inference"
    assert not plan_schedule(found, has_backward=False).has_backward


def test_the_same_choice_every_time():
    chance = random.Random(4)
    stages = tuple(StageCost(chance.random(), chance.random()) for _ in range(4))
    links = tuple(LinkCost(x, x) for x in (0.1, 0.7, 0.3))
    texts = {
        chosen(plan("a b c d", "auto", 16), PipelineCosts(stages, links)).plan.to_json()
        for _ in range(2)
    }
    assert len(texts) == 1
