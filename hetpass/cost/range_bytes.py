"""Bytes that one device of a stage holds. No JAX.

fixed           parameters, optimizer state, gradient accumulators, the batch, transfer buffers,
                and the fullest moment of a backward pass: what a layer needs while it runs, what
                the microbatch adds to its accumulators, and its parameters gathered. With
                recomputation, beside it, the activations of the layers before, made anew (those
                behind are used up); a layer's own are overwritten by their gradients
per microbatch  in flight: the activations held for backward; with recomputation only what the
                stage reads

Both moments are what the compiler makes of whole models: benchmarks/memory_sweep.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.analytic import Submesh
from hetpass.ir.facts import LayerFacts, ProgramFacts, SharedBytes

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
    order: Sequence[int] | None = None,
) -> RangeBytes:
    """Bytes per device of every range of layers.

    Args:
      layers: all L of the program, or those that differ.
      submesh: rows share the examples, devices of a row the parameters and activations.
      examples: in a microbatch.
      recompute: "none" or "full".
      shared: what pairs of layers both count.
      order: for every layer of the program which of `layers` it is; None: they are all of them.
    """
    share = examples / submesh.data
    at = np.arange(len(layers)) if order is None else np.asarray(order)
    kinds = [(x, min(submesh.model, x.most_tensor_parallel)) for x in layers]

    def per_layer(of: Callable[[LayerFacts, int], float]) -> Floats:
        values: Floats = np.array([of(layer, w) for layer, w in kinds])[at]
        return values

    state = over_ranges(
        per_layer(
            lambda x, w: (
                (x.parameter_bytes + x.state_bytes + x.gradient_bytes) / w
                + x.batch_bytes / submesh.data
            )
        )
    )
    own = per_layer(lambda x, w: x.activation_bytes.of(share) / w)
    activations = over_ranges(own)
    kept_twice: Floats | float = 0.0
    if shared:
        ways = [kinds[k][1] for k in at]
        most = [max(ways[pair.first], ways[pair.second]) for pair in shared]
        pairs = [(pair.first, pair.second) for pair in shared]
        twice = [pair.held_bytes / w for pair, w in zip(shared, most, strict=True)]
        state -= _pairs_inside(len(at), pairs, twice)
        twice = [p.activation_bytes.of(share) / w for p, w in zip(shared, most, strict=True)]
        kept_twice = _pairs_inside(len(at), pairs, twice)
        activations -= kept_twice
    there = per_layer(lambda x, w: x.boundary_bytes.of(share))
    back = per_layer(lambda x, w: x.gradient_boundary_bytes.of(share))
    crossing = np.concatenate([[0.0], (there + back)[:-1], [0.0]])
    incoming = np.concatenate([[0.0], there[:-1]])
    buffers = crossing[:-1, None] + crossing[None, :]
    running = per_layer(lambda x, w: _running_bytes(x, share, w))
    if recompute == "none":
        moment = _largest_over_ranges(running, np.zeros_like(running))
        return RangeBytes(state + buffers + moment, activations)
    moment = np.maximum(_largest_over_ranges(np.maximum(running, own), own) - kept_twice, 0.0)
    inputs = np.where(np.isfinite(activations), incoming[:, None], np.inf)
    return RangeBytes(state + buffers + moment, inputs)


@dataclass(frozen=True)
class MemoryParts:
    """What `RangeBytes.fixed` and one microbatch of one range of layers are made of, in bytes.

    Attributes:
      parameters, state, gradients: master copies and optimizer state are in the second; the
        third are accumulators.
      batch: inputs and results of the whole batch.
      buffers: of transfers at both ends.
      workspace: what a layer needs while it runs (`_running_bytes`).
      recomputed: activations made anew of the one microbatch that is in backward.
      in_flight: per microbatch in flight.
    """

    parameters: float
    state: float
    gradients: float
    batch: float
    buffers: float
    workspace: float
    recomputed: float
    in_flight: float

    @property
    def fixed(self) -> float:
        """All but what is in flight."""
        parts = (float(getattr(self, f.name)) for f in fields(self) if f.name != "in_flight")
        return sum(parts)


def memory_parts(
    facts: ProgramFacts, submesh: Submesh, examples: float, recompute: str, layers: range
) -> MemoryParts:
    """The parts of one range of layers; they add up to what `range_bytes` says of it.

    What two of the layers share is taken off the parameters and the activations.
    """
    share, whole = examples / submesh.data, facts.layers
    inside = [p for p in facts.shared if p.first in layers and p.second in layers]

    def ways(layer: int) -> int:
        return min(submesh.model, whole[layer].most_tensor_parallel)

    def total(of: Callable[[LayerFacts], float]) -> float:
        return sum(of(whole[k]) / ways(k) for k in layers)

    both = [(p, max(ways(p.first), ways(p.second))) for p in inside]
    activations = total(lambda x: x.activation_bytes.of(share))
    activations -= sum(p.activation_bytes.of(share) / w for p, w in both)
    ends = [k for k in (layers.start - 1, layers.stop - 1) if 0 <= k < len(whole) - 1]
    cuts = [(whole[k].boundary_bytes, whole[k].gradient_boundary_bytes) for k in ends]
    received = whole[layers.start - 1].boundary_bytes.of(share) if layers.start else 0.0
    again = recompute == "full"
    running = [_running_bytes(whole[k], share, ways(k)) for k in layers]
    workspace, moment = max(running), 0.0
    if again:
        own = [whole[k].activation_bytes.of(share) / ways(k) for k in layers]
        before = np.cumsum(own) - own
        moment = float(max(before + np.maximum(running, own)))
        moment = max(0.0, moment - sum(p.activation_bytes.of(share) / w for p, w in both))
        workspace = min(workspace, moment)
    return MemoryParts(
        parameters=total(lambda x: x.parameter_bytes) - sum(p.held_bytes / w for p, w in both),
        state=total(lambda x: x.state_bytes),
        gradients=total(lambda x: x.gradient_bytes),
        batch=sum(whole[k].batch_bytes for k in layers) / submesh.data,
        buffers=sum(amount.of(share) for pair in cuts for amount in pair),
        workspace=workspace,
        recomputed=moment - workspace if again else 0.0,
        in_flight=received if again else activations,
    )


def _running_bytes(layer: LayerFacts, share: float, ways: int) -> float:
    """What a layer needs while it runs: its workspace, what it adds to its accumulators, and of its
    parameters what other devices hold (compilers gather them)."""
    cut = (layer.workspace_bytes.of(share) + layer.gradient_bytes) / ways
    return cut + layer.parameter_bytes * (1 - 1 / ways)


def _pairs_inside(count: int, pairs: Sequence[tuple[int, int]], values: Sequence[float]) -> Floats:
    """Entry [first, end] is the sum over the pairs with both layers among first … end - 1."""
    table = np.zeros((count, count + 1))
    for (one, other), value in zip(pairs, values, strict=True):
        table[one, other + 1] += value
    result: Floats = np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
    return result


def _largest_over_ranges(needed: Floats, before: Floats) -> Floats:
    """Entry [first, end] is the largest, over its layers k, of what layer k needs beside the sum of
    `before` over layers first … k - 1; 0 where there are none."""
    count = len(needed)
    sums = np.concatenate([[0.0], np.cumsum(before)])
    result = np.zeros((count, count + 1))
    from_the_start = np.broadcast_to(needed + sums[:-1], (count, count))
    inside = np.triu(np.ones((count, count), bool))
    result[:, 1:] = np.maximum.accumulate(np.where(inside, from_the_start, -np.inf), axis=1)
    largest: Floats = np.where(over_ranges(np.zeros(count)) == 0, result - sums[:-1, None], 0.0)
    return largest


def over_ranges(per_layer: Sequence[float] | Floats) -> Floats:
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
