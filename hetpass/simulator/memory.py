"""Bytes that lanes hold: a lane runs one task at a time, so the order alone decides the peak."""

from __future__ import annotations

from hetpass.schedules.costs import PipelineCosts
from hetpass.schedules.pipe import Orders


def changes_bytes(costs: PipelineCosts, has_weight: bool, has_backward: bool) -> list[float]:
    """Per block of tasks, what its end adds to the lane; F adds at its start.

    A backward task frees the activations of its microbatch, except for what W reads where weight
    gradients are tasks of their own. Without backward tasks F frees at its end what it took.
    """
    stages = costs.stages
    take = [s.activation_bytes for s in stages]
    keep = [s.weight_bytes if has_weight else 0.0 for s in stages]
    if not has_backward:
        return [0.0] * (3 * len(stages))
    return take + [k - t for t, k in zip(take, keep, strict=True)] + [-k for k in keep]


def peak_bytes(
    costs: PipelineCosts, lane_of: tuple[int, ...], orders: Orders, num_microbatches: int
) -> tuple[float, ...]:
    """Per lane, the most bytes held at any time, with what its stages hold all the time."""
    stages = len(costs.stages)
    blocks = {number // num_microbatches for order in orders for number in order}
    has_backward = any(stages <= block < 2 * stages for block in blocks)
    has_weight = any(block >= 2 * stages for block in blocks)
    changes = changes_bytes(costs, has_weight, has_backward)
    result = []
    for lane, order in enumerate(orders):
        fixed = sum(s.fixed_bytes for i, s in enumerate(costs.stages) if lane_of[i] == lane)
        now = most = 0.0
        for number in order:
            block = number // num_microbatches
            now += changes[block]
            most = max(most, now if has_backward else costs.stages[block].activation_bytes)
        result.append(fixed + most)
    return tuple(result)
