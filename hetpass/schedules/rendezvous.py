"""Sends and receives placed among the tasks of every lane, for transfers that are a rendezvous.

The model. A lane is one thread of control that runs *actions* in order: a task, a send, or a
receive. A send ends only once the receiver has come to the matching receive, and a receive only
once the sender has come to the send: both lanes stand still until then, and neither buffers. This
is the strictest transport there is. A transport with buffers, or with a thread of its own per
link, only ends waits earlier; so lanes that run to their end here run to their end on it too.

Under this model a receive placed just before the task that reads it would stop even 1F1B: stage 0
stands in its second send while stage 1 stands in its first send back. `lane_programs` therefore
takes all tasks in one order that every lane and dependency agrees with (`Schedule.in_order`),
puts every transfer right after its task there, and gives each lane its part of that order. The
first action of the order that has not ended can always go on, so the lanes never wait for ever;
and both ends of a link see its transfers in one order. `run_programs` knows nothing of that
argument and is used to prove it by exhaustion.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpass.errors import ScheduleError
from hetpass.ir.schedule import Schedule, Task


@dataclass(frozen=True)
class Send:
    """The result of `task` goes to the lane of the next stage (F) or the one before (B)."""

    task: Task
    to_lane: int


@dataclass(frozen=True)
class Receive:
    """The result of `task`, which ran on another lane, comes in."""

    task: Task
    from_lane: int


Action = Task | Send | Receive


def lane_programs(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Per lane, its tasks with the sends and receives among them."""
    lane_of = schedule.lane_of
    programs: list[list[Action]] = [[] for _ in schedule.lanes]
    for task in schedule.in_order():
        lane = lane_of[task.stage]
        programs[lane].append(task)
        target = _target(task, schedule.num_stages)
        if target is not None and lane_of[target] != lane:
            programs[lane].append(Send(task, lane_of[target]))
            programs[lane_of[target]].append(Receive(task, lane))
    return tuple(tuple(program) for program in programs)


def run_programs(programs: tuple[tuple[Action, ...], ...]) -> tuple[Task, ...]:
    """The tasks in an order in which lanes with blocking transfers run them.

    Raises:
      ScheduleError: HP-SCHEDULE-DEADLOCK if lanes wait for each other, HP-SCHEDULE-ORDER if two
        lanes meet for different values.
    """
    at = [0] * len(programs)
    done: list[Task] = []
    moved = True
    while moved:
        moved = False
        for lane, program in enumerate(programs):
            while at[lane] < len(program) and _step(programs, at, lane, done):
                moved = True
    stuck = [
        f"lane {lane} waits at {program[position]}"
        for lane, (program, position) in enumerate(zip(programs, at, strict=True))
        if position < len(program)
    ]
    if stuck:
        raise ScheduleError(
            "HP-SCHEDULE-DEADLOCK",
            "lanes with blocking transfers wait for each other",
            details=stuck,
            ways_out=("place sends and receives in one order of all tasks",),
        )
    return tuple(done)


def _step(
    programs: tuple[tuple[Action, ...], ...], at: list[int], lane: int, done: list[Task]
) -> bool:
    """Whether the lane's next action ended (with its partner's, for a transfer)."""
    action = programs[lane][at[lane]]
    if isinstance(action, Task):
        done.append(action)
        at[lane] += 1
        return True
    if isinstance(action, Receive):
        return False  # ended by the sender
    partner = action.to_lane
    other = programs[partner][at[partner]] if at[partner] < len(programs[partner]) else None
    if not isinstance(other, Receive) or other.from_lane != lane:
        return False
    if other.task != action.task:
        raise ScheduleError(
            "HP-SCHEDULE-ORDER",
            "the ends of a link disagree about the order of its transfers",
            details=(f"lane {lane} sends {action.task}, lane {partner} expects {other.task}",),
            ways_out=("place sends and receives in one order of all tasks",),
        )
    at[lane] += 1
    at[partner] += 1
    return True


def _target(task: Task, num_stages: int) -> int | None:
    """The stage that reads the task's result, if that is another stage."""
    if task.kind == "F" and task.stage < num_stages - 1:
        return task.stage + 1
    if task.kind == "B" and task.stage > 0:
        return task.stage - 1
    return None
