"""A Schedule: per lane, the order of tasks. Pure data; no JAX.

A *lane* is a submesh that runs one task at a time. With one stage per submesh, lane i runs stage
i; an interleaved schedule puts several stages on one lane. Transfers are not listed: the value
that stage i hands to stage i + 1 is sent as soon as it exists, and the orders of tasks fix the
orders of sends and receives.

What a task waits for:

    F of stage s    F of stage s - 1, same microbatch
    B of stage s    F of stage s and B of stage s + 1, same microbatch
    W of stage s    B of stage s, same microbatch
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from hetpass.errors import ScheduleError
from hetpass.ir.quantities import counted

TaskKind = Literal["F", "B", "W"]
"""F: forward; B: backward (input gradients, and weight gradients too unless W tasks exist);
W: weight gradients alone."""


@dataclass(frozen=True, order=True)
class Task:
    """One piece of work of one microbatch on one stage."""

    kind: TaskKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


_TASK = re.compile(r"([FBW])([0-9]{1,6})\.([0-9]{1,6})")
_KINDS: Mapping[str, TaskKind] = MappingProxyType({"F": "F", "B": "B", "W": "W"})


def read_tasks(text: str) -> tuple[Task, ...]:
    """The tasks in "F0.0 F0.1 B0.0": what `str` makes of each, with blanks between.

    Raises:
      ValueError: naming the first word that is no task.
    """
    tasks = []
    for word in text.split():
        match = _TASK.fullmatch(word)
        if match is None:
            raise ValueError(f"{word[:20]!r} is no task")
        kind, stage, microbatch = match.groups()
        tasks.append(Task(_KINDS[kind], int(stage), int(microbatch)))
    return tuple(tasks)


@dataclass(frozen=True)
class Lane:
    """What one submesh runs, in order.

    Attributes:
      stages: the stages that live on this submesh.
      tasks: every task of these stages, each once, in the order of execution.
    """

    stages: tuple[int, ...]
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Schedule:
    """The order of every task of one step; refused when it could not run to its end.

    Attributes:
      name: how a plan names it ("gpipe", "1f1b", …).
      num_stages, num_microbatches: S and M.
      lanes: one per submesh.
      in_flight: per stage, the largest number of microbatches whose forward has started and whose
        backward has not ended. In a schedule without backward tasks a microbatch is held only
        while its forward runs: 1.

    Raises:
      ScheduleError: HP-SCHEDULE-SIZES (S or M below 1), HP-SCHEDULE-LANES (a stage on no lane or
        on two), HP-SCHEDULE-TASKS (a task missing, twice, or on a foreign lane),
        HP-SCHEDULE-ORDER (a microbatch's F, B, W out of order on a stage),
        HP-SCHEDULE-INFLIGHT (more in flight than stated), HP-SCHEDULE-DEADLOCK (lanes wait for
        each other).
    """

    name: str
    num_stages: int
    num_microbatches: int
    lanes: tuple[Lane, ...]
    in_flight: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_lanes(self)
        _check_tasks(self)
        _check_in_flight(self)
        for _ in self.in_order():
            pass

    @property
    def has_backward(self) -> bool:
        """Whether microbatches run backward too."""
        return any(task.kind == "B" for task in self.lanes[0].tasks)

    @property
    def has_weight(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return any(task.kind == "W" for task in self.lanes[0].tasks)

    @property
    def lane_of(self) -> tuple[int, ...]:
        """Per stage, the index of its lane."""
        lanes = [0] * self.num_stages
        for index, lane in enumerate(self.lanes):
            for stage in lane.stages:
                lanes[stage] = index
        return tuple(lanes)

    def held(self) -> tuple[int, ...]:
        """Per stage, the most microbatches between the start of F and the end of their last task.

        Equal to the microbatches in flight unless there are W tasks: values that a weight
        gradient reads stay in memory until it is done.
        """
        return peaks(self.lanes, self.num_stages, last="W" if self.has_weight else "B")

    def in_order(self) -> Iterator[Task]:
        """All tasks in one order that every lane and every dependency agrees with.

        Lanes take turns, so that work which can go on at the same time stands near each other.
        """
        done: set[tuple[TaskKind, int, int]] = set()
        last = self.num_stages - 1
        at = [0] * len(self.lanes)
        remaining = sum(len(lane.tasks) for lane in self.lanes)
        while remaining:
            wave = []
            for index, lane in enumerate(self.lanes):
                if at[index] < len(lane.tasks) and _ready(lane.tasks[at[index]], done, last):
                    wave.append(lane.tasks[at[index]])
                    at[index] += 1
            if not wave:
                raise _deadlock(self, at)
            for task in wave:
                done.add((task.kind, task.stage, task.microbatch))
                yield task
            remaining -= len(wave)

    def __str__(self) -> str:
        head = (
            f"{self.name}: {counted(self.num_stages, 'stage')} on "
            f"{counted(len(self.lanes), 'lane')}, "
            f"{counted(self.num_microbatches, 'microbatch')}, in flight "
            + " ".join(str(count) for count in self.in_flight)
        )
        return "\n".join([head, *(_lane_line(i, lane) for i, lane in enumerate(self.lanes))])


def peaks(lanes: tuple[Lane, ...], num_stages: int, last: TaskKind) -> tuple[int, ...]:
    """Per stage, the most microbatches whose F has started and whose `last` task has not ended.

    1 on a stage that has no such tasks: each microbatch is then held by its F alone.
    """
    now = [0] * num_stages
    most = [0] * num_stages
    ends = {task.stage for lane in lanes for task in lane.tasks if task.kind == last}
    for lane in lanes:
        for task in lane.tasks:
            if task.kind == "F":
                now[task.stage] += 1
                most[task.stage] = max(most[task.stage], now[task.stage])
            elif task.kind == last:
                now[task.stage] -= 1
    return tuple(count if stage in ends else 1 for stage, count in enumerate(most))


def _stages_text(stages: tuple[int, ...]) -> str:
    """For people: "stage 3" or "stages 0, 4"."""
    word = "stage" if len(stages) == 1 else "stages"
    return f"{word} {', '.join(str(stage) for stage in stages)}"


def _ready(task: Task, done: set[tuple[TaskKind, int, int]], last: int) -> bool:
    kind, stage, microbatch = task.kind, task.stage, task.microbatch
    if kind == "F":
        return stage == 0 or ("F", stage - 1, microbatch) in done
    if kind == "W":
        return ("B", stage, microbatch) in done
    if ("F", stage, microbatch) not in done:
        return False
    return stage == last or ("B", stage + 1, microbatch) in done


def _lane_line(index: int, lane: Lane) -> str:
    one_stage = len(lane.stages) == 1
    names = [f"{t.kind}{t.microbatch}" if one_stage else str(t) for t in lane.tasks]
    return f"  lane {index} ({_stages_text(lane.stages)}): {' '.join(names)}"


def _check_sizes(schedule: Schedule) -> None:
    if schedule.num_stages < 1 or schedule.num_microbatches < 1:
        raise ScheduleError(
            "HP-SCHEDULE-SIZES",
            "a schedule needs at least one stage and one microbatch",
            where=schedule.name,
            details=(f"stages {schedule.num_stages}, microbatches {schedule.num_microbatches}",),
            ways_out=("give both as 1 or more",),
        )


def _check_lanes(schedule: Schedule) -> None:
    stages = sorted(stage for lane in schedule.lanes for stage in lane.stages)
    if stages != list(range(schedule.num_stages)) or not all(x.stages for x in schedule.lanes):
        raise ScheduleError(
            "HP-SCHEDULE-LANES",
            "every stage must be on one lane, and every lane must have a stage",
            where=schedule.name,
            details=(
                f"{counted(schedule.num_stages, 'stage')}; lanes hold "
                + "; ".join(_stages_text(lane.stages) for lane in schedule.lanes),
            ),
            ways_out=("put each of the stages 0 … S - 1 on exactly one lane",),
        )


_BEFORE: Mapping[TaskKind, TaskKind] = MappingProxyType({"B": "F", "W": "B"})


def _check_tasks(schedule: Schedule) -> None:
    kinds = {task.kind for lane in schedule.lanes for task in lane.tasks}
    if "F" not in kinds or ("W" in kinds and "B" not in kinds):
        raise _tasks_error(schedule, "forward tasks must exist, and W tasks need B tasks")
    expected = len(kinds) * schedule.num_microbatches
    for index, lane in enumerate(schedule.lanes):
        seen: set[tuple[TaskKind, int, int]] = set()
        own = set(lane.stages)
        for task in lane.tasks:
            key = (task.kind, task.stage, task.microbatch)
            if task.stage not in own or not 0 <= task.microbatch < schedule.num_microbatches:
                raise _tasks_error(schedule, f"{task} does not belong on lane {index}")
            if key in seen:
                raise _tasks_error(schedule, f"{task} is on lane {index} twice")
            before = _BEFORE.get(task.kind)
            if before is not None and (before, task.stage, task.microbatch) not in seen:
                raise _order_error(schedule, task, before, index)
            seen.add(key)
        if len(seen) != expected * len(lane.stages):
            raise _tasks_error(
                schedule,
                f"lane {index} has {counted(len(seen), 'task')}, its stages need "
                f"{expected * len(lane.stages)}: each of {', '.join(sorted(kinds))} "
                f"for {counted(schedule.num_microbatches, 'microbatch')}",
            )


def _tasks_error(schedule: Schedule, detail: str) -> ScheduleError:
    return ScheduleError(
        "HP-SCHEDULE-TASKS",
        "every lane must hold every task of its stages, each once, and no other",
        where=schedule.name,
        details=(detail,),
        ways_out=("use a named schedule, or complete the lanes",),
    )


def _order_error(schedule: Schedule, task: Task, before: TaskKind, lane: int) -> ScheduleError:
    return ScheduleError(
        "HP-SCHEDULE-ORDER",
        f"{task} comes before the {before} that it reads from",
        where=f"{schedule.name}, lane {lane}",
        ways_out=("order the tasks of a microbatch on a stage as F, B, W",),
    )


def _check_in_flight(schedule: Schedule) -> None:
    actual = peaks(schedule.lanes, schedule.num_stages, last="B")
    stated = schedule.in_flight
    if len(stated) != len(actual) or any(a > s for a, s in zip(actual, stated, strict=True)):
        raise ScheduleError(
            "HP-SCHEDULE-INFLIGHT",
            "the order of tasks holds more microbatches than the schedule states",
            where=schedule.name,
            details=(f"stated {list(stated)}, by the order {list(actual)}, per stage",),
            ways_out=("state the counts that the order needs, or run backward tasks earlier",),
        )


def _deadlock(schedule: Schedule, at: list[int]) -> ScheduleError:
    stuck = [
        f"lane {index} waits before {lane.tasks[position]}"
        for index, (lane, position) in enumerate(zip(schedule.lanes, at, strict=True))
        if position < len(lane.tasks)
    ]
    return ScheduleError(
        "HP-SCHEDULE-DEADLOCK",
        "the lanes wait for each other",
        where=schedule.name,
        details=stuck,
        ways_out=("let no stage hold fewer microbatches in flight than the stage after it",),
    )
