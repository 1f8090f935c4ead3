"""Commands on what is known of devices: `devices`, `cluster show`. No JAX."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from hetpass.ir.catalogue import catalogue, find_kind
from hetpass.ir.device_records import kind_data
from hetpass.ir.devices import DeviceKind, Link
from hetpass.ir.quantities import counted, spelled
from hetpass.tools.answer import Answer, Command, Table
from hetpass.tools.sorts import CLUSTER
from hetpass.tools.terminal import Terminal


def devices(arguments: Namespace, terminal: Terminal) -> Answer:
    """The catalogue, or some kinds of it in full."""
    del terminal
    known = catalogue().kinds
    if arguments.kind:
        kinds = [find_kind(name) for name in arguments.kind]
        return Answer([_in_full(kind) for kind in kinds], {k.name: kind_data(k) for k in kinds})
    rows = tuple(
        (
            kind.name,
            spelled(kind.memory_bytes, "bytes"),
            spelled(kind.memory_bandwidth, "bandwidth"),
            *(_rate(kind, dtype) for dtype in ("float32", "tf32", "bfloat16", "float16")),
            _link(kind.link),
        )
        for kind in known.values()
    )
    head = ("kind", "memory", "bandwidth", "float32", "tf32", "bfloat16", "float16",
            "link in a host")  # fmt: skip
    return Answer(
        [
            Table(head, rows),
            "bandwidth: of the memory; rates: dense, at peak; hetpass devices KIND: with sources",
        ],
        {name: kind_data(kind) for name, kind in known.items()},
    )


def _rate(kind: DeviceKind, dtype: str) -> str:
    rate = kind.peak_flops.get(dtype)
    return "" if rate is None else spelled(rate, "flops")


def _link(link: Link | None) -> str:
    return "" if link is None else spelled(link.bandwidth, "bandwidth")


def _in_full(kind: DeviceKind) -> str:
    lines = [str(kind)]
    if kind.link:
        lines.append(f"  between devices of a host: {kind.link}")
    if kind.capabilities:
        lines.append(f"  its compiler: {', '.join(sorted(kind.capabilities))}")
    return "\n".join([*lines, f"  source: {kind.source}"])


def cluster_show(arguments: Namespace, terminal: Terminal) -> Answer:
    """A cluster file as it was understood."""
    del terminal
    cluster = CLUSTER.load(arguments.file)
    groups = tuple(
        (
            g.name,
            f"{g.hosts} x {g.devices_per_host}" if g.hosts > 1 else str(g.num_devices),
            g.kind.name,
            spelled(g.kind.memory_bytes, "bytes"),
            spelled(_best_rate(g.kind), "flops"),
            str(g.intra_host or ""),
            str(g.inter_host or ""),
        )
        for g in cluster.groups
    )
    head = ("group", "devices", "kind", "memory", "best rate", "inside a host", "between hosts")
    links = tuple((f"{a} - {b}", str(link)) for (a, b), link in cluster.links.items())
    if cluster.default_link:
        links += (("other pairs", str(cluster.default_link)),)
    total = sum(_best_rate(g.kind) * g.num_devices for g in cluster.groups)
    parts: list[Any] = [
        f"{arguments.file}: {counted(cluster.num_devices, 'device')} in "
        f"{counted(len(cluster.groups), 'group')}, "
        f"{spelled(total, 'flops')} in all",
        Table(head, groups),
    ]
    if links:
        parts.append(Table(("between groups", "link"), links))
    return Answer(parts, cluster.to_dict())


def _best_rate(kind: DeviceKind) -> float:
    """Among the formats that models usually train in."""
    usual = [kind.peak_flops.get(d, 0.0) for d in ("float32", "tf32", "bfloat16", "float16")]
    return max(*usual) or kind.best_flops


def _declare_devices(parser: ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", nargs="*", help="these in full, with sources")


def _declare_cluster_show(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a cluster file, .toml or .json")


COMMANDS = (
    Command("devices", "the catalogue of device kinds", _declare_devices, devices),
    Command("cluster show", "a cluster file as understood", _declare_cluster_show, cluster_show),
)
