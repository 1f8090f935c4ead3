"""Random inter-op problems, and their optimum by enumeration."""

from __future__ import annotations

import math

import numpy as np

from hetpass.cost.tables import CostTables, GroupRoom, StageTable


def random_tables(chance):
    """Up to 8 layers, 3 groups and 6 devices; random costs, links and memory, some infinite."""
    num_layers = int(chance.integers(1, 9))
    num_groups = int(chance.integers(1, 4))
    devices = [1] * num_groups
    for _ in range(int(chance.integers(0, 7 - num_groups))):
        devices[int(chance.integers(num_groups))] += 1
    microbatches = int(chance.choice([1, 2, 4, 8, 16]))
    stages = []
    for group, count in enumerate(devices):
        speed = chance.uniform(0.3, 2.0)
        for size in range(1, count + 1):
            if size > 1 and chance.random() < 0.2:
                continue
            for recompute in ("none", "full")[: int(chance.integers(1, 3))]:
                stages.append(
                    random_stage(chance, num_layers, group, size, speed * size**0.8, recompute)
                )
    shape = (num_groups, num_groups, num_layers + 1)
    scale = chance.choice([0.0, 0.02, 0.1, 0.5])
    forward = scale * chance.uniform(0, 1, shape)
    backward = scale * chance.uniform(0, 1, shape)
    forward[chance.random(shape) < 0.1] = np.inf
    latency = scale * chance.uniform(0, 0.1, shape[:2])
    memory = chance.choice([3.0, 6.0, 15.0, 1000.0])
    rooms = tuple(
        GroupRoom(f"g{g}", count, memory * chance.uniform(0.5, 1.5))
        for g, count in enumerate(devices)
    )
    return CostTables(num_layers, microbatches, rooms, tuple(stages), forward, backward, latency)


def random_stage(chance, num_layers, group, size, speed, recompute):
    first = np.arange(num_layers)[:, None]
    end = np.arange(num_layers + 1)[None, :]
    length = np.maximum(end - first, 0)

    def ranges(least, most, per_layer=True):
        values = chance.uniform(least, most, length.shape) * (length if per_layer else 1)
        return np.where(length > 0, values, np.inf)

    slower = 1.3 if recompute == "full" else 1.0
    leaner = 0.4 if recompute == "full" else 1.0
    forward = ranges(0.2, 0.6) / speed
    forward[chance.random(length.shape) < 0.1] = np.inf
    return StageTable(
        group=group,
        devices=size,
        mesh=(("data", size),),
        recompute=recompute,
        forward_s=forward,
        backward_s=slower * ranges(0.4, 1.2) / speed,
        once_s=ranges(0.0, chance.choice([0.01, 1.0]), per_layer=False),
        fixed_bytes=ranges(0.1, 0.8),
        activation_bytes=leaner * ranges(0.0, 1.0) / size,
    )


def least_step_s(tables, *, below_s=math.inf, runs=False, least=1, most=None):
    """The least T over every cut, every choice of stages and every in-flight count.

    From the last stage to the first; a partial pipeline is left when it is no better than the best
    whole one, since neither part of T ever falls; nor is one that is not below `below_s` followed.
    `runs`: every group takes one run of stages. `least`, `most`: of in-flight counts' steps.
    """
    m = tables.num_microbatches
    best = below_s

    def extend(end, left, behind, in_flight, fill, load):
        nonlocal best
        if fill + load >= best:
            return
        if end == 0:
            best = fill + load
            return
        for table in tables.stages:
            group = table.group
            if left[group] < table.devices:
                continue
            used = left[group] < tables.groups[group].devices
            if runs and used and group != behind[-1][0]:
                continue
            rest = [*left]
            rest[group] -= table.devices
            for first in range(end):
                time = table.forward_s[first, end] + table.backward_s[first, end]
                if not math.isfinite(time):
                    continue
                once = (m - 1) * time + table.once_s[first, end]
                options = [(1, 0.0, 0.0)]
                if behind:
                    options = waits(group, end, behind[-1][1], behind[-1][0], in_flight)
                for count, round_s, wait in options:
                    held = (
                        table.fixed_bytes[first, end] + count * table.activation_bytes[first, end]
                    )
                    if held > tables.groups[group].memory_bytes:
                        break  # more in flight need more still
                    stages = [*behind, (group, time)]
                    extend(first, rest, stages, count, fill + time + round_s, max(load, once, wait))
                    if wait <= max(load, once):
                        break  # waiting binds no more: more in flight cannot help

    def waits(group, boundary, time_behind, group_behind, in_flight):
        there = tables.link_forward_s[group, group_behind, boundary]
        back = tables.link_backward_s[group, group_behind, boundary]
        if not math.isfinite(there + back):
            return
        round_s = there + back + 2 * tables.link_latency_s[group, group_behind]
        link = (m - 1) * max(there, back)
        for delta in range(least, (most or m) + 1):
            count = min(m, in_flight + delta)
            waiting = 0.0 if count == m else (m - 1) * (round_s + time_behind) / delta
            yield count, round_s, max(link, waiting)
            if count == m:
                return

    extend(tables.num_layers, [g.devices for g in tables.groups], [], 0, 0.0, 0.0)
    return best if best < below_s else math.inf
