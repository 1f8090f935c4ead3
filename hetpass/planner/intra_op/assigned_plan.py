"""A plan whose stages carry the assignments that its costs came from. No JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

from hetpass.cost.tables import StageTable
from hetpass.ir.plan import Plan, StagePlan
from hetpass.ir.stage_plan import StagePrice
from hetpass.planner.intra_op.stage_tables import SolvedTables


def with_assignments(plan: Plan, solved: SolvedTables, tables: Sequence[int] | None = None) -> Plan:
    """The plan with an assignment for every layer of every stage on a single submesh, and the
    price of every stage.

    Args:
      tables: per stage of a plan of one pipeline, the table that its costs came from; None: the
        plan came from elsewhere. A stage's submesh and way to recompute may then have several
        tables, for different prices of memory: it gets the fastest whose memory suffices for the
        microbatches that it holds in flight (all of them, where the plan leaves that open), or else
        the one that needs least.

    Stages that no table is for keep what they have.
    """
    pipelines = []
    for pipeline in plan.pipelines:
        chosen: Sequence[int | None] = tables or [
            _fastest(stage, solved, pipeline.num_microbatches) for stage in pipeline.stages
        ]
        stages = tuple(
            stage if number is None else _assigned(stage, solved, number)
            for stage, number in zip(pipeline.stages, chosen, strict=True)
        )
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines))


def _fastest(stage: StagePlan, solved: SolvedTables, num_microbatches: int) -> int | None:
    """The number of a stage's table; None if there is none."""
    if len(stage.replicas) != 1:
        return None
    replica, at = stage.replicas[0], _range(stage)
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
    return min(found)[2] if found else None


def _assigned(stage: StagePlan, solved: SolvedTables, number: int) -> StagePlan:
    at = _range(stage)
    price = _price(solved.costs.stages[number], at)
    return replace(stage, assignments=solved.assignments(number, *at), price=price)


def _range(stage: StagePlan) -> tuple[int, int]:
    return stage.first_layer, stage.last_layer + 1


def _price(table: StageTable, at: tuple[int, int]) -> StagePrice | None:
    price = {part.name: float(getattr(table, part.name)[at]) for part in fields(StagePrice)}
    return StagePrice(**price) if all(map(math.isfinite, price.values())) else None
