"""List scheduling: a lane that is free starts the first task in a list of ranks that may run.

The list is fixed per lane; what may run is decided by arrivals, by the in-flight bounds and by the
room on the lane. Each kind of task on each stage runs in the order of microbatches, which loses
nothing since microbatches are alike. (Graham's list scheduling; zero-bubble schedules and the
candidates of the adaptive planner are made by it.)
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from hetpass.schedules.pipe import Pipe

_F, _B, _W = range(3)


@dataclass(frozen=True)
class Room:
    """How much may be held, in any unit (bytes, or microbatches).

    Attributes:
      in_flight: per stage, the most microbatches between the start of F and the end of B.
      limits: per lane, the most that its stages hold together.
      takes: per stage, what F takes.
      keeps: per stage, the part that B leaves to be freed by W.
      reserves: the first F of a microbatch on a lane needs room for all stages of the lane, so
        that no later one waits for ever.
    """

    in_flight: tuple[int, ...]
    limits: tuple[float, ...]
    takes: tuple[float, ...]
    keeps: tuple[float, ...]
    reserves: bool = False


@dataclass(frozen=True)
class Ranks:
    """Which of the tasks that may run is started.

    Attributes:
      kinds: the kinds, first choice first: "BFW" starts backwards before forwards before weights.
      late_forwards: among forwards of several stages on a lane, the latest stage first.
      early_backwards: among backwards, the earliest stage first.
      patience: a lane stays idle for a task of an earlier rank if that arrives before this share
        of the candidate's duration has passed.
    """

    kinds: str = "BFW"
    late_forwards: bool = True
    early_backwards: bool = True
    patience: float = 0.0


@dataclass(frozen=True)
class Listed:
    """Orders by list scheduling, and when the last task ends."""

    orders: tuple[tuple[int, ...], ...]
    makespan_s: float


def list_orders(pipe: Pipe, room: Room, ranks: Ranks, kinds: int = 3) -> Listed | None:
    """Orders of the first `kinds` kinds of tasks; None if the room is too small to go on.

    Wires are played as in the simulator (one transfer at a time, first come, first served), except
    that every transfer overlaps with compute.
    """
    return _Listing(pipe, room, ranks, kinds).run()


class _Listing:
    """The state of one run. A block is all tasks of one kind on one stage."""

    def __init__(self, pipe: Pipe, room: Room, ranks: Ranks, kinds: int) -> None:
        stages, self.lanes = pipe.num_stages, max(pipe.lane_of) + 1
        self.pipe, self.room, self.patience = pipe, room, ranks.patience
        self.has_weight = kinds == 3
        self.next = [0] * (3 * stages)
        self.ended = [0] * (3 * stages)
        self.arrived = [0 if b.waits else pipe.num_microbatches for b in pipe.blocks]
        self.coming_s: list[deque[float]] = [deque() for _ in pipe.blocks]
        self.held = [0.0] * self.lanes
        self.wire_free_s = [0.0] * len(pipe.wires)
        self.idle = [True] * self.lanes
        self.orders: list[list[int]] = [[] for _ in range(self.lanes)]
        self.events: list[tuple[float, int, int]] = []
        self.choices = [self._ranked(lane, ranks, kinds) for lane in range(self.lanes)]
        self.entry = [pipe.lane_of.index(lane) for lane in pipe.lane_of]
        own = [[s for s in range(stages) if pipe.lane_of[s] == lane] for lane in range(self.lanes)]
        self.claims = [
            math.fsum(room.takes[s] for s in own[lane]) if room.reserves else 0.0
            for lane in range(self.lanes)
        ]

    def _ranked(self, lane: int, ranks: Ranks, kinds: int) -> list[int]:
        stages = [s for s, own in enumerate(self.pipe.lane_of) if own == lane]
        up = {"F": not ranks.late_forwards, "B": ranks.early_backwards, "W": True}
        return [
            "FBW".index(kind) * self.pipe.num_stages + stage
            for kind in ranks.kinds
            if "FBW".index(kind) < kinds
            for stage in sorted(stages, reverse=not up[kind])
        ]

    def run(self) -> Listed | None:
        now_s, awake = 0.0, set(range(self.lanes))
        while True:
            for lane in sorted(awake):
                if self.idle[lane]:
                    self._start(lane, now_s)
            if not self.events:
                break
            now_s, awake = self.events[0][0], set()
            while self.events and self.events[0][0] == now_s:
                _, what, index = heapq.heappop(self.events)
                if what == 0:
                    self._end(index, now_s)
                    awake.add(self._lane(index))
                else:
                    self.arrived[index] += 1
                    if self.coming_s[index]:
                        self.coming_s[index].popleft()
                    awake.add(self._lane(index))
        expected = sum(len(choice) for choice in self.choices) * self.pipe.num_microbatches
        if sum(self.next) != expected:
            return None
        return Listed(tuple(tuple(order) for order in self.orders), now_s)

    def _lane(self, block: int) -> int:
        return self.pipe.lane_of[block % self.pipe.num_stages]

    def _start(self, lane: int, now_s: float) -> None:
        soonest_s = math.inf
        for block in self.choices[lane]:
            microbatch = self.next[block]
            if microbatch == self.pipe.num_microbatches or not self._has_room(block, lane):
                continue
            if microbatch < self.arrived[block]:
                duration_s = self.pipe.blocks[block].duration_s
                if soonest_s < now_s + self.patience * duration_s:
                    return  # its arrival wakes the lane
                self._run(block, lane, now_s)
                return
            if self.coming_s[block]:
                soonest_s = min(soonest_s, self.coming_s[block][0])

    def _has_room(self, block: int, lane: int) -> bool:
        """Whether the tasks before it on its stage are done and, for F, there is room."""
        kind, stage = divmod(block, self.pipe.num_stages)
        if kind != _F:
            return self.ended[block - self.pipe.num_stages] > self.next[block]
        flying = self.next[block] - self.ended[block + self.pipe.num_stages]
        if flying >= self.room.in_flight[stage]:
            return False
        room = self.room
        if not room.reserves:
            return self.held[lane] + room.takes[stage] <= room.limits[lane]
        return (
            stage != self.entry[stage] or self.held[lane] + self.claims[lane] <= room.limits[lane]
        )

    def _run(self, block: int, lane: int, now_s: float) -> None:
        kind, stage = divmod(block, self.pipe.num_stages)
        if kind == _F:
            if not self.room.reserves:
                self.held[lane] += self.room.takes[stage]
            elif stage == self.entry[stage]:
                self.held[lane] += self.claims[lane]
        self.orders[lane].append(block * self.pipe.num_microbatches + self.next[block])
        self.next[block] += 1
        self.idle[lane] = False
        heapq.heappush(self.events, (now_s + self.pipe.blocks[block].duration_s, 0, block))

    def _end(self, index: int, now_s: float) -> None:
        kind, stage = divmod(index, self.pipe.num_stages)
        lane, block = self._lane(index), self.pipe.blocks[index]
        self.idle[lane] = True
        self.ended[index] += 1
        room = self.room
        if kind == _B:
            self.held[lane] -= room.takes[stage] - (room.keeps[stage] if self.has_weight else 0.0)
        elif kind == _W:
            self.held[lane] -= room.keeps[stage]
        if block.to < 0:
            return
        if block.wires:
            begin_s = max(now_s, *(self.wire_free_s[wire] for wire in block.wires))
            for wire in block.wires:
                self.wire_free_s[wire] = begin_s + block.occupies_s
            now_s = begin_s + block.occupies_s + block.latency_s
            self.coming_s[block.to].append(now_s)
        heapq.heappush(self.events, (now_s, 1, block.to))
