"""Seconds of messages between hosts and inside them: measured, or from links. No JAX.

A pipeline's transfer is one stream between two hosts. A stream alone attains what one pair of
devices does; several at once share what the host attains altogether.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Protocol

from hetpass.errors import FactsError
from hetpass.ir.cluster import Cluster, DeviceGroup
from hetpass.ir.records import Reader, at

READER = Reader(FactsError, "HP-NETWORK")

_MB, _GB = 1e6, 1e9


class Network(Protocol):
    """Seconds of messages. Hosts of one group are alike."""

    def inside_s(self, group: DeviceGroup, size_bytes: float) -> float:
        """From one device to another of the same host."""

    def stream_s(
        self, one: DeviceGroup, other: DeviceGroup, size_bytes: float, streams: int
    ) -> float:
        """From a host of one group to a host of the other, where a host has so many streams."""

    def ring_rate(
        self, one: DeviceGroup, other: DeviceGroup, size_bytes: float, devices: int
    ) -> float:
        """Bytes per second between two hosts, of so many rings side by side, one a device."""

    def inside_rate(self, group: DeviceGroup, devices: int, size_bytes: float) -> float:
        """Bytes per second in a ring of so many devices of one host."""


@dataclass(frozen=True)
class LinkNetwork:
    """What a cluster's links say: latency and bandwidth, the bandwidth shared by streams."""

    cluster: Cluster

    def inside_s(self, group: DeviceGroup, size_bytes: float) -> float:
        link = group.intra_host
        return link.seconds(size_bytes) if link is not None else 0.0

    def stream_s(
        self, one: DeviceGroup, other: DeviceGroup, size_bytes: float, streams: int
    ) -> float:
        link = one.inter_host if one.name == other.name else self.cluster.link(one.name, other.name)
        return math.inf if link is None else link.latency_s + size_bytes * streams / link.bandwidth

    def ring_rate(
        self, one: DeviceGroup, other: DeviceGroup, size_bytes: float, devices: int
    ) -> float:
        seconds = self.stream_s(one, other, size_bytes, 1)
        return size_bytes / seconds if seconds else math.inf

    def inside_rate(self, group: DeviceGroup, devices: int, size_bytes: float) -> float:
        seconds = self.inside_s(group, size_bytes)
        return size_bytes / seconds if seconds else math.inf


@dataclass(frozen=True)
class Curve:
    """Bandwidth by message size: bytes, and bytes per second; linear in the logarithm between."""

    sizes_bytes: tuple[float, ...]
    rates: tuple[float, ...]

    def rate(self, size_bytes: float) -> float:
        """Bytes per second; beyond the ends the ends hold."""
        sizes, rates = self.sizes_bytes, self.rates
        if size_bytes <= sizes[0]:
            return rates[0]
        for index in range(1, len(sizes)):
            if size_bytes <= sizes[index]:
                low, high = math.log(sizes[index - 1]), math.log(sizes[index])
                share = (math.log(size_bytes) - low) / (high - low)
                return rates[index - 1] + share * (rates[index] - rates[index - 1])
        return rates[-1]


End = tuple[str, int]
"""A device kind, and how many devices of a host take part."""


@dataclass(frozen=True)
class MeasuredNetwork:
    """Bandwidths that were measured, by device kind.

    Two rules fill what was not measured, and overrule what cannot be: a pair of devices alone gets
    at least its share of what several pairs get together; and several pairs together get at least
    what fewer get.

    Attributes:
      inside: by kind and how many devices of a host.
      between: by two ends.
    """

    inside: Mapping[End, Curve]
    between: Mapping[tuple[End, End], Curve]

    @classmethod
    def read(cls, path: str | Path) -> MeasuredNetwork:
        """From a JSON file: `sizes_MB`, `inside_node` ("V100-16 x2": GB/s by size) and
        `between_nodes_one_zone` ("V100-16 x2 - A100-40 x4": …); a last field beyond the sizes is
        not read.

        Raises:
          FactsError: HP-NETWORK-…, with the path of the value that is wrong.
        """
        data = READER.load(path, (".json",))
        with at(f"{path}:"):
            record = READER.record(
                data,
                required=("sizes_MB", "inside_node", "between_nodes_one_zone"),
                optional=("unit",),
            )
            sizes = tuple(size * _MB for size in READER.items(record["sizes_MB"], READER.number))

            def curve(row: object) -> Curve:
                rates = READER.items(row, READER.number)
                if len(rates) < len(sizes) or min(rates) <= 0:
                    READER.refuse("VALUE", f"{len(sizes)} bandwidths above zero are needed")
                return Curve(sizes, tuple(rate * _GB for rate in rates[: len(sizes)]))

            inside = READER.values(record["inside_node"], curve)
            between = READER.values(record["between_nodes_one_zone"], curve)
        return cls(
            {_end(name): found for name, found in inside.items()},
            {_ends(name): found for name, found in between.items()},
        )

    def inside_s(self, group: DeviceGroup, size_bytes: float) -> float:
        return size_bytes / self.inside_rate(group, 2, size_bytes)

    def inside_rate(self, group: DeviceGroup, devices: int, size_bytes: float) -> float:
        counts = [n for kind, n in self.inside if kind == group.kind.name]
        if not counts:
            _unknown(group.kind.name, "inside a host")
        near = min(counts, key=lambda n: (abs(n - devices), n))
        return self.inside[group.kind.name, near].rate(size_bytes)

    def stream_s(
        self, one: DeviceGroup, other: DeviceGroup, size_bytes: float, streams: int
    ) -> float:
        known = self._rates(one, other, size_bytes)
        alone = max(rate / count for count, rate in known)
        together = max(rate for _, rate in known)
        return size_bytes / min(alone, together / streams)

    def ring_rate(
        self, one: DeviceGroup, other: DeviceGroup, size_bytes: float, devices: int
    ) -> float:
        known = self._rates(one, other, size_bytes)
        return max(rate * min(1.0, devices / count) for count, rate in known)

    def _rates(
        self, one: DeviceGroup, other: DeviceGroup, size_bytes: float
    ) -> Sequence[tuple[int, float]]:
        """Pairs of devices, and what they get together; the slower of both directions."""
        curves = self._by_kinds.get(frozenset((one.kind.name, other.kind.name)))
        if curves is None:
            _unknown(f"{one.kind.name} and {other.kind.name}", "between hosts")
        return [(count, min(c.rate(size_bytes) for c in found)) for count, found in curves.items()]

    @cached_property
    def _by_kinds(self) -> Mapping[frozenset[str], Mapping[int, Sequence[Curve]]]:
        """By the kinds at the ends, then by how many devices of each host; both directions."""
        found: dict[frozenset[str], dict[int, list[Curve]]] = {}
        for ((kind, count), (other, same)), curve in self.between.items():
            if count == same:
                by_count = found.setdefault(frozenset((kind, other)), {})
                by_count.setdefault(count, []).append(curve)
        return found


def _unknown(names: str, where: str) -> NoReturn:
    READER.refuse(
        "KIND",
        f"no bandwidth was measured for {names} {where}",
        ways_out=["plan with a cluster's links instead"],
    )


def _end(text: str) -> End:
    kind, _, count = text.strip().rpartition(" x")
    if not kind or not count.isdigit():
        READER.refuse("VALUE", f"{text!r} names no device kind and count, as 'V100-16 x2' does")
    return kind, int(count)


def _ends(text: str) -> tuple[End, End]:
    one, _, other = text.partition(" - ")
    return _end(one), _end(other)
