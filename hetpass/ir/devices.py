"""Device kinds, links and device groups: what a cluster is made of. No JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetpass.errors import ClusterError
from hetpass.ir.frozen import Frozen
from hetpass.ir.quantities import counted, spelled
from hetpass.ir.records import Reader, at, nearest, place, shown

READER = Reader(ClusterError, "HP-CLUSTER")

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")
"""The number formats that a peak rate can be given for. "tf32" is float32 data multiplied on
matrix units with 10 bits of mantissa, JAX's default precision where a device has it."""

CAPABILITIES = ("reduce_scatter", "merges_reductions")
"""What the compiler for a kind does: forms reduce-scatters; merges sums of all-reduces."""

MAX_DEVICES = 1_000_000
_GROUP_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def _check_number(value: object, where: str, unit: str, *, zero_allowed: bool = False) -> None:
    with at(where):
        number = READER.number(value)
        if number < 0 or (number == 0 and not zero_allowed):
            least = "zero or more" if zero_allowed else "above zero"
            READER.refuse(
                "VALUE",
                f"a number {least} is needed, not {shown(value)}",
                ways_out=[f"give {unit} as a number {least}"],
            )


def _check_count(value: object, where: str) -> None:
    with at(where):
        number = READER.integer(value)
        if not 1 <= number <= MAX_DEVICES:
            READER.refuse(
                "VALUE",
                f"a count from 1 to {MAX_DEVICES} is needed, not {shown(value)}",
                ways_out=["leave the group out if it has no devices"] if number == 0 else (),
            )


@dataclass(frozen=True)
class Link:
    """What carries bytes between two devices, one direction.

    A message of n bytes takes `latency_s + n / bandwidth`: `Link(10e-6, 25e9).seconds(25e6)` is
    0.00101.

    Attributes:
      latency_s: of a message of no bytes, in seconds; zero or more.
      bandwidth: bytes per second; above zero.
    """

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_number(self.latency_s, "latency", "seconds", zero_allowed=True)
        _check_number(self.bandwidth, "bandwidth", "bytes per second")
        object.__setattr__(self, "latency_s", float(self.latency_s))
        object.__setattr__(self, "bandwidth", float(self.bandwidth))

    def seconds(self, size_bytes: float) -> float:
        """Seconds that one message of `size_bytes` takes."""
        return self.latency_s + size_bytes / self.bandwidth

    def __str__(self) -> str:
        return f"{spelled(self.bandwidth, 'bandwidth')}, {spelled(self.latency_s, 'time')}"


