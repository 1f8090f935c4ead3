"""Assignments in plans: written and read again, equal; what is wrong is refused by path."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hetpass.errors import PlanError
from hetpass.ir.assignments import assignment_data, read_assignment
from hetpass.ir.operation_graph import Assignment, Layout, OperationChoice
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan

MESH = (("data", 2), ("model", 2))
CUT = Layout((("data",), ("model",)))
EXAMPLE = Assignment(
    mesh=MESH,
    operations=(
        OperationChoice((("data",), (), ("model",)), (CUT,)),
        OperationChoice(((),), (Layout(((),), frozenset({"data"})),), frozenset({"data"})),
    ),
    stored={3: CUT, 1: Layout(())},
    at_rest={0: Layout((("data", "model"), ()))},
    accumulators={4: Layout(((),), frozenset({"data", "model"}))},
    gathered_once=frozenset({0}),
    recompute=True,
    links=((1e-6, 1e9), (2e-6, 2e11)),
    reduce_scatter=False,
)


def test_written_and_read_again() -> None:
    assert read_assignment(assignment_data(EXAMPLE)) == EXAMPLE


def plan_of(*assignments: Assignment | None) -> Plan:
    replica = Replica("a", (0, 1, 2, 3), MESH)
    stage = StagePlan(0, len(assignments) - 1, (replica,), assignments=assignments)
    return Plan((Pipeline((stage,), 2),))


def test_a_plan_holds_one_per_layer_and_writes_equal_ones_once() -> None:
    other = dataclasses.replace(EXAMPLE, recompute=False)
    plan = plan_of(EXAMPLE, other, None, dataclasses.replace(EXAMPLE))
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert text.count('"gathered_once"') == 2


def test_a_plan_without_assignments_is_written_as_before() -> None:
    stage = StagePlan(0, 1, (Replica("a", (0,), (("data", 1),)),))
    assert "assignments" not in Plan((Pipeline((stage,), 1),)).to_json()


@pytest.mark.parametrize("layers", [1, 3])
def test_a_stage_needs_one_per_layer(layers: int) -> None:
    replica = Replica("a", (0, 1, 2, 3), MESH)
    with pytest.raises(PlanError, match="HP-PLAN-LAYERS"):
        StagePlan(0, 1, (replica,), assignments=(EXAMPLE,) * layers)


def test_an_assignment_is_for_the_mesh_of_its_stage() -> None:
    replica = Replica("a", (0, 1, 2, 3), (("data", 4),))
    with pytest.raises(PlanError, match="HP-PLAN-MESH"):
        StagePlan(0, 0, (replica,), assignments=(EXAMPLE,))


WRONG = [
    ("mesh", [["data", 0]], "HP-PLAN-MESH"),
    ("operations", [{"factors": [["pipe"]], "results": []}], "HP-PLAN-MESH"),
    ("operations", [{"factors": []}], "HP-PLAN-MISSING"),
    ("stored", {"1": [["data"], ["data"]]}, "HP-PLAN-MESH"),
    ("stored", {"one": []}, "HP-PLAN-KEY"),
    ("links", [[0.0, 1.0]], "HP-PLAN-VALUE"),
    ("links", [[0.0, 0.0], [0.0, 1.0]], "HP-PLAN-VALUE"),
    ("recompute", 1, "HP-PLAN-TYPE"),
]


@pytest.mark.parametrize(("field", "value", "code"), WRONG)
def test_what_is_wrong_is_refused(field: str, value: Any, code: str) -> None:
    data = {**assignment_data(EXAMPLE), field: value}
    with pytest.raises(PlanError) as refusal:
        read_assignment(data)
    assert refusal.value.code == code
    assert field in str(refusal.value)
