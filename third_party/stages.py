"""Stages that take devices of named groups in order, as a Plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan


@dataclass(frozen=True)
class ReadStage:
    """A stage as another planner says it.

    Attributes:
      end: behind its last layer.
      group: of devices, by our name.
      data, model: its mesh.
    """

    end: int
    group: str
    data: int
    model: int


def refuse(what: str, where: str, *details: str) -> PlanError:
    """A file that says what a plan of ours cannot, or what nobody can mean."""
    return PlanError(
        "HP-PLAN-FOREIGN",
        what,
        where=where,
        details=details,
        ways_out=["give the plan as hetpass writes it: docs/plans.md"],
    )


def as_plan(
    stages: Sequence[ReadStage], cluster: Cluster, num_microbatches: int, where: str
) -> Plan:
    """Each stage takes the next free devices of its group; stages without layers are left out.

    Raises:
      PlanError: HP-PLAN-FOREIGN, there are too few devices, or no stage has layers.
    """
    taken = {group.name: 0 for group in cluster.groups}
    parts = []
    first = 0
    for number, stage in enumerate(stages):
        count = stage.data * stage.model
        size = cluster.group(stage.group).num_devices
        begin = taken[stage.group]
        if begin + count > size:
            raise refuse(
                f"stage {number} needs {count} devices of {stage.group!r}, {size - begin} are left",
                where,
            )
        taken[stage.group] = begin + count
        if stage.end > first:
            mesh = (("data", stage.data), *((("model", stage.model),) if stage.model > 1 else ()))
            devices = tuple(range(begin, begin + count))
            replica = Replica(stage.group, devices, mesh)
            parts.append(StagePlan(first, stage.end - 1, (replica,)))
            first = stage.end
    if not parts:
        raise refuse("no stage has layers", where)
    return Plan((Pipeline(tuple(parts), num_microbatches),), "1f1b")


def group_of_kind(cluster: Cluster, kind: str, where: str) -> str:
    """The group whose kind, or name, is `kind`, or begins so, in any case.

    Raises:
      PlanError: HP-PLAN-FOREIGN, there is none, or more than one.
    """
    wanted = kind.lower().replace("_", "-")
    found = [
        group.name
        for group in cluster.groups
        if group.name.lower() == wanted or group.kind.name.lower().startswith(wanted)
    ]
    if len(found) != 1:
        known = ", ".join(f"{g.name} ({g.kind.name})" for g in cluster.groups)
        raise refuse(f"{kind!r} is {len(found)} groups of the cluster", where, known)
    return found[0]
