"""A Cluster: device groups of unlike kinds, and the links between them. No JAX.

A cluster file, TOML or JSON with the same keys:

    [[groups]]
    name = "fast"
    kind = "A100-40"                  # from the catalogue, or from [kinds.NAME] in this file
    hosts = 1
    devices_per_host = 4              # intra_host: else the kind's own link

    [[groups]]
    name = "slow"
    kind = "V100-16"
    hosts = 2
    devices_per_host = 4
    intra_host = { latency = "10 us", bandwidth = "25 GB/s" }
    inter_host = { latency = "20 us", bandwidth = "100 Gbps" }

    [[links]]
    between = ["fast", "slow"]
    latency = "200 us"
    bandwidth = "5 Gbps"

    [default_link]                    # for pairs that [[links]] does not name; optional
    latency = "1 ms"
    bandwidth = "1 Gbps"

Numbers without a unit are in seconds, bytes, bytes per second and FLOP per second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from hetpass.errors import ExecutionError
from hetpass.ir.catalogue import catalogue, find_kind
from hetpass.ir.cluster_devices import bind, groups_of
from hetpass.ir.cluster_ray import groups_of_nodes
from hetpass.ir.device_records import kind_data, link_data, link_of, read_kind, read_link
from hetpass.ir.devices import READER, DeviceGroup, DeviceKind, Link
from hetpass.ir.frozen import Frozen
from hetpass.ir.quantities import counted
from hetpass.ir.records import at, nearest, place, shown
from hetpass.ir.toml_text import toml_text

__all__ = ["Cluster", "DeviceGroup", "DeviceKind", "Link"]

Pair = tuple[str, str]
_MAX_GROUPS = 1000


@dataclass(frozen=True)
class Cluster:
    """Device groups, and a link for every pair of them.

    `Cluster.emulated({"fast": 4, "slow": 2})` is two groups on six virtual CPU devices;
    `.link("fast", "slow")` is what a transfer between them costs.

    Attributes:
      groups: in the order in which devices are numbered and bound.
      links: by pair of group names, either order, each pair once; both directions are alike.
      default_link: for the pairs that `links` does not name; None: every pair must be named.

    Raises:
      ClusterError: HP-CLUSTER-…, with the path of the value that is wrong.
    """

    groups: tuple[DeviceGroup, ...]
    links: Mapping[Pair, Link] = field(default_factory=dict, hash=False)
    default_link: Link | None = None

    def __post_init__(self) -> None:
        with at("groups"):
            object.__setattr__(self, "groups", READER.items(self.groups, lambda group: group))
        self._check_groups()
        with at("links"):
            READER.pairs(self.links)
        if self.default_link is not None and not isinstance(self.default_link, Link):
            READER.refuse(
                "TYPE", f"a Link is needed, not {shown(self.default_link)}", "default_link"
            )
        by_pair: dict[Pair, Link] = {}
        for index, (pair, link) in enumerate(self.links.items()):
            with at(f"links[{index}]"):
                ordered = self._checked_pair(pair, link)
                if ordered in by_pair:
                    READER.refuse("DUPLICATE", f"the link {_pair_text(ordered)} stands twice")
                by_pair[ordered] = link
        ordered_links = {pair: by_pair[pair] for pair in self._pairs() if pair in by_pair}
        object.__setattr__(self, "links", Frozen(ordered_links))
        self._check_all_linked()

    def _check_groups(self) -> None:
        if not 1 <= len(self.groups) <= _MAX_GROUPS:
            READER.refuse("VALUE", f"1 to {_MAX_GROUPS} groups are needed", "groups")
        places: dict[str, int] = {}
        kinds: dict[str, DeviceKind] = {}
        for index, group in enumerate(self.groups):
            with at(f"groups[{index}]"):
                if not isinstance(group, DeviceGroup):
                    READER.refuse("TYPE", f"a DeviceGroup is needed, not {shown(group)}")
                if group.name in places:
                    READER.refuse(
                        "DUPLICATE",
                        f"the group name {group.name!r} is taken by groups[{places[group.name]}]",
                        "name",
                        ways_out=["give every group a name of its own"],
                    )
                if kinds.setdefault(group.kind.name, group.kind) != group.kind:
                    READER.refuse(
                        "DUPLICATE",
                        f"two different device kinds are called {group.kind.name!r}",
                        "kind",
                    )
            places[group.name] = index

    def _checked_pair(self, pair: Any, link: Any) -> Pair:
        """The pair in the order of the groups."""
        if not isinstance(link, Link):
            READER.refuse("TYPE", f"a Link is needed, not {shown(link)}")
        names = [group.name for group in self.groups]
        with at("between"):
            if not isinstance(pair, tuple) or len(pair) != 2 or pair[0] == pair[1]:
                READER.refuse("VALUE", "a link joins two different groups, each by its name")
            for name in pair:
                if name not in names:
                    READER.refuse(
                        "GROUP", f"there is no group {shown(name)}", ways_out=nearest(name, names)
                    )
        first, second = sorted(pair, key=names.index)
        return first, second

    def _pairs(self) -> list[Pair]:
        return list(combinations([group.name for group in self.groups], 2))

    def _check_all_linked(self) -> None:
        missing = [pair for pair in self._pairs() if pair not in self.links]
        if missing and self.default_link is None:
            READER.refuse(
                "LINK",
                f"there is no link {_pair_text(missing[0])}",
                "links",
                details=[f"{len(missing)} of {len(self._pairs())} pairs have none"],
                ways_out=[
                    f'add a link with between = ["{missing[0][0]}", "{missing[0][1]}"]',
                    "add a default_link, for all pairs that are not named",
                ],
            )

    # -- questions ----------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def kinds(self) -> Mapping[str, DeviceKind]:
        """The device kinds of the groups, by name."""
        return {group.kind.name: group.kind for group in self.groups}

    def group(self, name: str) -> DeviceGroup:
        """The group called `name`, or ClusterError HP-CLUSTER-GROUP."""
        for group in self.groups:
            if group.name == name:
                return group
        READER.refuse(
            "GROUP",
            f"there is no group {shown(name)}",
            ways_out=nearest(name, (group.name for group in self.groups)),
        )

    def link(self, first: str, second: str) -> Link | None:
        """What a transfer between two groups uses; inside one group its slowest link.

        None only for a group of one device with itself.
        """
        if first == second:
            group = self.group(first)
            return group.link_among(group.num_devices)
        one, other = self.group(first).name, self.group(second).name
        return self.links.get((one, other)) or self.links.get((other, one)) or self.default_link

    def __str__(self) -> str:
        groups = counted(len(self.groups), "group")
        head = f"cluster of {counted(self.num_devices, 'device')} in {groups}"
        lines = [head, *(f"  {group}" for group in self.groups)]
        lines += [f"  {a} - {b}: {link}" for (a, b), link in self.links.items()]
        if self.default_link:
            lines.append(f"  other pairs: {self.default_link}")
        return "\n".join(lines)

    # -- devices ------------------------------------------------------------------------------

    @classmethod
    def auto(cls, devices: Sequence[Any]) -> Cluster:
        """One group per device kind and host size among JAX devices (`jax.devices()`).

        Peak rates and the links inside a host come from the catalogue; hosts and groups are
        taken to be joined by the catalogue's network. Devices of one process count as one host.
        """
        return cls(groups_of(devices), default_link=catalogue().network)

    @classmethod
    def emulated(
        cls, sizes: Mapping[str, int], *, speeds: Mapping[str, float] | None = None
    ) -> Cluster:
        """Groups of CPU devices by name and size, to try plans on one machine.

        Args:
          sizes: devices per group, in order.
          speeds: a group's rates relative to the catalogue's `cpu`; 1.0 where nothing is said.
            They steer planning only: virtual devices all run at the machine's own speed.
        """
        for what, value in (("sizes", sizes), ("speeds", speeds or {})):
            with at(what):
                READER.mapping(value)
        cpu = find_kind("cpu")
        relative = dict(speeds or {})
        for name in relative:
            if name not in sizes:
                with at("speeds"):
                    READER.refuse(
                        "GROUP", f"there is no group {shown(name)}", ways_out=nearest(name, sizes)
                    )
        groups = []
        for name, size in sizes.items():
            with at(f"sizes[{name!r}]"):
                kind = _scaled(cpu, relative.get(name, 1.0))
                groups.append(DeviceGroup(name, kind, 1, size))
        return cls(tuple(groups), default_link=cpu.link)

    @classmethod
    def from_ray(cls, address: str = "auto") -> Cluster:
        """The accelerators of a Ray cluster that runs already, one group per kind and host size.

        Links between hosts and groups are the catalogue's network; write the cluster to a file to
        say more about them.

        Args:
          address: of the Ray cluster, unless this process is connected to one already.

        Raises:
          ExecutionError: HP-RUN-RAY, Ray is not installed.
          ClusterError: HP-CLUSTER-DEVICES or -KIND, nothing there that is known.
        """
        try:
            import ray
        except ImportError as error:
            raise ExecutionError(
                "HP-RUN-RAY", "Ray is not installed", ways_out=["pip install 'hetpass[ray]'"]
            ) from error
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)
        return cls(groups_of_nodes(ray.nodes()), default_link=catalogue().network)

    def bind(self, devices: Sequence[Any]) -> Mapping[str, tuple[Any, ...]]:
        """JAX devices for every group: disjoint, in order, of one device kind per group.

        Where the devices are of several kinds, each group takes those of its own kind. Where
        they are all of one kind, groups take them as they come, so that any cluster can be tried
        on virtual CPU devices.

        Raises:
          ClusterError: HP-CLUSTER-DEVICES, too few; with the numbers.
        """
        return bind(self.groups, devices)

    # -- files --------------------------------------------------------------------------------

    @classmethod
    def from_file(cls, path: str | Path) -> Cluster:
        """Reads a cluster from `.toml` or `.json`. Nothing in a file is ever executed."""
        data = READER.load(path)
        with at(f"{path}:"):
            return cls.from_dict(data)

    def to_file(self, path: str | Path) -> None:
        """Writes the cluster, complete with its device kinds; reads back equal."""
        file = READER.path(path)
        data = self.to_dict()
        if file.suffix.lower() == ".json":
            text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        elif file.suffix.lower() == ".toml":
            text = toml_text(data)
        else:
            READER.refuse(
                "FILE",
                f"the suffix {file.suffix!r} says no format that is written here",
                str(file),
                ways_out=["name the file .toml or .json"],
            )
        READER.write(file, text)

    @classmethod
    def from_dict(cls, data: Any) -> Cluster:
        """The cluster in plain data; see the head of this module for the keys."""
        fields = READER.record(
            data, required=("groups",), optional=("kinds", "links", "default_link")
        )
        own: dict[str, DeviceKind] = {}
        with at("kinds"):
            for name, record in READER.mapping(fields.get("kinds", {})).items():
                with at(place(name)):
                    own[name] = read_kind(name, record)
        with at("groups"):
            groups = READER.items(fields["groups"], lambda record: _read_group(record, own))
        with at("default_link"):
            default = read_link(fields["default_link"]) if "default_link" in fields else None
        with at("links"):
            pairs = READER.items(fields.get("links", []), _read_pair)
            links: dict[Pair, Link] = {}
            for index, (pair, link) in enumerate(pairs):
                if pair in links or (pair[1], pair[0]) in links:
                    READER.refuse(
                        "DUPLICATE", f"the link {_pair_text(pair)} stands twice", f"[{index}]"
                    )
                links[pair] = link
        return cls(groups, links, default)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` gives back equal. Kinds are written out in full, so that
        the file does not change its meaning with the catalogue."""
        data: dict[str, Any] = {
            "groups": [_group_data(group) for group in self.groups],
            "kinds": {name: kind_data(kind) for name, kind in self.kinds.items()},
        }
        if self.links:
            data["links"] = [
                {"between": list(pair), **link_data(link)} for pair, link in self.links.items()
            ]
        if self.default_link:
            data["default_link"] = link_data(self.default_link)
        return data


