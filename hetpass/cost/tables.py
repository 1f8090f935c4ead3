"""Costs of every range of layers on every submesh: all that the inter-op program sees. No JAX.

The analytic model fills the tables here; whatever knows better (an intra-op program, a measured
profile) fills the same tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.analytic import Assumptions, Submesh, layer_seconds
from hetpass.cost.collectives import all_gather_s
from hetpass.cost.profiled import profiled_bytes, profiled_seconds
from hetpass.cost.range_bytes import RangeBytes, over_ranges, range_bytes
from hetpass.cost.submeshes import submesh_sizes, submeshes
from hetpass.ir.cluster import Cluster
from hetpass.ir.devices import DeviceGroup
from hetpass.ir.facts import ProgramFacts

Floats = NDArray[np.float64]

_PARTS_UP_TO = 64


@dataclass(frozen=True)
class GroupRoom:
    """What a group has to give.

    Attributes:
      name: in plans.
      devices: how many.
      memory_bytes: that a stage may use on each.
    """

    name: str
    devices: int
    memory_bytes: float


@dataclass(frozen=True, eq=False)
class StageTable:
    """One way to run stages on `devices` devices of a group, for every range of layers.

    The arrays have shape [L, L + 1]; entry [first, end] is of the layers first … end - 1, infinite
    where the range is empty or cannot run so.

    Attributes:
      group: index into `CostTables.groups`.
      devices: how many the stage takes.
      mesh: (axis, size) pairs, as a plan has them.
      recompute: "none" or "full".
      forward_s, backward_s: per microbatch.
      once_s: gradient sync and update, once per step.
      fixed_bytes: on each device, all the time.
      activation_bytes: on each device, per microbatch in flight.
    """

    group: int
    devices: int
    mesh: tuple[tuple[str, int], ...]
    recompute: str
    forward_s: Floats
    backward_s: Floats
    once_s: Floats
    fixed_bytes: Floats
    activation_bytes: Floats


@dataclass(frozen=True, eq=False)
class CostTables:
    """The inter-op problem for one number of microbatches.

    Attributes:
      num_layers, num_microbatches: L and M.
      groups: G of them.
      stages: the ways to run a stage.
      link_forward_s, link_backward_s: shape [G, G, L + 1]; entry [p, g, k] is for how long an
        activation (its gradient) that crosses in front of layer k occupies the link from group p
        to group g; infinite where there is no link.
      link_latency_s: shape [G, G].
    """

    num_layers: int
    num_microbatches: int
    groups: tuple[GroupRoom, ...]
    stages: tuple[StageTable, ...]
    link_forward_s: Floats
    link_backward_s: Floats
    link_latency_s: Floats


@dataclass(frozen=True)
class TableOptions:
    """What is tabulated.

    Attributes:
      assumed: shares of peak figures.
      recompute: the ways to recompute that stages may use.
      whole_hosts: stages take no parts of hosts, where a group has several hosts; None: in
        clusters of more than 64 devices, whose states would be too many.
      most_model: the largest tensor parallelism.
    """

    assumed: Assumptions = field(default_factory=Assumptions)
    recompute: tuple[str, ...] = ("none", "full")
    whole_hosts: bool | None = None
    most_model: int = 8


def cost_tables(
    facts: ProgramFacts,
    cluster: Cluster,
    num_microbatches: int,
    options: TableOptions = TableOptions(),
) -> CostTables:
    """Analytic costs of a program on a cluster, cut into M microbatches.

    `num_microbatches` must divide the batch.
    """
    examples = facts.batch_size // num_microbatches
    cluster = canonical(cluster)
    whole_hosts = options.whole_hosts
    if whole_hosts is None:
        whole_hosts = cluster.num_devices > _PARTS_UP_TO
    most_model = min(options.most_model, max(x.most_tensor_parallel for x in facts.layers))
    stages = [
        table
        for index, group in enumerate(cluster.groups)
        for devices in submesh_sizes(group, whole_hosts=whole_hosts)
        for submesh in submeshes(group, devices, examples, most_model)
        for table in _stage_tables(
            facts, cluster, index, (submesh, num_microbatches, options.recompute), options.assumed
        )
    ]
    forward, backward, latency = link_tables(facts, cluster, examples)
    return CostTables(
        num_layers=facts.num_layers,
        num_microbatches=num_microbatches,
        groups=group_rooms(cluster, options.assumed),
        stages=tuple(stages),
        link_forward_s=forward,
        link_backward_s=backward,
        link_latency_s=latency,
    )


def stage_table(
    facts: ProgramFacts,
    cluster: Cluster,
    group_index: int,
    submesh: Submesh,
    num_microbatches: int,
    recompute: str,
    assumed: Assumptions,
) -> StageTable:
    """Every range of layers on one submesh."""
    way = submesh, num_microbatches, (recompute,)
    return _stage_tables(facts, cluster, group_index, way, assumed)[0]


def _stage_tables(
    facts: ProgramFacts,
    cluster: Cluster,
    group_index: int,
    way: tuple[Submesh, int, tuple[str, ...]],
    assumed: Assumptions,
) -> list[StageTable]:
    """A table for every way to recompute: they share their seconds.

    Args:
      way: submesh, number of microbatches, ways to recompute.
    """
    submesh, num_microbatches, recomputed = way
    group = cluster.groups[group_index]
    examples = facts.batch_size // num_microbatches
    seconds = _seconds(facts, group, submesh, examples, assumed)
    forward, backward, once = (over_ranges(part) for part in seconds)
    arrives, comes_back = arrival_tables(facts, group, submesh, examples)
    tables = []
    for recompute in recomputed:
        held = _bytes(facts, group, submesh, examples, recompute)
        again = forward if recompute == "full" else 0.0
        tables.append(
            StageTable(
                group=group_index,
                devices=submesh.devices,
                mesh=submesh.axes,
                recompute=recompute,
                forward_s=forward + arrives[:, None] + assumed.launch_s,
                backward_s=backward + again + comes_back[None, :] + assumed.launch_s,
                once_s=once,
                fixed_bytes=held.fixed,
                activation_bytes=held.per_microbatch,
            )
        )
    return tables


def _seconds(
    facts: ProgramFacts,
    group: DeviceGroup,
    submesh: Submesh,
    examples: float,
    assumed: Assumptions,
) -> tuple[Floats, Floats, Floats]:
    """Per layer: forward and backward, and once per step; layers that are alike are priced once."""
    profile = facts.profile
    if profile is not None and group.kind.name in profile.seconds:
        layers, order = profiled_seconds(profile, group, submesh, examples), None
    else:
        kinds, order = facts.distinct
        layers = [layer_seconds(x, group, submesh, examples, assumed) for x in kinds]
    at = np.arange(facts.num_layers) if order is None else np.asarray(order)
    return (
        np.array([s.forward for s in layers])[at],
        np.array([s.backward for s in layers])[at],
        np.array([s.sync + s.update for s in layers])[at],
    )


def _bytes(
    facts: ProgramFacts, group: DeviceGroup, submesh: Submesh, examples: float, recompute: str
) -> RangeBytes:
    profile = facts.profile
    if profile is not None and group.kind.name in profile.seconds:
        return profiled_bytes(profile, submesh, examples, recompute)
    kinds, order = facts.distinct
    return range_bytes(kinds, submesh, examples, recompute, facts.shared, order)


def arrival_tables(
    facts: ProgramFacts, group: DeviceGroup, submesh: Submesh, examples: float
) -> tuple[Floats, Floats]:
    """Seconds in which a stage's devices hand each other what came over the link in parts.

    A value crosses the link once, whatever number of devices wants it; the devices of a row, which
    all want it, then gather it inside the group (Zhuang et al., MLSys 2023).

    Returns:
      In front of each layer an activation [L], and behind each range of layers that ends there a
      gradient [L + 1].
    """
    share, link = examples / submesh.data, group.link_among(submesh.model)
    kinds, order = facts.distinct
    at = np.asarray(order[:-1], dtype=np.int64)

    def gathered(sizes: Sequence[float]) -> Floats:
        seconds: Floats = np.array([all_gather_s(size, submesh.model, link) for size in sizes])
        return seconds[at]

    there = gathered([layer.boundary_bytes.of(share) for layer in kinds])
    back = gathered([layer.gradient_boundary_bytes.of(share) for layer in kinds])
    return np.concatenate([[0.0], there]), np.concatenate([[0.0], back, [0.0]])


def link_tables(
    facts: ProgramFacts, cluster: Cluster, examples: float
) -> tuple[Floats, Floats, Floats]:
    """Occupation forward and backward [G, G, L + 1], and latency [G, G], all in seconds."""
    there = np.array([0.0] + [layer.boundary_bytes.of(examples) for layer in facts.layers])
    back = np.array([0.0] + [layer.gradient_boundary_bytes.of(examples) for layer in facts.layers])
    there[-1] = back[-1] = 0.0  # nothing follows the last layer
    count = len(cluster.groups)
    slowness = np.full((count, count), np.inf)
    latency = np.full((count, count), np.inf)
    for p, one in enumerate(cluster.groups):
        for g, other in enumerate(cluster.groups):
            link = cluster.link(one.name, other.name)
            if link is not None:
                slowness[p, g], latency[p, g] = 1 / link.bandwidth, link.latency_s
    with np.errstate(invalid="ignore"):
        forward, backward = slowness[:, :, None] * there, slowness[:, :, None] * back
    forward[np.isnan(forward)] = backward[np.isnan(backward)] = np.inf
    return forward, backward, latency


def group_rooms(cluster: Cluster, assumed: Assumptions) -> tuple[GroupRoom, ...]:
    """What each group has to give, in the order of the cluster."""
    return tuple(
        GroupRoom(
            group.name,
            group.num_devices,
            group.kind.memory_bytes * assumed.memory,
        )
        for group in cluster.groups
    )


def canonical(cluster: Cluster) -> Cluster:
    """The cluster with its groups in an order that neither their names nor their places decide.

    Ties in the program go to what comes first: so renaming or reordering groups changes no plan.
    """
    groups = sorted(cluster.groups, key=lambda group: _order_key(group, cluster))
    return Cluster(tuple(groups), cluster.links, cluster.default_link)


def _order_key(group: DeviceGroup, cluster: Cluster) -> str:
    others: Sequence[DeviceGroup] = [g for g in cluster.groups if g.name != group.name]
    ties = sorted(
        f"{cluster.link(group.name, o.name)!r} {o.kind} {o.hosts} {o.devices_per_host}"
        for o in others
    )
    own = f"{group.kind} {group.hosts} {group.devices_per_host}"
    return "\n".join([own, f"{group.intra_host!r} {group.inter_host!r}", *ties])
