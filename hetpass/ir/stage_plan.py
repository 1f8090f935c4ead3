"""The parts of a Plan: replicas, stages and pipelines, as plain data. No JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from hetpass.errors import PlanError
from hetpass.ir.assignments import assignments_data, read_assignments
from hetpass.ir.frozen import Frozen
from hetpass.ir.operation_graph import Assignment
from hetpass.ir.quantities import counted
from hetpass.ir.records import Reader, at, nearest, shown

READER = Reader(PlanError, "HP-PLAN")

Sharding = tuple[tuple[str, ...], ...]
"""For each dimension of a value the mesh axes that it is cut along, major to minor."""

T = TypeVar("T")
RECOMPUTE = ("none", "full")
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def count(value: Any, where: str, least: int) -> int:
    """`value` as a whole number of at least `least`."""
    with at(where):
        number = READER.integer(value)
        if number < least:
            READER.refuse("VALUE", f"a number of {least} or more is needed, not {number}")
    return number


def parts(value: Any, sort: type[T]) -> tuple[T, ...]:
    """`value` as one or more records of the class `sort`."""

    def checked(part: Any) -> T:
        if not isinstance(part, sort):
            READER.refuse("TYPE", f"a {sort.__name__} is needed, not {shown(part)}")
        return part

    results = READER.items(value, checked)
    if not results:
        READER.refuse("VALUE", f"at least one {sort.__name__} is needed")
    return results


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

    def __post_init__(self) -> None:
        with at("group"):
            READER.text(self.group)
        with at("devices"):
            devices = READER.items(self.devices, lambda device: count(device, "", 0))
            if not devices:
                READER.refuse("DEVICES", "a replica needs at least one device")
            if len(set(devices)) != len(devices):
                twice = next(d for d in devices if devices.count(d) > 1)
                READER.refuse("DEVICES", f"device {twice} stands twice")
        with at("mesh"):
            mesh = READER.items(self.mesh, _checked_axis)
            names = [name for name, _ in mesh]
            if len(set(names)) != len(names):
                READER.refuse("MESH", f"an axis stands twice in {', '.join(names)}")
            size = math.prod(size for _, size in mesh)
            if size != len(devices):
                READER.refuse(
                    "MESH",
                    f"the mesh holds {counted(size, 'device')}, the replica has {len(devices)}",
                    details=[f"{self.group}: devices {shown(list(devices))}, mesh {mesh}"],
                    ways_out=[f'one axis: [["data", {len(devices)}]]'],
                )
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "mesh", mesh)

    def axis_size(self, name: str) -> int:
        """Devices along an axis; 1 where the mesh has no such axis."""
        return dict(self.mesh).get(name, 1)


def _checked_axis(pair: Any) -> tuple[str, int]:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        READER.refuse("MESH", "an axis is a pair of a name and a size")
    if not isinstance(pair[0], str) or not _AXIS.fullmatch(pair[0]):
        READER.refuse("MESH", f"{shown(pair[0])} cannot name a mesh axis")
    return pair[0], count(pair[1], "[1]", 1)


@dataclass(frozen=True)
class StagePrice:
    """What a stage costs with its assignments, as the solver that made them counted it.

    Attributes:
      forward_s, backward_s: per microbatch.
      once_s: gradient sync and update, once per step.
      fixed_bytes: on each device, all the time.
      activation_bytes: on each device, per microbatch in flight.
    """

    forward_s: float
    backward_s: float
    once_s: float
    fixed_bytes: float
    activation_bytes: float

    def __post_init__(self) -> None:
        for part in fields(self):
            with at(part.name):
                value = READER.number(getattr(self, part.name))
                if value < 0:
                    READER.refuse("VALUE", f"a number of at least 0 is needed, not {value}")
            object.__setattr__(self, part.name, value)


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
      assignments: one per layer of the stage, how its operations run on the replica's mesh; None
        or (): by the default rule of the mesh axes.
      price: of the stage with its assignments; None: as the mesh axes say.
    """

    first_layer: int
    last_layer: int
    replicas: tuple[Replica, ...]
    shardings: Mapping[str, Sharding] = field(default_factory=dict, hash=False)
    recompute: str = "none"
    in_flight: int | None = None
    assignments: tuple[Assignment | None, ...] = ()
    price: StagePrice | None = None

    def __post_init__(self) -> None:
        first = count(self.first_layer, "first_layer", 0)
        last = count(self.last_layer, "last_layer", 0)
        if last < first:
            READER.refuse(
                "LAYERS",
                f"the stage's last layer {last} is before its first, {first}",
                "last_layer",
            )
        with at("replicas"):
            replicas = parts(self.replicas, Replica)
            seen: set[tuple[str, int]] = set()
            for index, replica in enumerate(replicas):
                mine = {(replica.group, device) for device in replica.devices}
                if seen & mine:
                    group, device = min(seen & mine)
                    READER.refuse(
                        "DEVICES",
                        f"device {device} of {group!r} is in two replicas of one stage",
                        f"[{index}].devices",
                    )
                seen |= mine
        if self.recompute not in RECOMPUTE:
            READER.refuse(
                "VALUE",
                f"{shown(self.recompute)} is no way to recompute",
                "recompute",
                ways_out=nearest(self.recompute, RECOMPUTE),
            )
        if self.in_flight is not None:
            object.__setattr__(self, "in_flight", count(self.in_flight, "in_flight", 1))
        with at("shardings"):
            shardings = READER.values(self.shardings, self._checked_sharding)
        object.__setattr__(self, "first_layer", first)
        object.__setattr__(self, "last_layer", last)
        object.__setattr__(self, "replicas", replicas)
        object.__setattr__(self, "shardings", Frozen(sorted(shardings.items())))
        object.__setattr__(self, "assignments", tuple(self.assignments))
        with at("assignments"):
            self._check_assignments()

    def _check_assignments(self) -> None:
        layers = self.last_layer - self.first_layer + 1
        if self.assignments and len(self.assignments) != layers:
            READER.refuse(
                "LAYERS",
                f"{counted(len(self.assignments), 'assignment')} for {counted(layers, 'layer')}",
            )
        for index, assignment in enumerate(self.assignments):
            if assignment is not None and assignment.mesh != self.replicas[0].mesh:
                READER.refuse(
                    "MESH",
                    f"an assignment for the mesh {assignment.mesh} on {self.replicas[0].mesh}",
                    f"[{index}]",
                )

    def _checked_sharding(self, sharding: Any) -> Sharding:
        axes = READER.items(sharding, lambda dim: READER.items(dim, READER.text))
        known = {name for replica in self.replicas for name, _ in replica.mesh}
        used = [name for dim in axes for name in dim]
        for name in used:
            if name not in known:
                READER.refuse(
                    "MESH",
                    f"the stage's meshes have no axis {shown(name)}",
                    ways_out=nearest(name, known),
                )
            if used.count(name) > 1:
                READER.refuse("MESH", f"the axis {name!r} cuts a value twice")
        return axes


