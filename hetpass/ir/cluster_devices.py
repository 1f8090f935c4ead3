"""Between device groups and JAX devices. No JAX: a device is anything with `platform`,
`device_kind` and `process_index`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hetpass.ir.catalogue import catalogue, find_kind
from hetpass.ir.devices import READER, DeviceGroup
from hetpass.ir.frozen import Frozen
from hetpass.ir.quantities import counted
from hetpass.ir.records import nearest, shown


def kind_name(device: Any) -> str:
    """The catalogue's name for a device's kind, or what the device says of itself."""
    # Every CPU is the one kind "cpu", whatever its device_kind says.
    if device.platform == "cpu":
        return "cpu"
    return catalogue().jax_names.get(device.device_kind, device.device_kind)


def _checked(devices: Any) -> Sequence[Any]:
    """Devices, refused by name if they are something else."""
    listed = isinstance(devices, Sequence) and not isinstance(devices, str)
    other = [d for d in devices if not hasattr(d, "device_kind")] if listed else [devices]
    if other:
        READER.refuse("TYPE", f"a list of devices is needed, not {shown(other[0])}", "devices",
                      ways_out=["jax.devices()", "a list of some of them"])  # fmt: skip
    found: Sequence[Any] = devices
    return found


def groups_of(devices: Sequence[Any]) -> tuple[DeviceGroup, ...]:
    """Groups of equal devices on equal hosts, in the order in which the devices come.

    Hosts of one kind that hold different numbers of devices become different groups.

    Raises:
      ClusterError: HP-CLUSTER-DEVICES, there are none; HP-CLUSTER-KIND, a kind that the catalogue
        does not hold.
    """
    if not devices or not _checked(devices):
        READER.refuse("DEVICES", "there are no devices to make a cluster of", "devices",
                      ways_out=["jax.devices()"])  # fmt: skip
    per_host = Counter((kind_name(device), device.process_index) for device in devices)
    hosts = Counter((kind, count) for (kind, _), count in per_host.items())
    taken: Counter[str] = Counter()
    groups = []
    for (kind, count), num_hosts in hosts.items():
        if kind not in catalogue().kinds:
            READER.refuse(
                "KIND",
                f"the catalogue does not hold the device kind {shown(kind)}",
                "devices",
                ways_out=[
                    "describe the cluster in a file, with this kind under 'kinds'",
                    *nearest(kind, catalogue().jax_names),
                ],
            )
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", kind)
        taken[name] += 1
        unique = name if taken[name] == 1 else f"{name}-{taken[name]}"
        groups.append(found_group(unique, kind, num_hosts, count))
    return tuple(groups)


def found_group(name: str, kind: str, hosts: int, devices_per_host: int) -> DeviceGroup:
    """A group of devices that were found, by the catalogue's name of their kind."""
    return DeviceGroup(
        name=name,
        kind=find_kind(kind),
        hosts=hosts,
        devices_per_host=devices_per_host,
        inter_host=catalogue().network if hosts > 1 else None,
    )


def bind(groups: Sequence[DeviceGroup], devices: Sequence[Any]) -> Mapping[str, tuple[Any, ...]]:
    """See `Cluster.bind`."""
    pools: dict[str, list[Any]] = {}
    for device in _checked(devices):
        pools.setdefault(kind_name(device), []).append(device)
    bound: dict[str, tuple[Any, ...]] = {}
    for group in groups:
        kind = group.kind.name if len(pools) > 1 else next(iter(pools), group.kind.name)
        pool = pools.get(kind, [])
        if len(pool) < group.num_devices:
            _refuse_too_few(groups, group, kind, len(devices), len(pool))
        bound[group.name] = _taken(pool, group)
    return Frozen(bound)


def _taken(pool: list[Any], group: DeviceGroup) -> tuple[Any, ...]:
    """Takes a group's devices out of the pool, host by host where the hosts fit the group."""
    sizes = Counter(device.process_index for device in pool)
    fitting = [host for host, size in sizes.items() if size == group.devices_per_host]
    if len(fitting) >= group.hosts:
        chosen = [d for host in fitting[: group.hosts] for d in pool if d.process_index == host]
    else:
        chosen = pool[: group.num_devices]
    pool[:] = [device for device in pool if all(device is not other for other in chosen)]
    return tuple(chosen)


def _refuse_too_few(
    groups: Sequence[DeviceGroup], group: DeviceGroup, kind: str, given: int, left: int
) -> None:
    needed = sum(g.num_devices for g in groups)
    ways = ["make the group smaller, or leave a group out"]
    if kind == "cpu":
        ways.append(
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax starts"
        )
    READER.refuse(
        "DEVICES",
        f"the group {group.name!r} needs {counted(group.num_devices, 'device')}, {left} are left",
        f"groups[{list(groups).index(group)}]",
        details=[
            f"the cluster needs {counted(needed, 'device')} in all, {given} were given",
            f"looked for devices of kind {kind!r}",
        ],
        ways_out=ways,
    )
