"""Seconds of operations from what they compute and move, by efficiency curves. No JAX.

A device reaches a share of its peak figures that depends on the sort of operation and on its size:

    seconds = overhead + larger of (FLOPs / (rate · share), bytes / (bandwidth · share))
    share   = best · size / (size + half)

`best` is the share that large operations reach, `half` the size at which half of that is reached:
FLOPs for rates, bytes for bandwidths. The curves are of a sort of operation, whatever the program;
`cost.fit_efficiency` finds them from measured seconds.

The host hands the operations out, in calls that take seconds of their own, while the device works
through what it has: a layer takes the longer of both, and somewhat more where they are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpass.ir.devices import DeviceKind
from hetpass.ir.frozen import Frozen

PRODUCTS = (
    "product",
    "product, backward",
    "batched product",
    "batched product, backward",
)
"""Matrix products with parameters, and products of activations for each head; those of gradients
are sorts of their own: they read operands across."""

SORTS = (*PRODUCTS, "memory")
"""The last: all that computes little for what it moves."""


@dataclass(frozen=True)
class Operation:
    """A kernel, or several alike.

    Attributes:
      sort: one of `SORTS`.
      flops: of one.
      size_bytes: that one reads and writes.
      count: how many.
    """

    sort: str
    flops: float
    size_bytes: float
    count: float = 1.0

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise ValueError(f"{self.sort!r} is no sort of operation: {', '.join(SORTS)}")


@dataclass(frozen=True)
class Curve:
    """The share of a peak figure by size: best · size / (size + half)."""

    best: float
    half: float

    def share(self, size: float) -> float:
        """Of an operation of this size, above zero."""
        return self.best * size / (size + self.half)


@dataclass(frozen=True)
class HostPace:
    """Seconds that a host takes to hand out work.

    Attributes:
      forward_s, backward_s: a call of a program's parts, in either direction.
      sum_s: a sum of activations over devices, beside its call.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    sum_s: float = 0.0


@dataclass(frozen=True)
class Efficiency:
    """What operations reach.

    Attributes:
      rate: per sort of product, of the peak rate, by FLOPs.
      bandwidth: per sort, of the memory bandwidth, by bytes.
      overhead_s: of each kernel, on the device.
      sums: sums of activations over devices take so many times what their bytes take on the link.
      message_s: that each further device adds to such a sum.
      bus_sums: as `sums`, where the devices of a host share a bus.
      host: of handing out.
    """

    rate: Mapping[str, Curve] = field(hash=False)
    bandwidth: Mapping[str, Curve] = field(hash=False)
    overhead_s: float
    sums: float
    message_s: float
    bus_sums: float = 1.0
    host: HostPace = HostPace()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", Frozen(self.rate))
        object.__setattr__(self, "bandwidth", Frozen(self.bandwidth))


@dataclass(frozen=True)
class Sums:
    """Sums of activations over the devices of a row.

    Attributes:
      count: how many.
      link_s: what all of them take on the link, by their bytes alone.
      messages: devices beyond the first, over all sums.
      bus: whether the link is a bus that a host's devices share.
    """

    count: int = 0
    link_s: float = 0.0
    messages: int = 0
    bus: bool = False


@dataclass(frozen=True)
class Work:
    """What a device does for a layer, in one direction.

    Attributes:
      operations: one after another.
      sums: of activations.
      calls: in which the host hands the work out.
      backward: the direction.
    """

    operations: tuple[Operation, ...]
    sums: Sums = Sums()
    calls: float = 0.0
    backward: bool = False


def product_rate(kind: DeviceKind, dtype: str) -> float:
    """FLOP/s of products in a format; 0 where the kind lacks it.

    "tf32" on a kind without it means float32, which JAX and others compute then.
    """
    known = kind.peak_flops
    return (
        known.get("tf32", known.get("float32", 0.0)) if dtype == "tf32" else known.get(dtype, 0.0)
    )


def operation_s(
    operation: Operation, kind: DeviceKind, efficiency: Efficiency, dtype: str
) -> float:
    """Seconds of an operation on one device; infinite where the kind lacks the number format."""
    moved = operation.size_bytes
    curve = efficiency.bandwidth[operation.sort]
    seconds = moved / (kind.memory_bandwidth * curve.share(moved)) if moved else 0.0
    if operation.flops:
        rate = product_rate(kind, dtype)
        rate *= efficiency.rate[operation.sort].share(operation.flops)
        seconds = max(seconds, operation.flops / rate if rate else math.inf)
    return operation.count * (seconds + efficiency.overhead_s)


def work_s(work: Work, kind: DeviceKind, efficiency: Efficiency, dtype: str) -> float:
    """Seconds of a layer in one direction."""
    operations: Sequence[Operation] = work.operations
    sums, host = work.sums, efficiency.host
    device_s = (
        math.fsum(operation_s(o, kind, efficiency, dtype) for o in operations)
        + (efficiency.bus_sums if sums.bus else efficiency.sums) * sums.link_s
        + efficiency.message_s * sums.messages
    )
    call_s = host.backward_s if work.backward else host.forward_s
    return longer_s(device_s, call_s * work.calls + host.sum_s * sums.count)


def longer_s(device_s: float, host_s: float) -> float:
    """The longer of two that work side by side, and up to a fifth more where they are alike.

    That is (d⁴ + h⁴)^¼: neither waits for all of the other, nor do they overlap in full.
    """
    if not host_s or math.isinf(device_s):
        return device_s
    return math.sqrt(math.hypot(device_s**2, host_s**2))
