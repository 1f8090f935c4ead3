"""Bytes that one device of a stage holds. No JAX.

fixed           parameters, optimizer state, gradient accumulators, the batch, transfer buffers,
                and with recomputation the activations of the one microbatch that is in backward
per microbatch  in flight: the activations held for backward; with recomputation only what the
                stage reads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.analytic import Submesh
from hetpass.ir.facts import LayerFacts, SharedBytes

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RangeBytes:
    """For every range of layers, entry [first, end]; infinite where first >= end."""

    fixed: Floats
    per_microbatch: Floats


def range_bytes(
    layers: Sequence[LayerFacts],
    submesh: Submesh,
    examples: float,
    recompute: str,
    shared: Sequence[SharedBytes] = (),
) -> RangeBytes:
    """Bytes per device of every range of layers.

    Args:
      layers: all L of the program.
      submesh: rows share the examples, devices of a row the parameters and activations.
      examples: in a microbatch.
      recompute: "none" or "full".
      shared: what pairs of layers both count.
    """
    share = examples / submesh.data
    ways = [min(submesh.model, layer.most_tensor_parallel) for layer in layers]
    held = [
        (x.parameter_bytes + x.state_bytes + x.gradient_bytes) / w + x.batch_bytes / submesh.data
        for x, w in zip(layers, ways, strict=True)
    ]
    state = over_ranges(held)
    activations = over_ranges(
        [layer.activation_bytes.of(share) / w for layer, w in zip(layers, ways, strict=True)]
    )
    if shared:
        most = [max(ways[pair.first], ways[pair.second]) for pair in shared]
        pairs = [(pair.first, pair.second) for pair in shared]
        twice = [pair.held_bytes / w for pair, w in zip(shared, most, strict=True)]
        state -= _pairs_inside(len(layers), pairs, twice)
        twice = [p.activation_bytes.of(share) / w for p, w in zip(shared, most, strict=True)]
        activations -= _pairs_inside(len(layers), pairs, twice)
    crossing = np.array(
        [0.0]
        + [b.boundary_bytes.of(share) + b.gradient_boundary_bytes.of(share) for b in layers[:-1]]
        + [0.0]
    )
    incoming = np.array([0.0] + [layer.boundary_bytes.of(share) for layer in layers[:-1]])
    buffers = crossing[:-1, None] + crossing[None, :]
    workspace = [x.workspace_bytes.of(share) / w for x, w in zip(layers, ways, strict=True)]
    fixed = state + buffers + _most_over_ranges(workspace)
    if recompute == "none":
        return RangeBytes(fixed, activations)
    inputs = np.where(np.isfinite(activations), incoming[:, None], np.inf)
    return RangeBytes(fixed + activations, inputs)


def _pairs_inside(count: int, pairs: Sequence[tuple[int, int]], values: Sequence[float]) -> Floats:
    """Entry [first, end] is the sum over the pairs with both layers among first … end - 1."""
    table = np.zeros((count, count + 1))
    for (one, other), value in zip(pairs, values, strict=True):
        table[one, other + 1] += value
    result: Floats = np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
    return result


def _most_over_ranges(per_layer: Sequence[float]) -> Floats:
    """Entry [first, end] is the largest of layers first … end - 1; 0 where there are none."""
    values = np.asarray(per_layer, dtype=np.float64)
    count = len(values)
    result = np.zeros((count, count + 1))
    inside = np.triu(np.broadcast_to(values, (count, count)))
    result[:, 1:] = np.maximum.accumulate(inside, axis=1)
    return result


def over_ranges(per_layer: Sequence[float]) -> Floats:
    """Entry [first, end] is the sum over layers first … end - 1; infinite where there are none.

    Layers of infinite cost make the ranges that hold them infinite.
    """
    values = np.asarray(per_layer, dtype=np.float64)
    infinite = np.isinf(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(infinite, 0.0, values))])
    counts = np.concatenate([[0], np.cumsum(infinite)])
    result: Floats = sums[None, :] - sums[:-1, None]
    result[counts[None, :] > counts[:-1, None]] = np.inf
    first = np.arange(len(values))
    result[first[:, None] >= np.arange(len(values) + 1)[None, :]] = np.inf
    return result
