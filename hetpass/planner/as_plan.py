"""From stages of the inter-op program to a Plan: which devices each takes. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hetpass.cost.submeshes import placed
from hetpass.cost.tables import CostTables
from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.planner.objective import Pick


def as_plan(
    tables: CostTables,
    cluster: Cluster,
    picks: Sequence[Pick],
    *,
    schedule: str = "auto",
    in_flight: Sequence[int] | None = None,
    fingerprint: str | None = None,
    predictions: Mapping[str, float] = MappingProxyType({}),
) -> Plan:
    """The plan of one pipeline; each stage's devices lie side by side in its group."""
    devices: dict[int, tuple[int, ...]] = {}
    for g, room in enumerate(tables.groups):
        own = [i for i, pick in enumerate(picks) if tables.stages[pick.table].group == g]
        sizes = [tables.stages[picks[i].table].devices for i in own]
        devices.update(zip(own, placed(cluster.group(room.name), sizes), strict=True))
    stages = []
    for index, pick in enumerate(picks):
        table = tables.stages[pick.table]
        replica = Replica(tables.groups[table.group].name, devices[index], table.mesh)
        stages.append(
            StagePlan(
                pick.first,
                pick.end - 1,
                (replica,),
                recompute=table.recompute,
                in_flight=None if in_flight is None else in_flight[index],
            )
        )
    return Plan(
        (Pipeline(tuple(stages), tables.num_microbatches),), schedule, fingerprint, predictions
    )
