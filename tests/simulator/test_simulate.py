import math

import pytest

from hetpass.errors import ScheduleError
from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.simulator import makespan_s, simulate


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (3, 2), (4, 8), (6, 24)])
def test_equal_stages_follow_the_closed_form(name, stages, microbatches):
    f, b = 1.0, 2.0
    costs = PipelineCosts.equal(stages, StageCost(f, b))
    schedule = make_schedule(name, num_stages=stages, num_microbatches=microbatches)
    timeline = simulate(schedule, costs)
    assert timeline.makespan_s == (microbatches + stages - 1) * (f + b)
    shares = timeline.total_shares()
    assert shares.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert shares.exposed == 0.0


@pytest.mark.parametrize(
    ("c", "expected"),
    [(0.345, (89.1, 67.7, 68.3)), (0.8, (118.3, 80.8, 69.3)), (0.99, (130.4, 89.6, 69.6))],
)
def test_one_slow_link_between_four_equal_stages(c, expected):
    quick, slow = LinkCost(0.01, 0.01), LinkCost(c, c)
    costs = PipelineCosts((StageCost(1 / 3, 2 / 3),) * 4, (quick, slow, quick))
    for name, seconds in zip(("1f1b", "eager-1f1b", "h-1f1b"), expected, strict=True):
        schedule = make_schedule(name, num_stages=4, num_microbatches=64, costs=costs)
        assert makespan_s(schedule, costs) == pytest.approx(seconds, abs=0.1)


def test_h_1f1b_leaves_time_on_a_link_below_its_threshold():
    costs = PipelineCosts.equal(2, StageCost(1 / 3, 2 / 3), LinkCost(0.09, 0.09))
    harp = make_schedule("h-1f1b", num_stages=2, num_microbatches=64, costs=costs)
    more = make_schedule("1f1b", num_stages=2, num_microbatches=64, in_flight=(3, 1))
    assert makespan_s(harp, costs) == pytest.approx(70.8, abs=0.1)
    assert makespan_s(more, costs) == pytest.approx(65.2, abs=0.1)


def test_shares_tell_transfers_from_bubbles():
    costs = PipelineCosts.equal(2, StageCost(1.0, 1.0), LinkCost(1.0, 1.0))
    timeline = simulate(make_schedule("1f1b", num_stages=2, num_microbatches=1), costs)
    # lane 0: F 0-1, B 5-6; lane 1: F 2-3, B 3-4
    first, second = timeline.shares()
    assert timeline.makespan_s == 6.0
    assert (first.busy, first.exposed, first.bubble) == pytest.approx((2 / 6, 1 / 6, 3 / 6))
    assert (second.busy, second.exposed, second.bubble) == pytest.approx((2 / 6, 1 / 6, 3 / 6))


def test_memory_curve_counts_microbatches_in_flight():
    stage = StageCost(1.0, 1.0, activation_bytes=10.0, fixed_bytes=5.0)
    costs = PipelineCosts.equal(3, stage)
    schedule = make_schedule("1f1b", num_stages=3, num_microbatches=6)
    timeline = simulate(schedule, costs)
    assert [c.peak_bytes for c in timeline.memory] == [35.0, 25.0, 15.0]
    assert all(curve.held_bytes[-1] == 5.0 for curve in timeline.memory)


def test_forward_only_holds_one_microbatch():
    stage = StageCost(1.0, 1.0, activation_bytes=10.0)
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=4, has_backward=False)
    timeline = simulate(schedule, PipelineCosts.equal(2, stage))
    assert [c.peak_bytes for c in timeline.memory] == [10.0, 10.0]
    assert timeline.makespan_s == 5.0


def test_update_follows_the_last_task_and_counts_in_the_step():
    costs = PipelineCosts.equal(2, StageCost(1.0, 1.0, update_s=7.0))
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=1)
    timeline = simulate(schedule, costs)
    assert [s.start_s for s in timeline.spans if s.kind == "update"] == [4.0, 3.0]
    assert timeline.makespan_s == makespan_s(schedule, costs) == 11.0


def test_costs_of_another_pipeline_are_refused():
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=1)
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, PipelineCosts.equal(3, StageCost(1.0, 1.0)))
    assert caught.value.code == "HP-SCHEDULE-COST"


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_numbers_that_cannot_be_are_refused(bad):
    for make in (lambda: StageCost(bad, 1.0), lambda: LinkCost(1.0, bad)):
        with pytest.raises(ScheduleError) as caught:
            make()
        assert caught.value.code == "HP-SCHEDULE-COST"