def _pair_text(pair: Pair) -> str:
    return f"between {pair[0]!r} and {pair[1]!r}"


def _scaled(kind: DeviceKind, speed: float) -> DeviceKind:
    """A kind that does everything `speed` times as fast."""
    with at("speeds"):
        factor = READER.number(speed)
        if not 1e-6 <= factor <= 1e6:
            READER.refuse("VALUE", f"a speed from 1e-6 to 1e6 is needed, not {shown(speed)}")
    if factor == 1.0:
        return kind
    return replace(
        kind,
        name=f"{kind.name} x{factor:g}",
        peak_flops={dtype: rate * factor for dtype, rate in kind.peak_flops.items()},
        memory_bandwidth=kind.memory_bandwidth * factor,
    )


def _read_group(record: Any, own: Mapping[str, DeviceKind]) -> DeviceGroup:
    fields = READER.record(
        record,
        required=("name", "kind", "devices_per_host"),
        optional=("hosts", "intra_host", "inter_host"),
    )
    with at("kind"):
        kind = find_kind(READER.text(fields["kind"]), own)
    links: dict[str, Link | None] = {"intra_host": None, "inter_host": None}
    for key in links:
        if key in fields:
            with at(key):
                links[key] = read_link(fields[key])
    return DeviceGroup(
        name=fields["name"],
        kind=kind,
        hosts=fields.get("hosts", 1),
        devices_per_host=fields["devices_per_host"],
        **links,
    )


def _group_data(group: DeviceGroup) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": group.name,
        "kind": group.kind.name,
        "hosts": group.hosts,
        "devices_per_host": group.devices_per_host,
    }
    if group.intra_host:
        data["intra_host"] = link_data(group.intra_host)
    if group.inter_host:
        data["inter_host"] = link_data(group.inter_host)
    return data


def _read_pair(record: Any) -> tuple[Pair, Link]:
    fields = READER.record(record, required=("between", "latency", "bandwidth"))
    with at("between"):
        names = READER.items(fields["between"], READER.text)
        if len(names) != 2:
            READER.refuse("VALUE", f"a link joins two groups, not {len(names)}")
    return (names[0], names[1]), link_of(fields)
