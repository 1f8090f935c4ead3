"""Lower bounds of a step's seconds that no order of tasks can pass.

All microbatches are alike, so bounds are kept per block for the i-th task *in order*, whatever
microbatch it belongs to: its *head*, no start before that, and its *tail*, no end of the step
earlier than that after its end. Heads follow the chain of a microbatch, the lane, the wires and
the room for microbatches; tails are heads of the step run backwards. On every lane and wire its
tasks with heads and tails make a one-machine problem, whose preemptive optimum (Carlier 1982) no
schedule can pass.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from hetpass.schedules.costs import PipelineCosts
from hetpass.schedules.pipe import Pipe, prepare


def lower_bound_s(
    costs: PipelineCosts,
    lane_of: tuple[int, ...],
    num_microbatches: int,
    *,
    has_weight: bool,
    limits_bytes: tuple[float, ...] | None = None,
) -> float:
    """Seconds that a step takes at least; inf if a stage has no room for one microbatch.

    `limits_bytes` are per lane, as in `planner.adaptive`.
    """
    pipe = prepare(costs, lane_of, num_microbatches, has_weight)
    rooms = [
        _room(costs, lane_of, stage, limits_bytes, has_weight) for stage in range(len(lane_of))
    ]
    if min(room.held for room in rooms) < 1:
        return math.inf
    heads = _Heads(_ahead(pipe), num_microbatches, rooms)
    tails = _Heads(_backwards(pipe), num_microbatches, rooms)
    jobs = _Jobs(pipe, heads, tails)
    machines = [jobs.of_lane(lane, has_weight) for lane in range(max(lane_of) + 1)]
    machines += [jobs.of_wire(wire) for wire in range(len(pipe.wires))]
    return max(map(one_machine_s, machines))


@dataclass(frozen=True)
class _Room:
    """What a stage has memory for.

    Attributes:
      held: microbatches from F to B, if nothing else is held.
      kept: further ones that wait for W, beside one from F to B.
    """

    held: float
    kept: float


def _room(
    costs: PipelineCosts,
    lane_of: tuple[int, ...],
    stage: int,
    limits: tuple[float, ...] | None,
    has_weight: bool,
) -> _Room:
    """No bound where stages share a lane."""
    cost, lane = costs.stages[stage], lane_of[stage]
    if limits is None or lane_of.count(lane) > 1 or not cost.activation_bytes:
        return _Room(math.inf, math.inf)
    free_bytes = limits[lane] * (1 + 1e-9) - cost.fixed_bytes
    kept_bytes = cost.weight_bytes if has_weight else 0.0
    beside = (free_bytes - cost.activation_bytes) // kept_bytes if kept_bytes else math.inf
    return _Room(free_bytes // cost.activation_bytes, beside)


@dataclass(frozen=True)
class _Chain:
    """The tasks of a microbatch in the order they run, up the stages and down again.

    Attributes:
      durations_s: 2 S of them: up, then down.
      occupies_s, latency_s: of the transfer after each.
      ready_s: per stage: its first task does not start before.
      weights_s: per stage, of its weight task; 0 where there is none.
      weights_first: whether the i-th task up follows i + 1 weight tasks (run backwards).
    """

    durations_s: list[float]
    occupies_s: list[float]
    latency_s: list[float]
    ready_s: list[float]
    weights_s: list[float]
    weights_first: bool


def _ahead(pipe: Pipe) -> _Chain:
    blocks = [pipe.blocks[b] for b in _order(pipe)]
    return _Chain(
        [b.duration_s for b in blocks],
        [b.occupies_s for b in blocks],
        [b.latency_s for b in blocks],
        [0.0] * pipe.num_stages,
        [b.duration_s for b in pipe.blocks[2 * pipe.num_stages :]],
        False,
    )


def _backwards(pipe: Pipe) -> _Chain:
    """The step run backwards: down is up; first come updates, and the last weight task."""
    blocks = [pipe.blocks[b] for b in reversed(_order(pipe))]
    return _Chain(
        [b.duration_s for b in blocks],
        [b.occupies_s for b in blocks[1:]] + [0.0],
        [b.latency_s for b in blocks[1:]] + [0.0],
        [pipe.updates_s[lane] for lane in pipe.lane_of],
        [b.duration_s for b in pipe.blocks[2 * pipe.num_stages :]],
        True,
    )


def _order(pipe: Pipe) -> list[int]:
    stages = pipe.num_stages
    return [*range(stages), *range(2 * stages - 1, stages - 1, -1)]


class _Heads:
    """`start_s[k][i]`: the i-th task of the chain's place k starts no earlier; `sent_s`: likewise
    its transfer."""

    def __init__(self, chain: _Chain, m: int, rooms: list[_Room]) -> None:
        self.chain, self.rooms = chain, rooms
        self.places = len(chain.durations_s)
        self.start_s: list[list[float]] = [[] for _ in range(self.places)]
        self.sent_s: list[list[float]] = [[] for _ in range(self.places)]
        for i in range(m):
            arrived_s = 0.0
            for place in range(self.places):
                up = place < self.places // 2
                start_s = max(arrived_s, self._up_s(place, i) if up else self._down_s(place, i))
                sent_s = start_s + chain.durations_s[place]
                if i:
                    sent_s = max(sent_s, self.sent_s[place][-1] + chain.occupies_s[place])
                self.start_s[place].append(start_s)
                self.sent_s[place].append(sent_s)
                arrived_s = sent_s + chain.occupies_s[place] + chain.latency_s[place]

    def _up_s(self, stage: int, i: int) -> float:
        """What comes before: i of its own, and what makes room for it."""
        room = self.rooms[stage]
        downs = i + 1 - int(room.held) if i >= room.held else 0
        if self.chain.weights_first:
            return self._lane_s(stage, i, downs, i + 1)
        weights = i - int(room.kept) if i > room.kept else 0
        return self._lane_s(stage, i, max(downs, weights), weights)

    def _down_s(self, place: int, i: int) -> float:
        weights = i + 1 if self.chain.weights_first else 0
        return self._lane_s(self.places - 1 - place, i + 1, i, weights)

    def _lane_s(self, stage: int, ups: int, downs: int, weights: int) -> float:
        """A lane that has done so many tasks of a stage, by their heads in order."""
        chain, down = self.chain, self.places - 1 - stage
        up_s, down_s = chain.durations_s[stage], chain.durations_s[down]
        weight_s, ready_s = chain.weights_s[stage], chain.ready_s[stage]
        jobs = [(s, up_s) for s in self.start_s[stage][:ups]]
        jobs += [(s, down_s) for s in self.start_s[down][:downs]]
        if chain.weights_first:
            jobs += [(ready_s, weight_s)] * weights
        else:
            jobs += [(s + down_s, weight_s) for s in self.start_s[down][:weights]]
        now_s = ready_s
        for head_s, duration_s in sorted(jobs):
            now_s = max(now_s, head_s) + duration_s
        return now_s


Job = tuple[float, float, float]
"""Head, duration, tail."""


class _Jobs:
    def __init__(self, pipe: Pipe, heads: _Heads, tails: _Heads) -> None:
        self.pipe, self.heads, self.tails = pipe, heads, tails
        self.m, self.places = pipe.num_microbatches, 2 * pipe.num_stages

    def of_lane(self, lane: int, has_weight: bool) -> list[Job]:
        pipe, m = self.pipe, self.m
        jobs = []
        for stage in range(pipe.num_stages):
            if pipe.lane_of[stage] != lane:
                continue
            down = self.places - 1 - stage
            for place in (stage, down):
                duration_s = self.heads.chain.durations_s[place]
                for i in range(m):
                    tail_s = self.tails.start_s[self.places - 1 - place][m - 1 - i]
                    jobs.append((self.heads.start_s[place][i], duration_s, tail_s))
            if has_weight:
                weight_s = pipe.blocks[2 * pipe.num_stages + stage].duration_s
                after_s = self.heads.chain.durations_s[down]
                for i in range(m):
                    tail_s = pipe.updates_s[lane] + (m - 1 - i) * weight_s
                    jobs.append((self.heads.start_s[down][i] + after_s, weight_s, tail_s))
        return jobs

    def of_wire(self, wire: int) -> list[Job]:
        jobs = []
        for place, index in enumerate(_order(self.pipe)):
            block = self.pipe.blocks[index]
            if wire in block.wires:
                for i in range(self.m):
                    # run backwards, the receiver's task sends over the same wire
                    mirror = self.places - 2 - place
                    tail_s = self.tails.sent_s[mirror][self.m - 1 - i] + block.latency_s
                    jobs.append((self.heads.sent_s[place][i], block.occupies_s, tail_s))
        return jobs


def one_machine_s(jobs: list[Job]) -> float:
    """The shortest preemptive schedule of jobs with heads and tails: largest tail first."""
    waiting: list[list[float]] = []
    now_s = end_s = 0.0
    arrivals = sorted(jobs)
    k = 0
    while k < len(arrivals) or waiting:
        if not waiting:
            now_s = max(now_s, arrivals[k][0])
        while k < len(arrivals) and arrivals[k][0] <= now_s:
            heapq.heappush(waiting, [-arrivals[k][2], arrivals[k][1]])
            k += 1
        job = waiting[0]
        until_s = now_s + job[1]
        if k < len(arrivals) and arrivals[k][0] < until_s:
            job[1] -= arrivals[k][0] - now_s
            now_s = arrivals[k][0]
        else:
            now_s = until_s
            end_s = max(end_s, now_s - job[0])
            heapq.heappop(waiting)
    return end_s
