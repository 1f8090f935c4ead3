"""What schedules and the simulator know about a pipeline: seconds and bytes, as plain numbers.

Example: two equal stages (1/3 s forward, 2/3 s backward per microbatch), joined by a link that
takes 0.09 s one way in each direction:

    PipelineCosts((StageCost(1 / 3, 2 / 3),) * 2, (LinkCost(0.09, 0.09),))
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hetpass.errors import ScheduleError
from hetpass.ir.quantities import counted


@dataclass(frozen=True)
class StageCost:
    """One stage, per microbatch unless said otherwise.

    Attributes:
      forward_s: F.
      backward_s: B without the part that weight tasks can take over.
      weight_s: that part. A schedule without W tasks has backward tasks of
        `backward_s + weight_s`.
      update_s: once per step, after the stage's last task (gradient sync and optimizer).
      activation_bytes: held from the start of F to the end of B, per microbatch in flight.
      weight_bytes: of these, held on until the end of W where W is a task of its own.
      fixed_bytes: held all the time (parameters, optimizer state, accumulators).
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    update_s: float = 0.0
    activation_bytes: float = 1.0
    weight_bytes: float = 0.0
    fixed_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, "stage")
        if self.weight_bytes > self.activation_bytes:
            raise _cost_error(
                "stage", "weight_bytes is a part of activation_bytes", f"{self.weight_bytes} bytes"
            )

    @property
    def busy_s(self) -> float:
        """F, B and W of one microbatch."""
        return self.forward_s + self.backward_s + self.weight_s


@dataclass(frozen=True)
class LinkCost:
    """What crosses between stage i and stage i + 1, per microbatch.

    Attributes:
      forward_s, backward_s: for how long the transfer of one activation, and of its gradient,
        occupies its wires. A wire carries one transfer at a time.
      latency_s: from the end of occupation to arrival; does not occupy the wires.
      overlaps: whether lanes compute while they send and receive. If not, a transfer occupies
        both lanes too.
      forward_wires, backward_wires: what a transfer occupies, by name: a cable without full
        duplex in both directions, or the network cards of the sender and of the receiver, which
        other links name too. (): a wire of its own.
    """

    forward_s: float
    backward_s: float
    latency_s: float = 0.0
    overlaps: bool = True
    forward_wires: tuple[str, ...] = ()
    backward_wires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_numbers(self, "link")

    @classmethod
    def from_bytes(
        cls,
        forward_bytes: float,
        backward_bytes: float,
        *,
        latency_s: float,
        bytes_per_s: float,
        overlaps: bool = True,
        wires: tuple[str, ...] = (),
    ) -> LinkCost:
        """Occupation is bytes over bandwidth; `wires` are those of both directions."""
        if not bytes_per_s > 0:
            raise _cost_error("link", "the bandwidth must be positive", f"{bytes_per_s} bytes/s")
        return cls(
            forward_bytes / bytes_per_s,
            backward_bytes / bytes_per_s,
            latency_s,
            overlaps,
            wires,
            wires,
        )

    @property
    def one_way_s(self) -> float:
        """The longer direction, from ready to arrived."""
        return max(self.forward_s, self.backward_s) + self.latency_s


@dataclass(frozen=True)
class PipelineCosts:
    """Stages in layer order and the links between neighbours (S - 1 of them)."""

    stages: tuple[StageCost, ...]
    links: tuple[LinkCost, ...]

    def __post_init__(self) -> None:
        if not self.stages or len(self.links) != len(self.stages) - 1:
            raise _cost_error(
                "pipeline",
                "S stages need S - 1 links between them",
                f"{counted(len(self.stages), 'stage')}, {len(self.links)} links",
            )

    @property
    def slowest_s(self) -> float:
        """t: the longest F + B + W of a stage."""
        return max(stage.busy_s for stage in self.stages)

    @classmethod
    def equal(
        cls, num_stages: int, stage: StageCost, link: LinkCost | None = None
    ) -> PipelineCosts:
        """Equal stages; transfers are free unless a link is given."""
        return cls((stage,) * num_stages, (link or LinkCost(0.0, 0.0),) * (num_stages - 1))


def _check_numbers(cost: StageCost | LinkCost, kind: str) -> None:
    for field in fields(cost):
        value = getattr(cost, field.name)
        if isinstance(value, float | int) and not (math.isfinite(value) and value >= 0):
            raise _cost_error(kind, f"{field.name} must be finite and not negative", f"{value}")


def _cost_error(where: str, what: str, detail: str) -> ScheduleError:
    return ScheduleError(
        "HP-SCHEDULE-COST", what, where=where, details=(detail,), ways_out=("correct the number",)
    )
