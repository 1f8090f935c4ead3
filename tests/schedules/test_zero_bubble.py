import pytest

from hetpass.errors import ScheduleError
from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.simulator import simulate

_UNIT = StageCost(1.0, 1.0, 1.0)


def _run(name, costs, microbatches):
    schedule = make_schedule(
        name, num_stages=len(costs.stages), num_microbatches=microbatches, costs=costs
    )
    return schedule, simulate(schedule, costs)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_zb_h1_has_a_third_of_the_bubble_at_equal_memory(stages, groups):
    costs = PipelineCosts.equal(stages, _UNIT)
    microbatches = groups * stages
    plain, plain_run = _run("1f1b", costs, microbatches)
    schedule, run = _run("zb-h1", costs, microbatches)
    assert plain_run.makespan_s == 3 * microbatches + 3 * (stages - 1)
    assert run.makespan_s == 3 * microbatches + (stages - 1)
    assert schedule.in_flight == plain.in_flight
    assert max(schedule.held()) == max(plain.in_flight)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_zb_h2_lanes_never_stand_still_between_their_first_and_last_task(stages):
    microbatches = 4 * stages
    schedule, run = _run("zb-h2", PipelineCosts.equal(stages, _UNIT), microbatches)
    assert run.longest_stage_s == 3 * microbatches
    assert max(schedule.held()) <= 2 * stages - 1


@pytest.mark.parametrize("lanes", [2, 3, 4, 6])
def test_zb_v_has_the_memory_of_1f1b_on_every_lane(lanes):
    microbatches = 3 * lanes
    costs = PipelineCosts.equal(2 * lanes, _UNIT)
    schedule, run = _run("zb-v", costs, microbatches)
    assert run.makespan_s == 6 * microbatches + (lanes - 1)
    assert max(curve.peak_bytes for curve in run.memory) <= 2 * lanes
    assert [lane.stages for lane in schedule.lanes] == [
        (i, 2 * lanes - 1 - i) for i in range(lanes)
    ]


def test_unequal_stages_take_the_time_of_the_bottleneck():
    costs = PipelineCosts(
        tuple(StageCost(x, x, x) for x in (1.0, 1.5, 1.0, 2.0)), (LinkCost(0.0, 0.0),) * 3
    )
    assert _run("zb-h1", costs, 16)[1].longest_stage_s == 96.0
    assert _run("zb-h1", PipelineCosts.equal(4, _UNIT), 16)[1].longest_stage_s <= 52.2


def test_a_v_needs_an_even_number_of_stages():
    with pytest.raises(ScheduleError) as caught:
        make_schedule("zb-v", num_stages=3, num_microbatches=2)
    assert caught.value.code == "HP-SCHEDULE-SIZES"
