"""Every schedule, S up to 6, M up to 12, V up to 3, checked from its lanes alone."""

import pytest

from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule, schedule_names
from hetpass.schedules.interleaved import Interleaved
from hetpass.schedules.make import policy
from hetpass.schedules.rendezvous import Receive, Send, lane_programs, run_programs

_PER_LANE = {"interleaved": (1, 2, 3), "zb-v": (2,)}


def _schedules(name, has_backward):
    for lanes in range(1, 7):
        for per_lane in _PER_LANE.get(name, (1,)):
            stages = lanes * per_lane
            link = LinkCost(0.4, 0.2, latency_s=0.1)
            costs = PipelineCosts(
                tuple(StageCost(1 + s % 2, 1.0, 0.5) for s in range(stages)), (link,) * (stages - 1)
            )
            for microbatches in range(1, 13):
                sizes = dict(num_stages=stages, num_microbatches=microbatches)
                options = dict(costs=costs, stages_per_lane=per_lane)
                schedule = make_schedule(name, has_backward=has_backward, **sizes, **options)
                counts = policy(name, **options).counts(stages, microbatches)
                yield schedule, counts, lanes


def _reads(task, last_stage):
    kind, s, m = task
    if kind == "F":
        return [("F", s - 1, m)] if s else []
    if kind == "W":
        return [("B", s, m)]
    return [("F", s, m)] + ([("B", s + 1, m)] if s < last_stage else [])


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("name", schedule_names())
def test_every_size(name, has_backward):
    sizes = 0
    for schedule, counts, lanes in _schedules(name, has_backward):
        sizes += 1
        assert len(schedule.lanes) == lanes
        kinds = "F"
        if has_backward and name != "inference":
            kinds = "FBW" if name.startswith("zb") else "FB"
        _check_tasks(schedule, kinds)
        _check_order(schedule)
        if has_backward:
            _check_in_flight(schedule, counts, kinds)
    assert sizes == 72 * len(_PER_LANE.get(name, (1,)))


def _check_tasks(schedule, kinds):
    listed = [(t.kind, t.stage, t.microbatch) for lane in schedule.lanes for t in lane.tasks]
    expected = {
        (k, s, m)
        for k in kinds
        for s in range(schedule.num_stages)
        for m in range(schedule.num_microbatches)
    }
    assert len(listed) == len(expected)
    assert set(listed) == expected


def _check_order(schedule):
    """Blocking lanes end, in an order that keeps dependencies; links agree at both ends."""
    programs = lane_programs(schedule)
    done = run_programs(programs)
    place = {(t.kind, t.stage, t.microbatch): i for i, t in enumerate(done)}
    assert len(place) == len(done) == sum(len(lane.tasks) for lane in schedule.lanes)
    for task, index in place.items():
        assert all(place[read] < index for read in _reads(task, schedule.num_stages - 1))
    for a, program in enumerate(programs):
        for b, other in enumerate(programs):
            sent = [x.task for x in program if isinstance(x, Send) and x.to_lane == b]
            got = [x.task for x in other if isinstance(x, Receive) and x.from_lane == a]
            assert sent == got
    for lane, program in zip(schedule.lanes, programs, strict=True):
        assert tuple(x for x in program if not isinstance(x, Send | Receive)) == lane.tasks
        for kind in "FBW":
            for stage in lane.stages:
                mine = [t.microbatch for t in lane.tasks if (t.kind, t.stage) == (kind, stage)]
                assert mine == sorted(mine)


def _check_in_flight(schedule, counts, kinds):
    for stage, bound in enumerate(schedule.in_flight):
        assert bound <= counts[stage]
        if kinds == "F":
            continue
        flying, most = set(), 0
        for task in schedule.lanes[schedule.lane_of[stage]].tasks:
            if task.stage == stage and task.kind == "F":
                flying.add(task.microbatch)
            elif task.stage == stage and task.kind == "B":
                flying.remove(task.microbatch)
            most = max(most, len(flying))
        assert most <= bound


def test_interleaved_counts_are_those_of_its_order():
    assert Interleaved(stages_per_lane=2).counts(8, 8) == Interleaved().make(8, 8).in_flight