@dataclass(frozen=True)
class DeviceKind:
    """One model of accelerator (or processor).

    Attributes:
      name: "A100-40".
      peak_flops: FLOP/s by number format (`DTYPES`), dense. A format that is missing is one that
        the kind lacks: nothing of that type is planned there.
      memory_bytes: of one device.
      memory_bandwidth: bytes per second.
      capabilities: of the compiler for this kind (`CAPABILITIES`).
      link: between two devices of one host, where nothing else is said.
      source: where the numbers are from.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    capabilities: frozenset[str] = frozenset()
    link: Link | None = None
    source: str = ""

    def __post_init__(self) -> None:
        with at("name"):
            name = READER.text(self.name)
            if not (0 < len(name) <= 100 and name.isprintable() and name == name.strip()):
                READER.refuse("NAME", f"{shown(name)} cannot name a device kind")
        _check_number(self.memory_bytes, "memory", "bytes")
        _check_number(self.memory_bandwidth, "memory_bandwidth", "bytes per second")
        with at("peak_flops"):
            rates = READER.mapping(self.peak_flops)
            if not rates:
                READER.refuse(
                    "VALUE",
                    f"the kind {self.name!r} has no peak rate",
                    ways_out=['give at least one, such as float32 = "15.7 TFLOP/s"'],
                )
            for dtype, rate in rates.items():
                if dtype not in DTYPES:
                    READER.refuse(
                        "DTYPE",
                        f"{shown(dtype)} is no number format that a rate can be given for",
                        place(str(dtype)),
                        ways_out=nearest(dtype, DTYPES),
                    )
                _check_number(rate, dtype, "FLOP/s")
        if self.link is not None and not isinstance(self.link, Link):
            READER.refuse("TYPE", f"a Link is needed, not {shown(self.link)}", "link")
        with at("source"):
            READER.text(self.source)
        with at("capabilities"):
            if not isinstance(self.capabilities, (frozenset, set, list, tuple, str)):
                READER.refuse("TYPE", f"a set of names is needed, not {shown(self.capabilities)}")
            for capability in self.capabilities:
                if capability not in CAPABILITIES:
                    READER.refuse(
                        "CAPABILITY",
                        f"{shown(capability)} is not a known capability",
                        ways_out=nearest(capability, CAPABILITIES),
                    )
        ordered = {d: float(rates[d]) for d in DTYPES if d in rates}
        object.__setattr__(self, "peak_flops", Frozen(ordered))
        object.__setattr__(self, "memory_bytes", int(self.memory_bytes))
        object.__setattr__(self, "memory_bandwidth", float(self.memory_bandwidth))
        object.__setattr__(self, "capabilities", frozenset(self.capabilities))

    @property
    def best_flops(self) -> float:
        """The highest rate among the formats a model trains in, FLOP/s: for rough shares only."""
        training = [rate for dtype, rate in self.peak_flops.items() if dtype not in ("int8",)]
        return max(training or self.peak_flops.values())

    def __str__(self) -> str:
        rates = ", ".join(f"{d} {spelled(r, 'flops')}" for d, r in self.peak_flops.items())
        memory = spelled(self.memory_bytes, "bytes")
        bandwidth = spelled(self.memory_bandwidth, "bandwidth")
        return f"{self.name}: {memory} at {bandwidth}; {rates}"


@dataclass(frozen=True)
class DeviceGroup:
    """Equal devices on equal hosts: the widest set that one collective may span.

    Attributes:
      name: letters, digits, `_`, `.`, `-`; what plans call the group.
      kind: of every device.
      hosts, devices_per_host: devices are numbered host by host.
      intra_host: between two devices of one host; None: the kind's own link.
      inter_host: between devices of different hosts; needed if there are several.
    """

    name: str
    kind: DeviceKind
    hosts: int
    devices_per_host: int
    intra_host: Link | None = None
    inter_host: Link | None = None

    def __post_init__(self) -> None:
        with at("name"):
            if not _GROUP_NAME.fullmatch(READER.text(self.name)):
                READER.refuse(
                    "NAME",
                    f"{shown(self.name)} cannot name a device group",
                    ways_out=["use letters, digits, '_', '.', '-', a letter first, 64 at most"],
                )
        if not isinstance(self.kind, DeviceKind):
            READER.refuse("TYPE", f"a DeviceKind is needed, not {shown(self.kind)}", "kind")
        _check_count(self.hosts, "hosts")
        _check_count(self.devices_per_host, "devices_per_host")
        if self.hosts * self.devices_per_host > MAX_DEVICES:
            READER.refuse(
                "VALUE",
                f"the group {self.name!r} has more than {MAX_DEVICES} devices",
                "devices_per_host",
                details=[
                    f"{counted(self.hosts, 'host')} x {counted(self.devices_per_host, 'device')}"
                ],
            )
        object.__setattr__(self, "hosts", int(self.hosts))
        object.__setattr__(self, "devices_per_host", int(self.devices_per_host))
        if self.intra_host is None:
            object.__setattr__(self, "intra_host", self.kind.link)
        for key in ("intra_host", "inter_host"):
            link = getattr(self, key)
            if link is not None and not isinstance(link, Link):
                READER.refuse("TYPE", f"a Link is needed, not {shown(link)}", key)
        self._check_links()

    def _check_links(self) -> None:
        for key, wanted, count in (
            ("intra_host", self.devices_per_host > 1, f"{self.devices_per_host} devices per host"),
            ("inter_host", self.hosts > 1, f"{self.hosts} hosts"),
        ):
            if wanted and getattr(self, key) is None:
                READER.refuse(
                    "LINK",
                    f"the group {self.name!r} has {count} and no {key} link",
                    key,
                    ways_out=[f'{key} = {{ latency = "10 us", bandwidth = "25 GB/s" }}'],
                )

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    def link_among(self, devices: int) -> Link | None:
        """The slowest link that a collective over the first `devices` devices uses."""
        return self.inter_host if devices > self.devices_per_host else self.intra_host

    def __str__(self) -> str:
        hosts = f"{self.hosts} x {self.devices_per_host}" if self.hosts > 1 else self.num_devices
        inside = f"; inside {self.intra_host}" if self.intra_host else ""
        across = f"; across hosts {self.inter_host}" if self.inter_host else ""
        return f"{self.name}: {hosts} {self.kind.name}{inside}{across}"
