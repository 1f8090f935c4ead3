"""Zero-bubble schedules: weight gradients are tasks of their own that fill the bubbles.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024) and "Pipeline Parallelism with
Controllable Memory" (NeurIPS 2024). With equal F, B and W of T seconds on p lanes and free
transfers the step takes, beyond its M microbatches,

    1f1b    3 (p - 1) T
    zb-h1     (p - 1) T    microbatches held as by 1f1b: at most p on every lane
    zb-h2     (p - 1) T    no bubble between a lane's first and last task; at most 2 p - 1 held
    zb-v      (p - 1) T    lane i runs stages i and 2 p - 1 - i: every lane holds 2 p halves

The bounds are stated, and the order under them comes from list scheduling with the costs of the
pipeline (unit costs unless given): of a few rankings the one that ends first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from hetpass.errors import ScheduleError
from hetpass.ir.quantities import counted
from hetpass.ir.schedule import Schedule, peaks
from hetpass.schedules.costs import PipelineCosts, StageCost
from hetpass.schedules.greedy import Listed, Ranks, Room, list_orders
from hetpass.schedules.pipe import lanes_of, prepare


@dataclass(frozen=True)
class ZeroBubble:
    """One stage per lane.

    Attributes:
      name: "zb-h1" or "zb-h2".
      delta: N_i - N_{i+1} for microbatches in flight (F to B), with 1 on the last stage; as many
        as stage 0 may have in flight may be held (F to W) on every stage.
      costs: what the order is made for.
    """

    name: str = "zb-h1"
    delta: int = 1
    costs: PipelineCosts | None = None

    def counts(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """Microbatches in flight per stage."""
        return tuple(
            min(1 + self.delta * (num_stages - 1 - stage), num_microbatches)
            for stage in range(num_stages)
        )

    def make(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The schedule of S stages, one per lane, and M microbatches."""
        counts = self.counts(num_stages, num_microbatches)
        ones = (1.0,) * num_stages
        room = Room(counts, (float(counts[0]),) * num_stages, ones, ones)
        lane_of = tuple(range(num_stages))
        listed = best_listed(
            self.costs, lane_of, num_microbatches, (room,), _rankings(one_stage_per_lane=True)
        )
        lanes = lanes_of(listed.orders, lane_of, num_microbatches)
        return Schedule(self.name, num_stages, num_microbatches, lanes, counts)


@dataclass(frozen=True)
class ZeroBubbleV:
    """Two stages per lane in the shape of a V: lane i has stages i and S - 1 - i.

    Attributes:
      costs: what the order is made for.
    """

    name: str = "zb-v"
    costs: PipelineCosts | None = None

    def counts(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """Microbatches in flight per stage: a lane holds at most S of its two stages together."""
        return (min(num_stages, num_microbatches),) * num_stages

    def make(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The schedule of S stages on S / 2 lanes, and M microbatches.

        Raises:
          ScheduleError: HP-SCHEDULE-SIZES for an odd number of stages.
        """
        lane_of = v_shape(num_stages)
        ones = (1.0,) * num_stages
        counts = self.counts(num_stages, num_microbatches)
        limits = (float(num_stages),) * (num_stages // 2)
        rooms = [Room(counts, limits, ones, ones, reserves) for reserves in (False, True)]
        listed = best_listed(
            self.costs, lane_of, num_microbatches, rooms, _rankings(one_stage_per_lane=False)
        )
        lanes = lanes_of(listed.orders, lane_of, num_microbatches)
        in_flight = peaks(lanes, num_stages, last="B")
        return Schedule(self.name, num_stages, num_microbatches, lanes, in_flight)


def v_shape(num_stages: int) -> tuple[int, ...]:
    """Per stage, its lane.

    Raises:
      ScheduleError: HP-SCHEDULE-SIZES for an odd number of stages.
    """
    if num_stages % 2:
        raise ScheduleError(
            "HP-SCHEDULE-SIZES",
            "a V needs an even number of stages, two per lane",
            details=(f"{counted(num_stages, 'stage')}",),
            ways_out=(f"cut the layers into {counted(num_stages + 1, 'stage')}", 'use "zb-h1"'),
        )
    half = num_stages // 2
    return (*range(half), *reversed(range(half)))


def best_listed(
    costs: PipelineCosts | None,
    lane_of: tuple[int, ...],
    num_microbatches: int,
    rooms: Iterable[Room],
    rankings: Iterable[Ranks],
) -> Listed:
    """The orders that end first, over rooms and rankings; unit costs if there are none."""
    costs = costs or PipelineCosts.equal(len(lane_of), StageCost(1.0, 1.0, 1.0))
    pipe = prepare(costs, lane_of, num_microbatches, has_weight=True)
    found = (list_orders(pipe, room, ranks) for room, ranks in product(rooms, tuple(rankings)))
    return min((f for f in found if f is not None), key=lambda f: f.makespan_s)


def _rankings(one_stage_per_lane: bool) -> tuple[Ranks, ...]:
    early = (True,) if one_stage_per_lane else (False, True)
    return tuple(
        Ranks(kinds, early_backwards=e, patience=patience)
        for kinds, e, patience in product(("FBW", "BFW"), early, (0.0, 0.5, 1.0))
    )