@dataclass(frozen=True)
class Pipeline:
    """Stages in layer order, and how many of the M microbatches run through them."""

    stages: tuple[StagePlan, ...]
    num_microbatches: int

    def __post_init__(self) -> None:
        num_microbatches = count(self.num_microbatches, "num_microbatches", 1)
        with at("stages"):
            stages = parts(self.stages, StagePlan)
            expected = 0
            for index, stage in enumerate(stages):
                if stage.first_layer != expected:
                    gap = "leaves a gap" if stage.first_layer > expected else "overlaps"
                    READER.refuse(
                        "LAYERS",
                        f"stage {index} starts at layer {stage.first_layer} and {gap}",
                        f"[{index}].first_layer",
                        details=[f"layer {expected} is the next one"],
                        ways_out=[f"start the stage at {expected}"],
                    )
                expected = stage.last_layer + 1
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "num_microbatches", num_microbatches)

    @property
    def num_layers(self) -> int:
        return self.stages[-1].last_layer + 1


# -- plain data -------------------------------------------------------------------------------


_PRICE = tuple(part.name for part in fields(StagePrice))


def pipeline_data(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "num_microbatches": pipeline.num_microbatches,
        "stages": [
            {
                "first_layer": stage.first_layer,
                "last_layer": stage.last_layer,
                "replicas": [
                    {
                        "group": replica.group,
                        "devices": list(replica.devices),
                        "mesh": [list(axis) for axis in replica.mesh],
                    }
                    for replica in stage.replicas
                ],
                "shardings": {
                    name: [list(dim) for dim in dims] for name, dims in stage.shardings.items()
                },
                "recompute": stage.recompute,
                "in_flight": stage.in_flight,
                **(
                    {"assignments": assignments_data(stage.assignments)}
                    if stage.assignments
                    else {}
                ),
                **({"price": asdict(stage.price)} if stage.price is not None else {}),
            }
            for stage in pipeline.stages
        ],
    }


def read_pipeline(value: Any) -> Pipeline:
    record = READER.record(value, required=("num_microbatches", "stages"))
    with at("stages"):
        stages = READER.items(record["stages"], _read_stage)
    return Pipeline(stages, record["num_microbatches"])


def _read_stage(value: Any) -> StagePlan:
    record = READER.record(
        value,
        required=("first_layer", "last_layer", "replicas"),
        optional=("shardings", "recompute", "in_flight", "assignments", "price"),
    )
    with at("replicas"):
        replicas = READER.items(record["replicas"], _read_replica)
    assignments: tuple[Assignment | None, ...] = ()
    if "assignments" in record:
        with at("assignments"):
            assignments = read_assignments(record["assignments"])
    price = record.get("price")
    if price is not None:
        with at("price"):
            price = StagePrice(**READER.record(price, required=_PRICE))
    return StagePlan(**{**record, "replicas": replicas, "assignments": assignments, "price": price})


def _read_replica(value: Any) -> Replica:
    record = READER.record(value, required=("group", "devices", "mesh"))
    return Replica(**record)
