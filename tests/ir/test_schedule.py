import dataclasses

import pytest

from hetpass.errors import ScheduleError
from hetpass.ir.schedule import Lane, Schedule, Task


def _lane(stage, words):
    return Lane((stage,), tuple(Task(w[0], stage, int(w[1:])) for w in words.split()))


def _schedule(*orders, in_flight=None):
    lanes = tuple(_lane(stage, words) for stage, words in enumerate(orders))
    return Schedule("mine", len(orders), 2, lanes, in_flight or (2,) * len(orders))


def test_a_legal_one_says_what_it_is():
    schedule = _schedule("F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1", in_flight=(2, 1))
    assert schedule.has_backward
    assert schedule.has_weight
    assert schedule.lane_of == (0, 1)
    assert schedule.held() == (2, 2)
    order = [str(task) for task in schedule.in_order()]
    assert order.index("F0.0") < order.index("F1.0") < order.index("B1.0") < order.index("B0.0")


@pytest.mark.parametrize(
    ("orders", "code"),
    [
        (["F0 F1 B0"], "HP-SCHEDULE-TASKS"),
        (["F0 F0 B0 B1"], "HP-SCHEDULE-TASKS"),
        (["F0 F2 B0 B2"], "HP-SCHEDULE-TASKS"),
        (["F0 F1 W0 W1"], "HP-SCHEDULE-TASKS"),
        (["F0 B1 F1 B0"], "HP-SCHEDULE-ORDER"),
        (["F0 F1 B0 W1 B1 W0"], "HP-SCHEDULE-ORDER"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "HP-SCHEDULE-DEADLOCK"),
    ],
)
def test_what_cannot_run_is_refused(orders, code):
    with pytest.raises(ScheduleError) as caught:
        _schedule(*orders)
    assert caught.value.code == code


def test_more_in_flight_than_stated_is_refused():
    with pytest.raises(ScheduleError) as caught:
        _schedule("F0 F1 B0 B1", in_flight=(1,))
    assert caught.value.code == "HP-SCHEDULE-INFLIGHT"


def test_every_stage_is_on_one_lane():
    lane = _lane(0, "F0 F1")
    with pytest.raises(ScheduleError) as caught:
        Schedule("mine", 2, 2, (lane,), (1, 1))
    assert caught.value.code == "HP-SCHEDULE-LANES"
    with pytest.raises(ScheduleError) as caught:
        dataclasses.replace(_schedule("F0 F1"), num_microbatches=0)
    assert caught.value.code == "HP-SCHEDULE-SIZES"
