"""Logical meshes over some devices of a group, and the links along their axes. No JAX.

Devices are numbered host by host and fill a mesh row by row, so that the last axis runs over
neighbours. An axis that leaves a host runs on the network, which the rings of one host share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from hetpass.ir.devices import DeviceGroup, Link
from hetpass.ir.operation_graph import Mesh

AXES = ("data", "model")


@dataclass(frozen=True)
class LinkedMesh:
    """A logical mesh and what the group's compiler does on it.

    Attributes:
      axes: (name, size) pairs.
      links: per axis, between two neighbours along it.
      reduce_scatter: the compiler forms reduce-scatters; else they are all-reduces and slices.
      merges_reductions: the compiler merges a sum of all-reduces into an all-reduce of the sum.
    """

    axes: Mesh
    links: tuple[Link, ...]
    reduce_scatter: bool = True
    merges_reductions: bool = False

    def __post_init__(self) -> None:
        if len(self.links) != len(self.axes):
            raise ValueError(f"{len(self.axes)} axes need as many links, not {len(self.links)}")
        if len({name for name, _ in self.axes}) != len(self.axes):
            raise ValueError(f"axes need different names: {self.axes}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def devices(self) -> int:
        return prod(size for _, size in self.axes)

    def ways(self, names: Iterable[str]) -> int:
        """Devices along some axes together."""
        sizes = dict(self.axes)
        return prod(sizes[name] for name in names)

    def link(self, names: Iterable[str]) -> Link:
        """What a collective over some axes together is held up by."""
        chosen = [
            link for name, link in zip(self.names, self.links, strict=True) if name in set(names)
        ]
        return Link(max(k.latency_s for k in chosen), min(k.bandwidth for k in chosen))


def logical_meshes(group: DeviceGroup, devices: int) -> tuple[LinkedMesh, ...]:
    """Every mesh of one or two axes over `devices` devices of a group.

    Of two meshes that differ only in the order of their axes one is left out where all links are
    equal. The one of one axis comes first.
    """
    splits = [(devices,)] + [
        (outer, devices // outer) for outer in range(2, devices) if devices % outer == 0
    ]
    found: dict[object, LinkedMesh] = {}
    for sizes in splits:
        mesh = _linked(group, sizes)
        key = frozenset((size, link) for (_, size), link in zip(mesh.axes, mesh.links, strict=True))
        found.setdefault((len(sizes), key), mesh)
    return tuple(found.values())


def _linked(group: DeviceGroup, sizes: tuple[int, ...]) -> LinkedMesh:
    links = tuple(_axis_link(group, size, prod(sizes[k + 1 :])) for k, size in enumerate(sizes))
    return LinkedMesh(
        tuple(zip(AXES, sizes, strict=False)),
        links,
        reduce_scatter="reduce_scatter" in group.kind.capabilities,
        merges_reductions="merges_reductions" in group.kind.capabilities,
    )


def _axis_link(group: DeviceGroup, size: int, stride: int) -> Link:
    link = group.link_among(size * stride)
    if link is None:  # one device: nothing is ever sent
        return Link(0.0, float("1e30"))
    if size * stride <= group.devices_per_host:
        return link
    rings = min(stride, group.devices_per_host)
    return Link(link.latency_s, link.bandwidth / rings)
