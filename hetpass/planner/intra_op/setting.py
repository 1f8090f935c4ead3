"""What a layer is planned for: devices, links, and how often it runs. No JAX."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetpass.cost.analytic import Assumptions
from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.cost.operations import Efficiency
from hetpass.ir.devices import DeviceKind
from hetpass.ir.operation_graph import Value


@dataclass(frozen=True)
class Setting:
    """Where and how often a layer runs.

    Attributes:
      mesh: the devices, and what links them.
      kind: of every device.
      num_microbatches: M, in a step.
      in_flight: microbatches whose residuals are held at once.
      recompute: forward runs again before backward, and residuals of one microbatch are held.
      alone: what neighbouring layers give comes from other devices, and its arrival is priced.
      assumed: shares of peak figures.
      efficiency: of operations, where it is known better.
    """

    mesh: LinkedMesh
    kind: DeviceKind
    num_microbatches: int = 1
    in_flight: int = 1
    recompute: bool = False
    alone: bool = True
    assumed: Assumptions = field(default_factory=Assumptions)
    efficiency: Efficiency | None = None

    @property
    def held(self) -> int:
        """So many microbatches' residuals."""
        return 1 if self.recompute else self.in_flight

    @property
    def reached(self) -> Assumptions | Efficiency:
        """What operations reach of peak figures."""
        return self.efficiency or self.assumed

    @property
    def bandwidth(self) -> float:
        """Of device memory, as reached, bytes per second."""
        return self.kind.memory_bandwidth * self.assumed.bandwidth


def arrives(value: Value, setting: Setting) -> bool:
    """Whether a value comes from other devices in every microbatch."""
    return setting.alone and value.role in ("activation", "cotangent")
