"""Any legal assignment computes what `jax.jit` does, and compiles to what it was priced with.

(`benchmarks/assignments.py` draws a hundred, and whole GPT layers.)
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hetpass as hp
from hetpass.analysis.operation_graph import operation_graphs
from hetpass.backend.compile import compile
from hetpass.backend.report import report
from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.errors import PlanError
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import Link
from hetpass.planner.intra_op.setting import Setting
from hetpass.planner.intra_op.solve import solve
from hetpass.planner.schedule_choice import plan_schedule
from hetpass.transforms.partition import partition
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


def test_training_goes_on_with_a_donated_state_and_an_eval_step_beside() -> None:
    case = scanned()
    source = layered(case, 2)
    mesh = MESHES[1]
    (own,) = drawn(source, [mesh], random.Random(3))
    plan = assigned_plan(source, [("a", mesh, own)])
    cluster = hp.Cluster.emulated({"a": 8})
    step = hp.het_parallelize(case.step, cluster=cluster, num_microbatches=2, plan=plan)

    def evaluate(state: Any, batch: Any) -> Any:
        return (batch @ state[0]).sum(-1)

    beside = step.companion(evaluate)
    state, expected = jax.tree.map(jnp.array, case.state), case.state
    for _ in range(3):
        state, *found = step(state, case.batch)
        expected, *wanted = jax.jit(case.step)(expected, case.batch)
        assert_equal(found, wanted)
        assert_equal(beside(state, case.batch), jax.jit(evaluate)(expected, case.batch))
    assert_equal(state, expected)


@pytest.mark.parametrize("name", ["blocks", "scanned"])
def test_solved_assignments_compile_as_priced(name: str) -> None:
    """By kind, bytes and axes, in loops too; `compiled.report()` has nothing to tell."""
    case = CASES[name]()
    source = layered(case, 2)
    links = (Link(1e-8, 5e10), Link(1e-8, 1e11))
    mesh = LinkedMesh(MESHES[1], links)
    setting = Setting(mesh, find_kind("cpu"), num_microbatches=2)
    answers = [solve(graph, setting) for graph in operation_graphs(source)]
    own = tuple(answer.assignment for answer in answers if answer is not None)
    staged = partition(source, plan := assigned_plan(source, [("a", MESHES[1], own)]))
    schedule = plan_schedule(plan, has_backward=True, num_microbatches=2)
    compiled = compile(staged, plan, {"a": jax.devices()[:8]}, schedule)
    asked = [e for x in compiled.executables for e in x.program.emitted()]
    assert sum(e.count for e in asked) > 5
    assert [str(d) for r in report(compiled) for d in r.differences] == []


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
