"""Costs made ready for playing and ordering: tasks are numbers, looked up in blocks.

Tasks are numbered (kind × S + stage) × M + microbatch with F = 0, B = 1, W = 2; a *block* is all
tasks of one kind on one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpass.ir.schedule import Lane, Schedule, Task, TaskKind
from hetpass.schedules.costs import PipelineCosts

KINDS: tuple[TaskKind, ...] = ("F", "B", "W")

Orders = Sequence[Sequence[int]]
"""Per lane, numbers of tasks in the order of execution."""


@dataclass(frozen=True)
class Block:
    """What the tasks of one kind on one stage have in common.

    Attributes:
      duration_s: of one task.
      to: the block of the task that receives its result; -1: none on another stage.
      to_lane: the lane of that block.
      wire: index of the wire to get there; -1: same lane.
      occupies_s, latency_s, overlaps: of the transfer.
      waits: whether it needs a value from another stage.
    """

    duration_s: float
    to: int
    to_lane: int
    wire: int
    occupies_s: float
    latency_s: float
    overlaps: bool
    waits: bool


@dataclass(frozen=True)
class Pipe:
    """Costs made ready for playing.

    Attributes:
      num_stages, num_microbatches: S and M.
      lane_of: per stage.
      blocks: 3 S of them, in the numbering of tasks.
      wires: the names of the wires.
      shared: whether transfers of several blocks meet on one wire.
      updates_s: per lane, after its last task.
    """

    num_stages: int
    num_microbatches: int
    lane_of: tuple[int, ...]
    blocks: tuple[Block, ...]
    wires: tuple[str, ...]
    shared: bool
    updates_s: tuple[float, ...]


def prepare(
    costs: PipelineCosts, lane_of: tuple[int, ...], num_microbatches: int, has_weight: bool
) -> Pipe:
    """Costs for stages on lanes; without W tasks a B task does the weight gradients too."""
    num_stages = len(costs.stages)
    wires: dict[str, int] = {}
    users = 0

    def block(kind: int, stage: int) -> Block:
        nonlocal users
        cost = costs.stages[stage]
        weight_in_b_s = 0.0 if has_weight else cost.weight_s
        durations = (
            cost.forward_s,
            cost.backward_s + weight_in_b_s,
            cost.weight_s - weight_in_b_s,
        )
        target = (stage + 1, stage - 1, -1)[kind]
        waits = (stage > 0, stage < num_stages - 1, False)[kind]
        if not 0 <= target < num_stages:
            return Block(durations[kind], -1, -1, -1, 0.0, 0.0, True, waits)
        lane, to_lane = lane_of[stage], lane_of[target]
        to = kind * num_stages + target
        if lane == to_lane:
            return Block(durations[kind], to, to_lane, -1, 0.0, 0.0, True, waits)
        link = costs.links[min(stage, target)]
        name = (link.forward_wire, link.backward_wire)[kind] or f"{stage}→{target}"
        occupies_s = (link.forward_s, link.backward_s)[kind]
        users += 1
        wire = wires.setdefault(name, len(wires))
        return Block(
            durations[kind], to, to_lane, wire, occupies_s, link.latency_s, link.overlaps, waits
        )

    blocks = tuple(block(kind, stage) for kind in range(3) for stage in range(num_stages))
    updates_s = [0.0] * (max(lane_of) + 1)
    for stage, lane in enumerate(lane_of):
        updates_s[lane] += costs.stages[stage].update_s
    return Pipe(
        num_stages,
        num_microbatches,
        lane_of,
        blocks,
        tuple(wires),
        users > len(wires),
        tuple(updates_s),
    )


def numbered(schedule: Schedule) -> list[list[int]]:
    """The orders of a schedule's lanes."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    base = {kind: index * stages for index, kind in enumerate(KINDS)}
    return [
        [(base[t.kind] + t.stage) * microbatches + t.microbatch for t in lane.tasks]
        for lane in schedule.lanes
    ]


def task(number: int, num_stages: int, num_microbatches: int) -> Task:
    """The task of that number."""
    block, microbatch = divmod(number, num_microbatches)
    kind, stage = divmod(block, num_stages)
    return Task(KINDS[kind], stage, microbatch)


def lanes_of(orders: Orders, lane_of: tuple[int, ...], num_microbatches: int) -> tuple[Lane, ...]:
    """The lanes of a schedule with these orders."""
    stages = len(lane_of)
    return tuple(
        Lane(
            tuple(stage for stage in range(stages) if lane_of[stage] == index),
            tuple(task(number, stages, num_microbatches) for number in order),
        )
        for index, order in enumerate(orders)
    )
