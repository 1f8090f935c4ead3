"""The plan for someone who asked for none: each device group is one stage. No JAX.

Every group, in the order of the cluster, takes a contiguous run of layers with all its devices on
one data axis, or stays idle. Layers are shared out so that the slowest stage is as fast as it can
be at peak rates. Links, memory and the order of groups are not looked at: a search does that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster, DeviceKind
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan

Floats = NDArray[np.float64]


def default_plan(
    cluster: Cluster,
    layer_flops: Sequence[float],
    num_microbatches: int,
    *,
    microbatch_size: int,
    dtype: str = "float32",
    schedule: str = "1f1b",
) -> Plan:
    """One stage per group, or fewer; the bottleneck is minimal among such plans.

    Args:
      cluster: whose groups take stages in their order.
      layer_flops: per layer, forward and backward, per microbatch.
      num_microbatches: M.
      microbatch_size: examples in a microbatch, B / M. A group uses as many of its devices as
        the largest divisor of this allows; the rest stay idle.
      dtype: the number format that decides a kind's rate; a group that lacks it stays idle.
      schedule: named in the plan.

    Raises:
      PlanError: HP-PLAN-DTYPE, no group can compute in `dtype`; HP-PLAN-LAYERS, no layers.
    """
    if not layer_flops:
        raise PlanError("HP-PLAN-LAYERS", "the program has no layers to plan")
    stages = []
    usable = []
    for group in cluster.groups:
        rate = peak_rate(group.kind, dtype)
        if rate > 0:
            devices = _largest_divisor(microbatch_size, group.num_devices)
            usable.append((group.name, devices, devices * rate))
    if not usable:
        raise PlanError(
            "HP-PLAN-DTYPE",
            f"no device group can compute in {dtype}",
            details=[
                f"{name}: {', '.join(kind.peak_flops)}" for name, kind in cluster.kinds.items()
            ],
            ways_out=["add a group whose kind has a peak rate for it"],
        )
    runs = share_layers(layer_flops, [speed for _, _, speed in usable])
    for (name, devices, _), (first, end) in zip(usable, runs, strict=True):
        if first < end:
            replica = Replica(name, tuple(range(devices)), (("data", devices),))
            stages.append(StagePlan(first, end - 1, (replica,)))
    return Plan((Pipeline(tuple(stages), num_microbatches),), schedule)


def share_layers(
    layer_flops: Sequence[float], speeds: Sequence[float]
) -> tuple[tuple[int, int], ...]:
    """Cuts layers into one run (first, end) per speed, in order; an empty run is an idle group.

    The largest of flops / speed over the runs is minimal, and among those their sum is. With six
    equal layers and speeds 2 and 1 the runs are (0, 4) and (4, 6).

    Two dynamic programs over (groups used, layers covered): O(groups · layers²).
    """
    before = np.concatenate([[0.0], np.cumsum(np.asarray(layer_flops, dtype=np.float64))])
    seconds = [(before[None, :] - before[:, None]) / speed for speed in speeds]
    bottleneck = _tables(seconds, np.maximum, np.inf)[-1][-1]
    tables = _tables(seconds, np.add, bottleneck)
    return _runs(seconds, tables, bottleneck)


def _tables(seconds: Sequence[Floats], combine: np.ufunc, limit: float) -> list[Floats]:
    """Entry [g][k]: the best `combine` over the first g groups covering the first k layers."""
    num_layers = len(seconds[0]) - 1
    first = np.full(num_layers + 1, np.inf)
    first[0] = 0.0
    tables = [first]
    for costs in seconds:
        previous = tables[-1]
        table = previous.copy()  # the group stays idle
        for k in range(1, num_layers + 1):
            run = costs[:k, k]
            ways = combine(previous[:k], run)
            ways[run > limit] = np.inf
            table[k] = min(table[k], ways.min())
        tables.append(table)
    return tables


def _runs(
    seconds: Sequence[Floats], tables: Sequence[Floats], limit: float
) -> tuple[tuple[int, int], ...]:
    """Reads the runs back from the tables of sums."""
    end = len(seconds[0]) - 1
    runs = []
    for group in range(len(seconds), 0, -1):
        costs, previous = seconds[group - 1][:end, end], tables[group - 1]
        if tables[group][end] == previous[end]:
            first = end
        else:
            ways = np.where(costs > limit, np.inf, previous[:end] + costs)
            first = int(ways.argmin())
        runs.append((first, end))
        end = first
    return tuple(reversed(runs))


def peak_rate(kind: DeviceKind, dtype: str) -> float:
    """FLOP/s of one device; 0 where the kind lacks the format."""
    rate = kind.peak_flops.get(dtype, 0.0)
    # JAX multiplies float32 on matrix units at its default precision where they take it.
    return max(rate, kind.peak_flops.get("tf32", 0.0)) if dtype == "float32" else rate


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)
