"""Inference: forwards alone."""

from __future__ import annotations

from dataclasses import dataclass

from hetpass.ir.schedule import Schedule
from hetpass.schedules.costs import PipelineCosts, StageCost
from hetpass.schedules.greedy import Ranks, Room, list_orders
from hetpass.schedules.pipe import lanes_of, prepare


@dataclass(frozen=True)
class ForwardOnly:
    """Every stage runs the microbatches in order, as early as they come.

    Attributes:
      lane_of: per stage, its lane; None: one stage per lane.
    """

    name: str = "inference"
    lane_of: tuple[int, ...] | None = None

    def counts(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """Microbatches in flight per stage: the one that runs."""
        return (1,) * num_stages

    def make(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The schedule of S stages and M microbatches."""
        lane_of = self.lane_of or tuple(range(num_stages))
        costs = PipelineCosts.equal(num_stages, StageCost(1.0, 0.0))
        pipe = prepare(costs, lane_of, num_microbatches, has_weight=False)
        no_bound = (num_microbatches,) * num_stages
        zeros = (0.0,) * num_stages
        listed = list_orders(pipe, Room(no_bound, zeros, zeros, zeros), Ranks("F"), kinds=1)
        if listed is None:  # nothing bounds it
            raise AssertionError("forwards alone do not end")
        lanes = lanes_of(listed.orders, lane_of, num_microbatches)
        counts = self.counts(num_stages, num_microbatches)
        return Schedule(self.name, num_stages, num_microbatches, lanes, counts)
