"""What layers cost on a row of devices: measured in a profile, or derived from facts. No JAX.

A row is `ways` devices of one group that share every matrix (tensor parallelism); it takes
microbatches of its own. Arrays have one entry per layer, so that a stage is a difference of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.analytic import Assumptions, Submesh, layer_seconds
from hetpass.ir.devices import DeviceGroup
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.profile import ModelProfile

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RowCosts:
    """Every layer on one row, per device.

    Attributes:
      forward_s, backward_s: per microbatch.
      update_s: once per step.
      parameter_bytes, gradient_bytes: of the device's share.
      held_bytes: from forward to backward, per microbatch in flight.
      fixed_bytes: parameters, gradients, optimizer state.
      output_bytes: that the next layer reads, of the microbatch, on every device of the row.
    """

    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    parameter_bytes: Floats
    gradient_bytes: Floats
    held_bytes: Floats
    fixed_bytes: Floats
    output_bytes: Floats


class LayerCosts(Protocol):
    """Where costs of layers come from."""

    @property
    def num_layers(self) -> int:
        """L."""

    def row(self, group: DeviceGroup, ways: int, examples: float) -> RowCosts | None:
        """Microbatches of `examples` on `ways` devices of a host; None: it cannot run, or nobody
        knows how fast."""

    def ways(self, group: DeviceGroup) -> tuple[int, ...]:
        """The rows that are possible, by number of devices."""

    def usable_bytes(self, group: DeviceGroup) -> float:
        """That a device has for what `RowCosts` counts."""

    def gradient_bytes(self) -> Floats:
        """Of every layer, whole."""


@dataclass(frozen=True)
class MemoryOverhead:
    """What a training runtime holds beyond parameters, optimizer state and activations.

    Attributes:
      parameter_copies: of the parameters' size: parameter, gradient, two moments of Adam, and what
        gradients are flattened into before they are summed.
      activations: of what is held from forward to backward: temporaries, fragmentation.
      fixed_bytes: context, libraries, buffers of collectives.
    """

    parameter_copies: float = 5.0
    activations: float = 1.08
    fixed_bytes: float = 5e9


@dataclass(frozen=True)
class ProfiledCosts:
    """Costs as measured.

    Attributes:
      profile: of the model.
      memory: what the runtime adds.
    """

    profile: ModelProfile
    memory: MemoryOverhead = field(default_factory=MemoryOverhead)

    @property
    def num_layers(self) -> int:
        return self.profile.num_layers

    def row(self, group: DeviceGroup, ways: int, examples: float) -> RowCosts | None:
        times = self.profile.times(group.kind.name, ways, examples)
        sizes = self.profile.sizes.get(ways)
        if times is None or sizes is None:
            return None
        parameters = np.array([size.parameter_bytes for size in sizes])
        return RowCosts(
            np.array([t.forward_s for t in times]),
            np.array([t.backward_s for t in times]),
            np.array([t.update_s for t in times]),
            parameters,
            parameters,
            examples * self.memory.activations * np.array([size.held_bytes for size in sizes]),
            parameters * self.memory.parameter_copies,
            examples * np.array([size.output_bytes for size in sizes]),
        )

    def ways(self, group: DeviceGroup) -> tuple[int, ...]:
        known = self.profile.ways(group.kind.name)
        return tuple(w for w in known if group.devices_per_host % w == 0)

    def usable_bytes(self, group: DeviceGroup) -> float:
        return group.kind.memory_bytes - self.memory.fixed_bytes

    def gradient_bytes(self) -> Floats:
        ways, sizes = next(iter(self.profile.sizes.items()))
        return ways * np.array([size.parameter_bytes for size in sizes])


@dataclass(frozen=True)
class FactsCosts:
    """Costs by the analytic model.

    Attributes:
      facts: of the program.
      assumed: shares of peak figures.
    """

    facts: ProgramFacts
    assumed: Assumptions = field(default_factory=Assumptions)

    @property
    def num_layers(self) -> int:
        return self.facts.num_layers

    def row(self, group: DeviceGroup, ways: int, examples: float) -> RowCosts | None:
        layers = self.facts.layers
        submesh = Submesh(1, ways)
        seconds = [layer_seconds(x, group, submesh, examples, self.assumed) for x in layers]
        share = np.array([1 / min(ways, x.most_tensor_parallel) for x in layers])
        parameters = share * np.array([x.parameter_bytes for x in layers])
        gradients = share * np.array([x.gradient_bytes for x in layers])
        state = share * np.array([x.state_bytes for x in layers])
        return RowCosts(
            np.array([s.forward for s in seconds]),
            np.array([s.backward for s in seconds]),
            np.array([s.update for s in seconds]),
            parameters,
            gradients,
            share * np.array([x.activation_bytes.of(examples) for x in layers]),
            parameters + gradients + state,
            np.array([x.boundary_bytes.of(examples) for x in layers]),
        )

    def ways(self, group: DeviceGroup) -> tuple[int, ...]:
        most = max(x.most_tensor_parallel for x in self.facts.layers)
        powers = [1 << e for e in range(group.devices_per_host.bit_length())]
        return tuple(w for w in powers if w <= most and group.devices_per_host % w == 0)

    def usable_bytes(self, group: DeviceGroup) -> float:
        return group.kind.memory_bytes * self.assumed.memory

    def gradient_bytes(self) -> Floats:
        return np.array([layer.gradient_bytes for layer in self.facts.layers])
