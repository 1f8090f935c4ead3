"""Any legal assignment computes what `jax.jit` does, and compiles to what it was priced with.

(`benchmarks/assignments.py` draws a hundred, and whole GPT layers.)
"""

from __future__ import annotations

import dataclasses
import random

import jax
import pytest

from hetpass.errors import PlanError
from tests.backend.assigned_cases import (
    CASES,
    MESHES,
    assigned_plan,
    blocks,
    drawn,
    layered,
    outcome,
    scanned,
)
from tests.equality import assert_equal

CHOSEN = [(name, k) for k, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "seed"), CHOSEN)
def test_drawn_assignments_equal_jit(name: str, seed: int) -> None:
    case = CASES[name]()
    source = layered(case, 2)
    rng = random.Random(seed)
    mesh = MESHES[(seed + 1) % len(MESHES)]
    (own,) = drawn(source, [mesh], rng)
    result = outcome(case, assigned_plan(source, [("a", mesh, own)]), {"a": 8})
    assert_equal(result, jax.jit(case.step)(case.state, case.batch))


@pytest.mark.parametrize(
    ("recompute", "schedule"), [("full", "1f1b"), ("none", "zb-h1")], ids=["recompute", "weights"]
)
def test_stages_with_and_without_assignments(recompute: str, schedule: str) -> None:
    """Residuals, boundaries and parameters follow the assignment of the stage that they are on."""
    case = blocks() if recompute == "full" else scanned()
    source = layered(case, 2)
    meshes = ((("data", 2), ("model", 2)), (("data", 4),))
    first, _ = drawn(source, meshes, random.Random(7))
    stages = [("a", meshes[0], first), ("b", meshes[1], None)]
    plan = assigned_plan(source, stages, recompute=recompute, schedule=schedule)
    result = outcome(case, plan, {"a": 4, "b": 4})
    assert_equal(result, jax.jit(case.step)(case.state, case.batch))


def test_an_assignment_of_another_program_is_refused() -> None:
    case = blocks()
    source = layered(case, 2)
    mesh = MESHES[0]
    (own,) = drawn(source, [mesh], random.Random(0))
    short = tuple(dataclasses.replace(a, operations=a.operations[:-1]) for a in own)
    with pytest.raises(PlanError, match="HP-PLAN-ASSIGNMENT"):
        outcome(case, assigned_plan(source, [("a", mesh, short)]), {"a": 8})


def test_equal_layers_of_one_scan_have_one_assignment() -> None:
    case = scanned()
    source = layered(case, 2)
    mesh = MESHES[0]
    one, other = drawn(source, [mesh, mesh], random.Random(1))
    plan = assigned_plan(source, [("a", mesh, one)])
    (stage,) = plan.pipelines[0].stages
    mixed = (other[source.layer_kinds[0]], *stage.assignments[1:])
    stage = dataclasses.replace(stage, assignments=mixed)
    pipeline = dataclasses.replace(plan.pipelines[0], stages=(stage,))
    with pytest.raises(PlanError, match="HP-PLAN-ASSIGNMENT"):
        outcome(case, dataclasses.replace(plan, pipelines=(pipeline,)), {"a": 8})
