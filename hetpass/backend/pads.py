"""Pads between entries and pads that cut, written so that the partitioner gets them right.

A `pad` with interior padding (the gradient of a strided slice), or with a negative edge (of a pad),
gives wrong numbers in a sharded program: XLA's partitioner (jaxlib 0.10 to 0.12, CPU) miscounts
where the operand is whole and the result is cut along the padded dimension. So
[a, b, c] -> [a, 0, b, 0, c] is made of a new dimension padded at its end, a reshape and a slice,
and a negative edge is a slice: these are partitioned rightly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from hetpass._jax import JaxprEqn


def is_mistaken(eqn: JaxprEqn) -> bool:
    """Whether it is a pad that cannot be left to the partitioner."""
    if eqn.primitive.name != "pad":
        return False
    return any(
        low < 0 or high < 0 or interior > 0 for low, high, interior in eqn.params["padding_config"]
    )


def pad(operand: Any, fill: Any, config: Sequence[tuple[int, int, int]]) -> Any:
    """`jax.lax.pad` with the same arguments and the same result."""
    if any(
        max(0, -low) + max(0, -high) > max(0, (size - 1) * (interior + 1) + 1)
        for size, (low, high, interior) in zip(operand.shape, config, strict=True)
    ):
        return jax.lax.pad(operand, fill, config)  # cuts more than there is
    for dim, (low, high, interior) in enumerate(config):
        if interior > 0 and operand.shape[dim] > 1:
            operand = _spread(operand, fill, dim, interior)
        operand = _cut(operand, dim, max(0, -low), max(0, -high))
    return jax.lax.pad(operand, fill, [(max(0, low), max(0, high), 0) for low, high, _ in config])


def _cut(operand: Any, dim: int, low: int, high: int) -> Any:
    if not low and not high:
        return operand
    return jax.lax.slice_in_dim(operand, low, operand.shape[dim] - high, axis=dim)


def _spread(operand: Any, fill: Any, dim: int, interior: int) -> Any:
    size = operand.shape[dim]
    apart = jax.lax.expand_dims(operand, [dim + 1])
    edges = [(0, interior if d == dim + 1 else 0, 0) for d in range(apart.ndim)]
    joined = list(operand.shape)
    joined[dim] = size * (interior + 1)
    spread = jax.lax.reshape(jax.lax.pad(apart, fill, edges), joined)
    return jax.lax.slice_in_dim(spread, 0, joined[dim] - interior, axis=dim)
