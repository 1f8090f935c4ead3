"""Why nothing fits: need and have per group, and the least change that would fit. No JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hetpass.cost.analytic import peak_rate
from hetpass.cost.tables import CostTables
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster
from hetpass.ir.devices import DeviceGroup
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.quantities import counted, spelled
from hetpass.planner.inter_op import InterOpOptions, suffix_program
from hetpass.planner.objective import Pick

_MOST_FACTOR = 2.0**20
_PRECISION = 1.005
_MOST_HOSTS_ADDED = 8

TablesOf = Callable[[Cluster, int], CostTables]
"""The costs on a cluster, for a number of microbatches."""


def nothing_fits(
    facts: ProgramFacts,
    cluster: Cluster,
    tables_of: TablesOf,
    numbers: Sequence[int],
    options: InterOpOptions = InterOpOptions(),
) -> PlanError:
    """The error for a search that found nothing.

    Args:
      tables_of: costs of clusters that differ from `cluster` in sizes.
      numbers: of microbatches that were tried; divisors of the batch.
      options: that the program was solved with.
    """
    if not numbers:
        return _no_number(facts)
    lacking = _lacking(facts, cluster)
    if lacking is not None:
        return lacking
    m = max(numbers)  # the smallest microbatches need the least memory
    tables = tables_of(cluster, m)
    found = _least_factor(tables, options)
    if found is None:
        return PlanError(
            "HP-PLAN-NOTHING",
            "no stages on this cluster can run the program, whatever the memory",
            details=[
                f"{counted(facts.num_layers, 'layer')}, {counted(m, 'microbatch')}",
                str(cluster),
            ],
            ways_out=["add links between groups, or devices that can compute every layer"],
        )
    factor, picks = found
    return PlanError(
        "HP-PLAN-MEMORY",
        "the program does not fit into the memory of the cluster",
        details=[
            *_needs(tables, picks),
            f"with {counted(m, 'microbatch')}, the smallest pieces that were tried",
        ],
        ways_out=[
            f"the least change of memory: {math.ceil(factor * 100) / 100:.2f} times as much on "
            "every device",
            *_devices(cluster, tables_of, m, options),
            "recompute activations, keep less optimizer state, or cut the model smaller",
        ],
    )


def _no_number(facts: ProgramFacts) -> PlanError:
    legal = [m for m in range(1, facts.batch_size + 1) if facts.batch_size % m == 0]
    return PlanError(
        "HP-PLAN-MICROBATCHES",
        f"a batch of {facts.batch_size} has none of the numbers of microbatches as a divisor",
        ways_out=[f"legal numbers: {', '.join(map(str, legal[:20]))}"],
    )


def _lacking(facts: ProgramFacts, cluster: Cluster) -> PlanError | None:
    """A number format that no group has."""
    for layer in facts.layers:
        for dtype in sorted(layer.dtypes):
            if layer.seconds or any(peak_rate(g.kind, dtype) > 0 for g in cluster.groups):
                continue
            return PlanError(
                "HP-PLAN-DTYPE",
                f"no device group can compute in {dtype}, which a layer {layer.kind!r} needs",
                details=[
                    f"{name}: {', '.join(kind.peak_flops)}" for name, kind in cluster.kinds.items()
                ],
                ways_out=["add a group whose kind has a peak rate for it", "change the format"],
            )
    return None


def _any_that_fits(
    tables: CostTables, factor: float, options: InterOpOptions
) -> tuple[Pick, ...] | None:
    groups = tuple(replace(g, memory_bytes=g.memory_bytes * factor) for g in tables.groups)
    larger = replace(tables, groups=groups)
    return suffix_program(larger, options).solve(math.inf)


def _least_factor(
    tables: CostTables, options: InterOpOptions
) -> tuple[float, tuple[Pick, ...]] | None:
    """The smallest factor on all memory with which something fits, and what."""
    low, high = 1.0, 2.0
    picks = _any_that_fits(tables, high, options)
    while picks is None:
        low, high = high, 4 * high
        if high > _MOST_FACTOR:
            return None
        picks = _any_that_fits(tables, high, options)
    while high > low * _PRECISION:
        middle = math.sqrt(low * high)
        fitting = _any_that_fits(tables, middle, options)
        if fitting is None:
            low = middle
        else:
            high, picks = middle, fitting
    return high, picks


def _needs(tables: CostTables, picks: Sequence[Pick]) -> list[str]:
    """Per group, of the pipeline that would fit first: the fullest stage, and what there is."""
    lines = []
    for index, room in enumerate(tables.groups):
        needs = []
        for place, pick in enumerate(picks):
            table, at = tables.stages[pick.table], (pick.first, pick.end)
            if table.group == index:
                count = min(tables.num_microbatches, len(picks) - place)
                needs.append(float(table.fixed_bytes[at] + count * table.activation_bytes[at]))
        need = f"needs {spelled(max(needs), 'bytes', 4)}" if needs else "would stay idle"
        has = spelled(room.memory_bytes, "bytes", 4)
        lines.append(f"{room.name}: {need} on each device, has {has}")
    least = [float(np.min(_alone(tables, layer))) for layer in range(tables.num_layers)]
    largest = int(np.argmax(least))
    needed = spelled(least[largest], "bytes", 4)
    lines.append(f"the largest layer, {largest}, needs {needed} at the least")
    return lines


def _alone(tables: CostTables, layer: int) -> list[float]:
    return [
        float(t.fixed_bytes[layer, layer + 1] + t.activation_bytes[layer, layer + 1])
        for t in tables.stages
    ]


def _devices(cluster: Cluster, tables_of: TablesOf, m: int, options: InterOpOptions) -> list[str]:
    """The fewest devices that one group would need more, group by group."""
    lines = []
    for group in cluster.groups:
        for added in range(1, _MOST_HOSTS_ADDED + 1):
            grown = _grown(group, added)
            groups = tuple(grown if g.name == group.name else g for g in cluster.groups)
            larger = Cluster(groups, cluster.links, cluster.default_link)
            if _any_that_fits(tables_of(larger, m), 1.0, options) is not None:
                lines.append(
                    f"or {counted(grown.num_devices, 'device')} in {group.name!r} instead of "
                    f"{group.num_devices}"
                )
                break
    return lines


def _grown(group: DeviceGroup, added: int) -> DeviceGroup:
    """More hosts; of a group of one host that says no link between hosts, a larger host."""
    if group.inter_host is not None:
        return replace(group, hosts=group.hosts + added)
    link = group.intra_host or group.kind.link
    if link is None:
        return group
    return replace(group, devices_per_host=group.devices_per_host + added, intra_host=link)
