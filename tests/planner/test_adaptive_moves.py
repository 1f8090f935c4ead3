import random

import pytest

from hetpass.planner.adaptive_moves import exchanged, moved
from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.schedules.pipe import numbered, prepare, task
from hetpass.simulator.engine import play


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_moves_keep_the_tasks_and_the_order_of_each_microbatch(name):
    costs = PipelineCosts.equal(3, StageCost(1.0, 1.0, 0.5), LinkCost(0.3, 0.3))
    schedule = make_schedule(name, num_stages=3, num_microbatches=4, costs=costs)
    pipe = prepare(costs, (0, 1, 2), 4, schedule.has_weight)
    orders = tuple(tuple(order) for order in numbered(schedule))
    near = list(moved(pipe, orders, play(pipe, orders)))
    chance = random.Random(0)
    near += [exchanged(pipe, orders, chance) for _ in range(50)]
    assert len(set(near)) > 3
    for other in near:
        for lane, was in zip(other, orders, strict=True):
            assert sorted(lane) == sorted(was)
            tasks = [task(number, 3, 4) for number in lane]
            for kind in "FBW":
                mine = [t.microbatch for t in tasks if t.kind == kind]
                assert mine == sorted(mine)
            for m in range(4):
                assert [t.kind for t in tasks if t.microbatch == m] in (list("FB"), list("FBW"))


def test_a_backward_that_came_early_moves_before_forwards():
    # all forwards first holds stage 0's first backward back
    costs = PipelineCosts((StageCost(1.0, 1.0), StageCost(0.1, 0.1)), (LinkCost(0.0, 0.0),))
    pipe = prepare(costs, (0, 1), 3, False)
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=3)
    orders = tuple(tuple(order) for order in numbered(schedule))
    firsts = {
        tuple(str(task(n, 2, 3)) for n in other[1])
        for other in moved(pipe, orders, play(pipe, orders))
    }
    assert ("F1.0", "F1.1", "B1.0", "F1.2", "B1.1", "B1.2") in firsts
