import pytest

from hetpass.errors import ScheduleError
from hetpass.ir.schedule import Task
from hetpass.schedules import make_schedule
from hetpass.schedules.rendezvous import Receive, Send, lane_programs, run_programs


def test_receives_just_before_their_readers_stop_1f1b():
    """The reason why sends and receives are placed, and the proof that the player sees a stop."""
    schedule = make_schedule("1f1b", num_stages=2, num_microbatches=3)
    programs = []
    for lane in (0, 1):
        actions = []
        for task in schedule.lanes[lane].tasks:
            if lane == 1 and task.kind == "F":
                actions.append(Receive(Task("F", 0, task.microbatch), 0))
            if lane == 0 and task.kind == "B":
                actions.append(Receive(Task("B", 1, task.microbatch), 1))
            actions.append(task)
            if (lane, task.kind) in ((0, "F"), (1, "B")):
                actions.append(Send(task, 1 - lane))
        programs.append(tuple(actions))
    with pytest.raises(ScheduleError) as caught:
        run_programs(tuple(programs))
    assert caught.value.code == "HP-SCHEDULE-DEADLOCK"
    assert len(run_programs(lane_programs(schedule))) == 12


def test_ends_that_disagree_are_seen():
    f0, f1 = Task("F", 0, 0), Task("F", 0, 1)
    with pytest.raises(ScheduleError) as caught:
        run_programs(((f0, Send(f0, 1)), (Receive(f1, 0),)))
    assert caught.value.code == "HP-SCHEDULE-ORDER"
