"""Lower bounds of a step's seconds that no order of tasks can pass."""

from __future__ import annotations

import math

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
    """The largest of three kinds of bounds.

    * A lane: the earliest start of its first task, all its tasks, and what must follow its last
      backward task (the backwards of the stages before, to the end of the step).
    * A wire: the earliest start of its first transfer, all its transfers, and what must follow.
    * Room: a lane of one stage that has room for N microbatches starts microbatch j + N only once
      one of the first j has come back from the stages after it.

    `limits_bytes` are per lane, as in `planner.adaptive`.
    """
    pipe = prepare(costs, lane_of, num_microbatches, has_weight)
    path = _Path(pipe)
    bounds = [path.lane_s(lane) for lane in range(max(lane_of) + 1)]
    bounds += [path.wire_s(wire) for wire in range(len(pipe.wires))]
    if limits_bytes is not None:
        bounds += [
            path.room_s(stage, _fits(costs, stage, limits_bytes[lane]))
            for stage, lane in enumerate(lane_of)
            if lane_of.count(lane) == 1
        ]
    return max(bounds)


def _fits(costs: PipelineCosts, stage: int, limit_bytes: float) -> float:
    cost = costs.stages[stage]
    free_bytes = limit_bytes - cost.fixed_bytes
    return free_bytes // cost.activation_bytes if cost.activation_bytes else math.inf


class _Path:
    """The chain of one microbatch: every F up, every B down, with its transfers."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        stages = pipe.num_stages
        chain = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
        self.start_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        now_s = 0.0
        for block in chain:
            facts = pipe.blocks[block]
            self.start_s[block] = now_s
            now_s += facts.duration_s
            self.end_s[block] = now_s
            now_s += facts.occupies_s + facts.latency_s
        self.total_s = now_s
        # after the last B of the first stage: its W and its update
        first = pipe.blocks[2 * stages].duration_s + pipe.updates_s[pipe.lane_of[0]]
        self.after_s = {block: self.total_s - self.end_s[block] + first for block in chain}

    def lane_s(self, lane: int) -> float:
        pipe, stages = self.pipe, self.pipe.num_stages
        own = [stage for stage in range(stages) if pipe.lane_of[stage] == lane]
        m = pipe.num_microbatches
        chained = math.fsum(pipe.blocks[b].duration_s for s in own for b in (s, stages + s))
        weights = math.fsum(pipe.blocks[2 * stages + s].duration_s for s in own)
        head_s = self.start_s[own[0]]
        tail_s = self.after_s[stages + own[0]]
        last = m * weights + pipe.updates_s[lane]
        return head_s + m * chained + max(tail_s, last)

    def wire_s(self, wire: int) -> float:
        pipe, m = self.pipe, self.pipe.num_microbatches
        users = [i for i, b in enumerate(pipe.blocks[: 2 * pipe.num_stages]) if wire in b.wires]
        carried_s = m * math.fsum(pipe.blocks[i].occupies_s for i in users)
        tails = [self.after_s[i] - pipe.blocks[i].occupies_s for i in users]
        return min(self.end_s[i] for i in users) + carried_s + min(tails)

    def room_s(self, stage: int, fits: float) -> float:
        back = self.pipe.num_stages + stage
        round_s = self.end_s[back] - self.start_s[stage]
        if fits < 1:
            return math.inf
        rounds = 1 if math.isinf(fits) else -(-self.pipe.num_microbatches // int(fits))
        return self.start_s[stage] + rounds * round_s + self.after_s[back]
