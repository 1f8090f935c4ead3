"""Seconds of operations from what they compute and move, by efficiency curves. No JAX.

A device reaches a share of its peak figures that depends on the sort of operation and on its size:

    seconds = overhead + larger of (FLOPs / (rate · share), bytes / (bandwidth · share))
    share   = best · size / (size + half)

`best` is the share that large operations reach, `half` the size at which half of that is reached:
FLOPs for rates, bytes for bandwidths. The curves are of a sort of operation, whatever the device
and the program; `cost.fit_efficiency` finds them from measured seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hetpass.ir.devices import DeviceKind

SORTS = ("product", "batched product", "batched product, backward", "memory")
"""Matrix products with parameters; products of activations for each head, and those of their
gradients, which read one operand across; all that computes little for what it moves."""


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
class Efficiency:
    """What operations reach.

    Attributes:
      rate: per sort of product, of the peak rate, by FLOPs.
      bandwidth: per sort, of the memory bandwidth, by bytes.
      overhead_s: of each kernel.
      sums: sums of activations over devices take so many times what their bytes take on the link.
      message_s: that each further device adds to such a sum.
    """

    rate: Mapping[str, Curve] = field(hash=False)
    bandwidth: Mapping[str, Curve] = field(hash=False)
    overhead_s: float
    sums: float
    message_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", MappingProxyType(dict(self.rate)))
        object.__setattr__(self, "bandwidth", MappingProxyType(dict(self.bandwidth)))


@dataclass(frozen=True)
class Work:
    """What a device does for a layer, in one direction.

    Attributes:
      operations: one after another.
      sum_s: what sums of activations take on the link, by their bytes alone.
      messages: devices beyond the first, over all sums.
    """

    operations: tuple[Operation, ...]
    sum_s: float = 0.0
    messages: int = 0


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
    return (
        math.fsum(operation_s(o, kind, efficiency, dtype) for o in operations)
        + efficiency.sums * work.sum_s
        + efficiency.message_s * work.messages
    )
