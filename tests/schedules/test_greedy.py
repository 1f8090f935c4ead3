import pytest

from hetpass.schedules import LinkCost, PipelineCosts, StageCost
from hetpass.schedules.greedy import Ranks, Room, list_orders
from hetpass.schedules.pipe import prepare, task
from hetpass.schedules.zero_bubble import v_shape
from hetpass.simulator.engine import play


def _words(listed, pipe):
    return [
        " ".join(str(task(n, pipe.num_stages, pipe.num_microbatches)) for n in order)
        for order in listed.orders
    ]


def test_a_v_without_reserved_room_can_run_into_a_wall():
    costs = PipelineCosts.equal(4, StageCost(1.0, 1.0, 1.0))
    pipe = prepare(costs, v_shape(4), 4, has_weight=True)
    ones, counts = (1.0,) * 4, (4,) * 4
    early_first = Ranks("FBW", late_forwards=False)
    # both of a lane's places go to first stages; their second stages then have no room
    assert list_orders(pipe, Room(counts, (2.0, 2.0), ones, ones), early_first) is None
    assert list_orders(pipe, Room(counts, (2.0, 2.0), ones, ones, True), early_first) is not None


@pytest.mark.parametrize(
    ("patience", "order"),
    [(0.0, "F0.0 F0.1 F0.2 F0.3 B0.0"), (0.5, "F0.0 F0.1 F0.2 B0.0 F0.3")],
)
def test_patience_waits_for_a_task_of_an_earlier_rank(patience, order):
    # stage 0 is free at 5.25; its first gradient has left stage 1 and arrives at 5.5
    costs = PipelineCosts((StageCost(1.75, 1.0),) * 2, (LinkCost(0.0, 1.0),))
    pipe = prepare(costs, (0, 1), 4, has_weight=False)
    room = Room((4, 1), (4.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    listed = list_orders(pipe, room, Ranks("BFW", patience=patience), kinds=2)
    assert _words(listed, pipe)[0].startswith(order)


@pytest.mark.parametrize("kinds", ["FBW", "BFW", "WBF"])
@pytest.mark.parametrize("patience", [0.0, 1.0])
def test_its_own_clock_is_the_simulators(kinds, patience):
    stages = tuple(StageCost(1.0 + s / 8, 1.5, 0.75 - s / 8) for s in range(4))
    costs = PipelineCosts(stages, (LinkCost(0.5, 0.25, 0.125),) * 3)
    pipe = prepare(costs, (0, 1, 2, 3), 7, has_weight=True)
    room = Room((5, 4, 3, 2), (6.0,) * 4, (1.0,) * 4, (0.5,) * 4)
    listed = list_orders(pipe, room, Ranks(kinds, patience=patience))
    assert play(pipe, listed.orders).makespan_s == listed.makespan_s
