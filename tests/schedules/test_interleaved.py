import pytest

from hetpass.errors import ScheduleError
from hetpass.schedules import PipelineCosts, StageCost, make_schedule
from hetpass.simulator import simulate


@pytest.mark.parametrize("lanes", [2, 3, 4])
@pytest.mark.parametrize("per_lane", [1, 2, 3])
def test_bubble_is_divided_by_the_stages_per_lane(lanes, per_lane):
    microbatches = 2 * lanes
    costs = PipelineCosts.equal(lanes * per_lane, StageCost(1.0, 2.0))
    schedule = make_schedule(
        "interleaved",
        num_stages=lanes * per_lane,
        num_microbatches=microbatches,
        stages_per_lane=per_lane,
    )
    assert simulate(schedule, costs).makespan_s == 3 * (microbatches * per_lane + lanes - 1)


def test_one_stage_per_lane_holds_what_its_warm_up_says():
    schedule = make_schedule("interleaved", num_stages=3, num_microbatches=9, stages_per_lane=1)
    assert schedule.in_flight == (5, 3, 1)


def test_stages_must_spread_evenly():
    with pytest.raises(ScheduleError) as caught:
        make_schedule("interleaved", num_stages=5, num_microbatches=4)
    assert caught.value.code == "HP-SCHEDULE-SIZES"
