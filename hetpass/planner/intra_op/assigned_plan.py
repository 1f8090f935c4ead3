"""A plan whose stages carry the assignments that its costs came from. No JAX."""

from __future__ import annotations

import math
from dataclasses import fields, replace

from hetpass.cost.tables import StageTable
from hetpass.ir.plan import Plan, StagePlan
from hetpass.ir.stage_plan import StagePrice
from hetpass.planner.intra_op.stage_tables import SolvedTables


def with_assignments(plan: Plan, solved: SolvedTables) -> Plan:
    """The plan with an assignment for every layer of every stage on a single submesh, and the
    price of every stage.

    A stage's submesh and way to recompute may have several tables, for different prices of memory:
    it gets the fastest whose memory suffices for the microbatches that it holds in flight (all of
    them, where the plan leaves that open), or else the one that needs least.

    Stages that no table is for keep what they have.
    """
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                _assigned(stage, solved, pipeline.num_microbatches) for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def _assigned(stage: StagePlan, solved: SolvedTables, num_microbatches: int) -> StagePlan:
    if len(stage.replicas) != 1:
        return stage
    replica, at = stage.replicas[0], (stage.first_layer, stage.last_layer + 1)
    costs = solved.costs
    in_flight = num_microbatches if stage.in_flight is None else stage.in_flight
    found = []
    for number, table in enumerate(costs.stages):
        room = costs.groups[table.group]
        alike = (room.name, table.mesh, table.recompute)
        if alike != (replica.group, replica.mesh, stage.recompute):
            continue
        held = float(table.fixed_bytes[at] + in_flight * table.activation_bytes[at])
        fits = held <= room.memory_bytes
        rate = num_microbatches * (table.forward_s[at] + table.backward_s[at])
        found.append((not fits, float(rate + table.once_s[at]) if fits else held, number))
    if not found:
        return stage
    chosen = min(found)[2]
    price = _price(costs.stages[chosen], at)
    return replace(stage, assignments=solved.assignments(chosen, *at), price=price)


def _price(table: StageTable, at: tuple[int, int]) -> StagePrice | None:
    price = {part.name: float(getattr(table, part.name)[at]) for part in fields(StagePrice)}
    return StagePrice(**price) if all(map(math.isfinite, price.values())) else None
