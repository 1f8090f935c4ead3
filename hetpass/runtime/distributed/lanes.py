"""The order of one step, as each lane of one process sees it.

`dispatch` gives one order in which all that a step reads exists before it is read. A lane runs
that order, restricted to its own stages: transfers to other lanes become posts, transfers from
them are taken where they are first read. All orders agree with the one, and posting never waits,
so that the lanes of all processes together never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hetpass.runtime.dispatch import Dispatch, Move, Run, Wait


@dataclass(frozen=True)
class Post:
    """Sends a cell's array to other processes."""

    transfer: int
    source: int
    microbatch: int | None
    drops: tuple[int, ...]


@dataclass(frozen=True)
class Hand:
    """Moves a cell's array to another lane of this process."""

    move: Move
    drops: tuple[int, ...]


@dataclass(frozen=True)
class Take:
    """Waits for an array from another lane, and puts it into a cell."""

    transfer: int
    target: int
    microbatch: int | None
    stage: int


LaneStep = Run | Move | Wait | Post | Hand | Take


@dataclass
class _Lane:
    steps: list[LaneStep]
    pending: dict[int, Take]

    def read(self, cells: Sequence[int]) -> None:
        """Takes what has been announced for these cells."""
        for cell in cells:
            take = self.pending.pop(cell, None)
            if take is not None:
                self.steps.append(take)


def lane_steps(
    program: Dispatch, lane_of: Sequence[int], stages: Collection[int], routed: Collection[int]
) -> dict[int, tuple[LaneStep, ...]]:
    """By lane, what this process does.

    Args:
      program: the whole step.
      lane_of: per stage.
      stages: that have devices in this process.
      routed: transfers that go between processes.
    """
    lanes = {lane_of[stage]: _Lane([], {}) for stage in stages}
    token_lane: dict[int, int] = {}
    for step in program.instructions:
        if isinstance(step, Move):
            _add_move(lanes, lane_of, stages, step, step.transfer in routed)
            continue
        if isinstance(step, Run):
            token_lane[step.results[-1]] = lane_of[step.stage]
            number = lane_of[step.stage] if step.stage in stages else None
        else:
            number = token_lane[step.token]
        lane = None if number is None else lanes.get(number)
        if lane is not None and (isinstance(step, Wait) or step.stage in stages):
            if isinstance(step, Run):
                lane.read(step.arguments)
            lane.steps.append(step)
    for lane in lanes.values():
        lane.read(tuple(lane.pending))
    return {number: tuple(lane.steps) for number, lane in lanes.items()}


def _add_move(
    lanes: dict[int, _Lane],
    lane_of: Sequence[int],
    stages: Collection[int],
    move: Move,
    routed: bool,
) -> None:
    source, target = move.stages
    near = not routed and lane_of[source] == lane_of[target]
    if source in stages:
        lane = lanes[lane_of[source]]
        lane.read((move.source,))
        drops = tuple(cell for cell in move.drops if near or cell == move.source)
        if routed:
            lane.steps.append(Post(move.transfer, move.source, move.microbatch, drops))
        else:
            lane.steps.append(move if near else Hand(move, drops))
    if target in stages and not near:
        take = Take(move.transfer, move.target, move.microbatch, target)
        lanes[lane_of[target]].pending[move.target] = take
