"""Clusters by name, as published with other planners. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, Link

_IN_HOST = Link(10e-6, 25e9)
_NEAR = Link(20e-6, 12.5e9)


def harp(v100: int, a100: int, far_a100: int = 0) -> Cluster:
    """V100 in hosts of four, A100 in hosts of two, maybe more A100 in another place; 5 Gbps between
    groups (HARP, EuroSys 2026)."""
    groups = [_group("v100", "V100-16", v100, 4), _group("a100", "A100-40", a100, 2)]
    if far_a100:
        groups.append(_group("a100_far", "A100-40", far_a100, 2))
    return Cluster(tuple(groups), default_link=Link(0.5e-3, 0.625e9))


def mixed(**devices: int) -> Cluster:
    """Groups by kind and number of devices, in hosts of up to eight; 100 Gbps between all hosts."""
    groups = tuple(
        _group(name, name.replace("_", "-"), count, 8) for name, count in devices.items()
    )
    return Cluster(groups, default_link=Link(0.2e-3, 12.5e9))


def _group(name: str, kind: str, count: int, per_host: int) -> DeviceGroup:
    per_host = min(count, per_host)
    return DeviceGroup(name, find_kind(kind), count // per_host, per_host, _IN_HOST, _NEAR)


CLUSTERS: Mapping[str, Callable[[], Cluster]] = MappingProxyType(
    {
        "harp-2-1": lambda: harp(2, 1),
        "harp-8-4": lambda: harp(8, 4),
        "harp-8-2-2": lambda: harp(8, 2, 2),
        "two-groups": lambda: mixed(A100_40=8, V100_32=8),
        "three-groups": lambda: mixed(A100_40=8, V100_32=8, T4=8),
        "four-groups": lambda: mixed(H100_80=16, A100_40=32, V100_32=64, RTX_3090=8),
    }
)
"""By name; each is made when asked for."""
