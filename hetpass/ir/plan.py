"""A Plan: every decision about a step, as plain data that travels as JSON. No JAX.

The planner writes it, a person may write it, and everything after the planner obeys it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Sharding = tuple[tuple[str, ...], ...]
"""For each dimension of a value the mesh axes that it is cut along, major to minor."""


@dataclass(frozen=True)
class Replica:
    """One submesh of one device group.

    Attributes:
      group: the name of the device group.
      devices: indices into the group's devices, in the order of the mesh (row-major).
      mesh: (axis name, size) pairs; the product of the sizes is len(devices).
    """

    group: str
    devices: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class StagePlan:
    """A contiguous range of layers on the replicas that run it.

    Attributes:
      first_layer, last_layer: inclusive.
      replicas: where it runs. More than one: data-parallel copies, each with its share of every
        microbatch.
      shardings: by value name, where it differs from the default rule of the mesh axes.
      recompute: which forward values are recomputed instead of kept: "none" or "full".
      in_flight: the most microbatches held; None leaves it to the schedule.
    """

    first_layer: int
    last_layer: int
    replicas: tuple[Replica, ...]
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    recompute: str = "none"
    in_flight: int | None = None


@dataclass(frozen=True)
class Pipeline:
    """Stages in layer order, and how many of the M microbatches run through them."""

    stages: tuple[StagePlan, ...]
    num_microbatches: int


@dataclass(frozen=True)
class Plan:
    """All decisions for one step.

    Attributes:
      pipelines: parallel pipelines; their microbatches add up to M.
      schedule: the name of a schedule, or "auto".
      fingerprint: of the program that the plan was made for; None: any program with as many layers.
      predictions: what the planner expected, by name with the unit in the name ("step_s": 0.31).
    """

    pipelines: tuple[Pipeline, ...]
    schedule: str = "1f1b"
    fingerprint: str | None = None
    predictions: Mapping[str, float] = field(default_factory=dict)
