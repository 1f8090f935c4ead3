"""Seconds of one layer on a submesh, from FLOPs, bytes and peak rates (a roofline). No JAX.

The submesh is data parallel × tensor parallel, as in Megatron-LM (Shoeybi et al. 2019): each of d
rows has its share of the examples and a copy of the parameters, each of t devices in a row its
share of every matrix. Activations are summed over a row once per layer in forward and in backward;
gradients over the d rows once per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetpass.cost.collectives import all_reduce_s
from hetpass.ir.devices import DeviceGroup, DeviceKind, Link
from hetpass.ir.facts import Amount, LayerFacts


@dataclass(frozen=True)
class Assumptions:
    """Shares of peak figures that are reached in practice; assumed where nothing was measured.

    Attributes:
      flops: of a kind's peak rate.
      bandwidth: of a kind's memory bandwidth.
      memory: of a device's memory; the rest is for the runtime, workspace and fragmentation.
      launch_s: no share: what it takes to start one task of a stage.
    """

    flops: float = 0.5
    bandwidth: float = 0.8
    memory: float = 0.92
    launch_s: float = 0.0


PEAK = Assumptions(1.0, 1.0, 1.0)
"""What the data sheet says."""

ASSUMED = Assumptions(launch_s=50e-6)
"""What a real step is planned with where nothing was measured."""


@dataclass(frozen=True)
class Submesh:
    """d × t devices of one group: rows of tensor parallelism, columns of data parallelism."""

    data: int
    model: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.model

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """As a plan writes the mesh; the model axis is left out where it is 1."""
        return (("data", self.data), *((("model", self.model),) if self.model > 1 else ()))


@dataclass(frozen=True)
class LayerSeconds:
    """One layer on a submesh: per microbatch, and once per step.

    Attributes:
      forward, backward: per microbatch; infinite where the kind lacks the number format.
      sync: summing gradients over data parallel copies.
      update: of parameters and optimizer state.
    """

    forward: float
    backward: float
    sync: float
    update: float


def peak_rate(kind: DeviceKind, dtype: str) -> float:
    """FLOP/s of one device; 0 where the kind lacks the format.

    JAX multiplies float32 on matrix units at its default precision where they take it.
    """
    rate = kind.peak_flops.get(dtype, 0.0)
    return max(rate, kind.peak_flops.get("tf32", 0.0)) if dtype == "float32" else rate


def layer_seconds(
    layer: LayerFacts,
    group: DeviceGroup,
    submesh: Submesh,
    examples: float,
    assumed: Assumptions = Assumptions(),
) -> LayerSeconds:
    """Seconds of a layer for microbatches of `examples` on a submesh of `group`."""
    share = examples / submesh.data
    ways = min(submesh.model, layer.most_tensor_parallel)
    forward, backward = _compute(layer, group, share, ways, assumed)
    row_link = group.link_among(submesh.model)
    reduced = all_reduce_s(layer.reduced_bytes.of(share), ways, row_link)
    touched = 2 * (layer.parameter_bytes + layer.state_bytes) + layer.gradient_bytes
    update = touched / ways / (group.kind.memory_bandwidth * assumed.bandwidth)
    return LayerSeconds(
        forward + reduced,
        backward + reduced,
        gradient_sync_s(layer.gradient_bytes, group, submesh, ways),
        update,
    )


def _compute(
    layer: LayerFacts, group: DeviceGroup, share: float, ways: int, assumed: Assumptions
) -> tuple[float, float]:
    known = layer.seconds.get(group.name) or layer.seconds.get(group.kind.name)
    if known:
        return known.forward.of(share) / ways, known.backward.of(share) / ways
    if layer.seconds and not layer.forward_flops:  # known elsewhere, and not to be derived here
        return math.inf, math.inf
    bandwidth = group.kind.memory_bandwidth * assumed.bandwidth
    read = layer.parameter_bytes
    written = layer.parameter_bytes + 2 * layer.gradient_bytes
    pairs = (
        (layer.forward_flops, layer.forward_traffic_bytes.of(share) + read),
        (layer.backward_flops, layer.backward_traffic_bytes.of(share) + written),
    )
    forward, backward = (
        max(
            _flops_s(flops, group.kind, share, assumed) / ways,
            traffic / ways / bandwidth,
        )
        for flops, traffic in pairs
    )
    return forward, backward


def _flops_s(
    flops: Mapping[str, Amount], kind: DeviceKind, share: float, assumed: Assumptions
) -> float:
    seconds = 0.0
    for dtype, amount in flops.items():
        rate = peak_rate(kind, dtype)
        seconds += amount.of(share) / (rate * assumed.flops) if rate else math.inf
    return seconds


def gradient_sync_s(
    gradient_bytes: float, group: DeviceGroup, submesh: Submesh, ways: int
) -> float:
    """The rings of the t columns run side by side; across hosts they share the host's link."""
    link: Link | None = group.link_among(submesh.devices)
    inside = submesh.devices <= group.devices_per_host
    return all_reduce_s(gradient_bytes / ways if inside else gradient_bytes, submesh.data, link)
