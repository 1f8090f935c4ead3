from __future__ import annotations

from dataclasses import replace

from hetpass.ir.plan import Plan
from hetpass.planner.intra_op.assigned_plan import with_assignments
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.search import SearchOptions, search
from tests.planner.intra_op.test_stage_tables import CLUSTER, FACTS, KINDS, MICROBATCHES, solved


def found() -> Plan:
    options = SearchOptions(num_microbatches=(MICROBATCHES,))
    return search(FACTS, CLUSTER, options, tables=lambda _: solved().costs).plan


def test_every_layer_gets_an_assignment_that_can_run():
    tables = solved()
    plan = with_assignments(found(), tables)
    for stage in plan.pipelines[0].stages:
        layers = range(stage.first_layer, stage.last_layer + 1)
        assert len(stage.assignments) == len(layers)
        for layer, assignment in zip(layers, stage.assignments, strict=True):
            number = next(
                n
                for n, table in enumerate(tables.costs.stages)
                if table.mesh == assignment.mesh
                and (table.recompute == "full") == assignment.recompute
                and tables.costs.groups[table.group].name == stage.replicas[0].group
            )
            made = tables.chains[number].tables[KINDS[layer]].made
            assert evaluate(made.graph, made.setting, assignment).violations == ()


def test_plans_with_assignments_are_read_as_they_were_written():
    plan = with_assignments(found(), solved())
    assert Plan.from_json(plan.to_json()) == plan


def test_memory_decides_between_prices():
    tables = solved()
    plan = found()
    small = replace(
        tables,
        costs=replace(
            tables.costs,
            groups=tuple(replace(room, memory_bytes=1.0) for room in tables.costs.groups),
        ),
    )
    lean, fast = with_assignments(plan, small), with_assignments(plan, tables)
    for one, other in zip(lean.pipelines[0].stages, fast.pipelines[0].stages, strict=True):
        assert len(one.assignments) == len(other.assignments)


def test_what_no_table_is_for_is_left_alone():
    tables = solved()
    none = replace(tables, costs=replace(tables.costs, stages=()), chains=())
    plan = found()
    assert with_assignments(plan, none) == plan
