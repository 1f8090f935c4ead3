"""Cutting a value into parts along its batch, and joining them again.

A batched dimension reads (outer, batch, inner), row-major. Cutting the batch into P parts makes it
(outer, P, batch / P, inner); the P moves to the front, and the rest merges back into one dimension.
The same cut serves microbatches (P = M) and the devices of a data axis (P = D). The functions work
on numpy arrays, JAX arrays, tracers and PRNG key arrays alike.
"""

from __future__ import annotations

import math
from typing import Any

from hetpass.ir.kinds import Batched, Position


def batch_layout(kind: object) -> tuple[int, int] | None:
    """(dimension, outer) of a value whose kind has examples along a dimension, else None.

    A value that is constant along its batch dimension (`outer` None) may be read with any outer.
    """
    if isinstance(kind, Batched):
        return kind.dim, kind.outer or 1
    if isinstance(kind, Position):
        return kind.dim, 1
    return None


def split_batch(value: Any, dim: int, outer: int, parts: int) -> Any:
    """[.., outer * batch * inner, ..] -> [parts, .., outer * batch / parts * inner, ..]."""
    shape = tuple(value.shape)
    rest = shape[dim] // (outer * parts)
    value = value.reshape((*shape[:dim], outer, parts, rest, *shape[dim + 1 :]))
    at = dim + 1
    order = (at, *(d for d in range(value.ndim) if d != at))
    value = value.transpose(order)
    return value.reshape((parts, *shape[:dim], outer * rest, *shape[dim + 1 :]))


def join_batch(value: Any, dim: int, outer: int) -> Any:
    """The inverse of `split_batch`: `dim` counts without the leading dimension of parts."""
    parts, shape = value.shape[0], tuple(value.shape[1:])
    rest = shape[dim] // outer
    value = value.reshape((parts, *shape[:dim], outer, rest, *shape[dim + 1 :]))
    before = tuple(range(1, dim + 2))
    order = (*before, 0, *range(dim + 2, value.ndim))
    value = value.transpose(order)
    return value.reshape((*shape[:dim], outer * parts * rest, *shape[dim + 1 :]))


def legal_parts(batch: int, near: int) -> tuple[int, ...]:
    """The divisors of `batch` next to `near`, at most two below and two above."""
    divisors = [d for d in range(1, math.isqrt(batch) + 1) if batch % d == 0]
    divisors = sorted({*divisors, *(batch // d for d in divisors)})
    below = [d for d in divisors if d <= near][-2:]
    above = [d for d in divisors if d > near][:2]
    return (*below, *above)
