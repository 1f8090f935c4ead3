from hypothesis import given, settings
from hypothesis import strategies as st

from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.simulator import makespan_s
from hetpass.simulator.bounds import lower_bound_s

_seconds = st.floats(0.0, 4.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_named_schedule_is_faster_than_the_bound(data):
    per_lane = data.draw(st.sampled_from([1, 2]))
    stages = data.draw(st.integers(1, 4)) * per_lane
    stage = st.builds(StageCost, _seconds, _seconds, _seconds, _seconds)
    wires = st.sampled_from([(), ("nic",), ("nic", "card")])
    names = dict(forward_wires=wires, backward_wires=wires)
    link = st.builds(LinkCost, _seconds, _seconds, _seconds, **names)
    costs = PipelineCosts(
        tuple(data.draw(stage) for _ in range(stages)),
        tuple(data.draw(link) for _ in range(stages - 1)),
    )
    names = ["gpipe", "1f1b", "h-1f1b", "zb-h1", "zb-h2"] if per_lane == 1 else ["zb-v"]
    schedule = make_schedule(
        data.draw(st.sampled_from([*names, "interleaved"])),
        num_stages=stages,
        num_microbatches=data.draw(st.integers(1, 6)),
        costs=costs,
        stages_per_lane=per_lane,
    )
    limits = tuple(
        float(sum(schedule.held()[stage] for stage in lane.stages)) for lane in schedule.lanes
    )
    bound_s = lower_bound_s(
        costs,
        schedule.lane_of,
        schedule.num_microbatches,
        has_weight=schedule.has_weight,
        limits_bytes=limits,
    )
    assert bound_s <= makespan_s(schedule, costs) * (1 + 1e-9)


def test_one_lane_and_a_tight_room_are_met_exactly():
    costs = PipelineCosts.equal(2, StageCost(1.0, 2.0), LinkCost(0.5, 0.5))
    arguments = dict(has_weight=False)
    # three microbatches one after another: 3 × (3 + 1 + 3)
    assert lower_bound_s(costs, (0, 1), 3, limits_bytes=(1.0, 1.0), **arguments) == 21.0
    assert lower_bound_s(costs, (0, 1), 3, **arguments) == 1.5 + 9 + 0.5 + 2
    assert lower_bound_s(costs, (0, 0), 3, **arguments) == 18.0
