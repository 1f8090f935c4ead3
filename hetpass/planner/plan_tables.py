"""The costs of one plan's stages and links: the row of the tables that it picks. No JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetpass.cost.analytic import Assumptions, Submesh
from hetpass.cost.tables import CostTables, StageTable, group_rooms, link_tables, stage_table
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.stage_plan import StagePrice
from hetpass.planner.judge import pipeline_costs
from hetpass.planner.objective import Pick
from hetpass.schedules.costs import PipelineCosts


def plan_tables(
    plan: Plan, facts: ProgramFacts, cluster: Cluster, assumed: Assumptions = Assumptions()
) -> tuple[CostTables, tuple[Pick, ...]]:
    """The tables of the plan's submeshes, and the entry that each of its stages is.

    A stage that carries a price costs that, whatever layers it has in its table.

    Raises:
      PlanError: HP-PLAN-UNPRICED, several pipelines or replicas.
    """
    if len(plan.pipelines) > 1 or any(len(s.replicas) > 1 for s in plan.pipelines[0].stages):
        raise PlanError(
            "HP-PLAN-UNPRICED",
            "plans of several pipelines, or of stages with several replicas, have no price yet",
            ways_out=["give a plan of one pipeline, each stage on one submesh"],
        )
    m = plan.num_microbatches
    names = [group.name for group in cluster.groups]
    tables = []
    picks = []
    for index, stage in enumerate(plan.pipelines[0].stages):
        replica = stage.replicas[0]
        data = replica.axis_size("data")
        submesh = Submesh(data, len(replica.devices) // data)
        group = names.index(replica.group)
        table = stage_table(facts, cluster, group, submesh, m, stage.recompute, assumed)
        tables.append(table if stage.price is None else _at_price(table, stage.price))
        picks.append(Pick(index, stage.first_layer, stage.last_layer + 1))
    forward, backward, latency = link_tables(facts, cluster, facts.batch_size / m)
    whole = CostTables(
        facts.num_layers,
        m,
        group_rooms(cluster, assumed),
        tuple(tables),
        forward,
        backward,
        latency,
    )
    return whole, tuple(picks)


def _at_price(table: StageTable, price: StagePrice) -> StageTable:
    shape = table.forward_s.shape
    return replace(
        table,
        forward_s=np.full(shape, price.forward_s),
        backward_s=np.full(shape, price.backward_s),
        once_s=np.full(shape, price.once_s),
        fixed_bytes=np.full(shape, price.fixed_bytes),
        activation_bytes=np.full(shape, price.activation_bytes),
    )


def plan_costs(
    plan: Plan, facts: ProgramFacts, cluster: Cluster, assumed: Assumptions = Assumptions()
) -> PipelineCosts:
    """What schedules and the simulator know of a plan: weight gradients apart, in shared lanes too.

    A stage that cannot compute there counts as the slowest that can: a plan by hand may ask for
    devices that emulate a number format.

    Raises:
      PlanError: as `plan_tables`.
    """
    tables, picks = plan_tables(plan, facts, cluster, assumed)
    tables = replace(tables, stages=_all_finite(tables, picks))
    return pipeline_costs(tables, picks, weights_apart=True, lane_of=plan.lane_of)


def _all_finite(tables: CostTables, picks: Sequence[Pick]) -> tuple[StageTable, ...]:
    places = [(tables.stages[p.table], (p.first, p.end)) for p in picks]
    times = [float(t.forward_s[at] + t.backward_s[at]) for t, at in places]
    slowest = max((t for t in times if math.isfinite(t)), default=1.0)
    if all(math.isfinite(t) for t in times):
        return tables.stages
    shape = tables.stages[0].forward_s.shape
    half = np.full(shape, slowest / 2)
    return tuple(
        table if math.isfinite(t) else replace(table, forward_s=half, backward_s=half)
        for (table, _), t in zip(places, times, strict=True)
    )


def lane_limits_bytes(
    plan: Plan, cluster: Cluster, assumed: Assumptions = Assumptions()
) -> tuple[float, ...]:
    """Per lane, what each of its devices may hold."""
    rooms = {room.name: room.memory_bytes for room in group_rooms(cluster, assumed)}
    limits = {
        lane: rooms[stage.replicas[0].group]
        for lane, stage in zip(plan.lane_of, plan.pipelines[0].stages, strict=True)
    }
    return tuple(limits[lane] for lane in sorted(limits))
