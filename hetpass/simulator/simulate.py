"""simulate: a Schedule and its costs to the Timeline of one step."""

from __future__ import annotations

from hetpass.errors import ScheduleError
from hetpass.ir.quantities import counted
from hetpass.ir.schedule import Schedule
from hetpass.ir.timeline import MemoryCurve, Span, SpanKind, Timeline
from hetpass.schedules.costs import PipelineCosts
from hetpass.schedules.pipe import Pipe, numbered, prepare, task
from hetpass.simulator.engine import Played, play
from hetpass.simulator.memory import changes_bytes

_SENDS: tuple[SpanKind, SpanKind] = ("send-F", "send-B")


def simulate(schedule: Schedule, costs: PipelineCosts) -> Timeline:
    """What every lane and wire does in one step, and the bytes that every lane holds.

    The rules are those of `simulator.engine`. Lanes are named "lane 0", …; a wire by the name in
    its
    link, or "0→1" for what stage 0 sends to stage 1. A transfer's span is the time for which
    it occupies its wires.

    Raises:
      ScheduleError: HP-SCHEDULE-COST if the costs are of another number of stages.
    """
    pipe = _prepared(schedule, costs)
    played = _played(pipe, schedule)
    lanes = tuple(f"lane {index}" for index in range(len(schedule.lanes)))
    spans = [
        *_task_spans(pipe, schedule, played, lanes),
        *_send_spans(pipe, schedule, played),
        *_update_spans(schedule, costs, played, lanes),
    ]
    memory = _curves(schedule, costs, played, lanes)
    return Timeline(lanes, pipe.wires, tuple(spans), memory)


def makespan_s(schedule: Schedule, costs: PipelineCosts) -> float:
    """Seconds of one step, as `simulate` gives them, without the Timeline."""
    return _played(_prepared(schedule, costs), schedule).makespan_s


def _prepared(schedule: Schedule, costs: PipelineCosts) -> Pipe:
    if len(costs.stages) != schedule.num_stages:
        raise ScheduleError(
            "HP-SCHEDULE-COST",
            "the costs are of another pipeline",
            where=schedule.name,
            details=(
                f"{counted(len(costs.stages), 'stage')} in the costs, {schedule.num_stages} in "
                "the schedule",
            ),
            ways_out=("give costs with one entry per stage",),
        )
    return prepare(costs, schedule.lane_of, schedule.num_microbatches, schedule.has_weight)


def _played(pipe: Pipe, schedule: Schedule) -> Played:
    played = play(pipe, numbered(schedule))
    if played is None:  # a Schedule refuses this when it is made
        raise AssertionError(f"{schedule.name} does not end")
    return played


def _task_spans(
    pipe: Pipe, schedule: Schedule, played: Played, lanes: tuple[str, ...]
) -> list[Span]:
    return [
        Span(lane, t.kind, t.stage, t.microbatch, played.start_s[n], played.end_s[n])
        for lane, order in zip(lanes, numbered(schedule), strict=True)
        for n in order
        for t in (task(n, pipe.num_stages, pipe.num_microbatches),)
    ]


def _send_spans(pipe: Pipe, schedule: Schedule, played: Played) -> list[Span]:
    spans = []
    blocks = 2 * pipe.num_stages if schedule.has_backward else pipe.num_stages
    for index, block in enumerate(pipe.blocks[:blocks]):
        kind, stage = divmod(index, pipe.num_stages)
        for microbatch in range(pipe.num_microbatches):
            start_s = played.sent_s[index * pipe.num_microbatches + microbatch]
            end_s = start_s + block.occupies_s
            spans += [
                Span(pipe.wires[wire], _SENDS[kind], stage, microbatch, start_s, end_s)
                for wire in block.wires
            ]
    return spans


def _update_spans(
    schedule: Schedule, costs: PipelineCosts, played: Played, lanes: tuple[str, ...]
) -> list[Span]:
    spans = []
    for name, lane, order in zip(lanes, schedule.lanes, numbered(schedule), strict=True):
        now_s = max(played.end_s[number] for number in order)
        for stage in lane.stages:
            update_s = costs.stages[stage].update_s
            if update_s:
                spans.append(Span(name, "update", stage, -1, now_s, now_s + update_s))
                now_s += update_s
    return spans


def _curves(
    schedule: Schedule, costs: PipelineCosts, played: Played, lanes: tuple[str, ...]
) -> tuple[MemoryCurve, ...]:
    changes = changes_bytes(costs, schedule.has_weight, schedule.has_backward)
    curves = []
    for name, lane, order in zip(lanes, schedule.lanes, numbered(schedule), strict=True):
        now = sum(costs.stages[stage].fixed_bytes for stage in lane.stages)
        times_s, held = [0.0], [now]
        for number in order:
            block = number // schedule.num_microbatches
            start_s, end_s = played.start_s[number], played.end_s[number]
            if block >= schedule.num_stages:
                steps = [(end_s, changes[block])]
            elif schedule.has_backward:
                steps = [(start_s, changes[block])]
            else:
                taken = costs.stages[block].activation_bytes
                steps = [(start_s, taken), (end_s, -taken)]
            for time_s, change in steps:
                now += change
                times_s.append(time_s)
                held.append(now)
        curves.append(MemoryCurve(name, tuple(times_s), tuple(held)))
    return tuple(curves)
