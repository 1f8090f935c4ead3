import pytest

from hetpass.schedules import PipelineCosts, StageCost, make_schedule, schedule_names
from hetpass.schedules.pipe import numbered
from hetpass.simulator import simulate
from hetpass.simulator.memory import peak_bytes


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("name", [n for n in schedule_names()])
def test_the_order_alone_gives_the_peak_of_the_curve(name, has_backward):
    stages = tuple(
        StageCost(1.0, 1.0, 0.5, activation_bytes=3.0 + s, weight_bytes=1.0, fixed_bytes=7.0)
        for s in range(4)
    )
    costs = PipelineCosts.equal(4, stages[0])
    costs = PipelineCosts(stages, costs.links)
    schedule = make_schedule(
        name, num_stages=4, num_microbatches=5, has_backward=has_backward, costs=costs
    )
    peaks = peak_bytes(costs, schedule.lane_of, numbered(schedule), 5)
    assert peaks == tuple(curve.peak_bytes for curve in simulate(schedule, costs).memory)
