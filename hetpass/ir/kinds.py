"""How a value relates to the batch: the five kinds that the frontend proves.

A step is written for a full batch of B examples and runs as M microbatches of b = B / M. The kind
of a value says what microbatch m holds of it, and how the full value is got back:

    kind                 in microbatch m                       the full value is
    Whole                the full value                        itself
    Zero                 zeros                                 zeros (joins with every other kind)
    Batched(dim, outer)  the m-th slice of the examples        the slices, joined along `dim`
    Partial(op)          a value of the full shape             `op` over the M values
    Position(dim, plus)  index of the example in the full      joined, as for Batched
                         batch, plus a constant

This module knows no JAX: the planner and the printers read kinds too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CombineOp = Literal["sum", "max", "min", "prod", "or", "and", "same", "total"]
"""How microbatches' values make one. "same": they are equal, and any of them will do. "total": each
microbatch has a value of its own (whole as far as it can tell), and they are added."""


@dataclass(frozen=True)
class Whole:
    """Free of the batch: the same value in every microbatch."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Zero:
    """Zeros of a shape that is free of the batch (the start of a sum carried by a scan)."""

    def __str__(self) -> str:
        return "zero"


@dataclass(frozen=True)
class Batched:
    """Example by example along one dimension.

    Attributes:
      dim: the dimension that holds the examples.
      outer: how many times the whole batch repeats inside that dimension: the dimension reads
        (outer, batch, inner), row-major. `x.reshape(B * T, H)` is `Batched(0, outer=1)`;
        `x.transpose(1, 0, 2).reshape(T * B, H)` is `Batched(0, outer=T)`. None: the value is
        constant along the dimension, so that every reading is right.
    """

    dim: int
    outer: int | None = 1

    def __str__(self) -> str:
        layout = "any" if self.outer is None else str(self.outer)
        return f"batched({self.dim})" if self.outer == 1 else f"batched({self.dim}, outer={layout})"


@dataclass(frozen=True)
class Partial:
    """`op` over the microbatches gives the full value."""

    op: CombineOp = "sum"

    def __str__(self) -> str:
        return f"partial({self.op})"


@dataclass(frozen=True)
class Position:
    """The index of an example in the full batch along `dim`, plus `plus`; constant elsewhere."""

    dim: int
    plus: int = 0

    def __str__(self) -> str:
        return f"position({self.dim}{f', +{self.plus}' if self.plus else ''})"


Kind = Whole | Zero | Batched | Partial | Position
