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
      wires: indices of the wires to get there, all at once; (): same lane.
      occupies_s, latency_s, overlaps: of the transfer.
      waits: whether it needs a value from another stage.
    """

    duration_s: float
    to: int
    to_lane: int
    wires: tuple[int, ...]
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
    blocks = tuple(
        _block(costs, lane_of, (kind, stage), has_weight, wires)
        for kind in range(3)
        for stage in range(num_stages)
    )
    updates_s = [0.0] * (max(lane_of) + 1)
    for stage, lane in enumerate(lane_of):
        updates_s[lane] += costs.stages[stage].update_s
    shared = sum(len(block.wires) for block in blocks) > len(wires)
    return Pipe(
        num_stages, num_microbatches, lane_of, blocks, tuple(wires), shared, tuple(updates_s)
    )


def _block(
    costs: PipelineCosts,
    lane_of: tuple[int, ...],
    place: tuple[int, int],
    has_weight: bool,
    wires: dict[str, int],
) -> Block:
    """The block of a kind on a stage; names that `wires` lacks are added to it."""
    kind, stage = place
    cost, last = costs.stages[stage], len(costs.stages) - 1
    weight_in_b_s = 0.0 if has_weight else cost.weight_s
    duration_s = (
        cost.forward_s,
        cost.backward_s + weight_in_b_s,
        cost.weight_s - weight_in_b_s,
    )[kind]
    waits = (stage > 0, stage < last, False)[kind]
    target = (stage + 1, stage - 1, -1)[kind]
    if not 0 <= target <= last:
        return Block(duration_s, -1, -1, (), 0.0, 0.0, True, waits)
    to, to_lane = kind * (last + 1) + target, lane_of[target]
    if lane_of[stage] == to_lane:
        return Block(duration_s, to, to_lane, (), 0.0, 0.0, True, waits)
    link = costs.links[min(stage, target)]
    names = (link.forward_wires, link.backward_wires)[kind] or (f"{stage}→{target}",)
    own = tuple(wires.setdefault(name, len(wires)) for name in dict.fromkeys(names))
    occupies_s = (link.forward_s, link.backward_s)[kind]
    return Block(duration_s, to, to_lane, own, occupies_s, link.latency_s, link.overlaps, waits)


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
