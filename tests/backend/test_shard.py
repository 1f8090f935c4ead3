"""The default rule, overrides and refusals."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hetpass._jax import ShapedArray
from hetpass.backend.shard import (
    slot_sharding,
    slot_specs,
    stage_meshes,
    stage_replicas,
    stored_aval,
)
from hetpass.errors import PlanError
from hetpass.ir.kinds import Batched, Partial, Whole
from hetpass.ir.plan import Plan, Replica
from hetpass.ir.program import Slot
from tests.backend.handmade import mlp, plan_of

WHOLE = Whole()
BOTH = Replica("g", (0, 1, 2, 3, 4, 5), (("data", 2), ("model", 3)))


def slot(shape, kind=WHOLE, scope="step", stacked=False, dtype=np.float32):
    return Slot(0, 0, ShapedArray(shape, dtype), scope, kind, stacked, "v")


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (slot((4, 8), Batched(0), "microbatch"), P("data", None)),
        (slot((8, 4), Batched(1), "microbatch"), P(None, "data")),
        (slot((3, 8), Batched(0), "microbatch"), P(None, None)),
        (slot((4, 8), Batched(0, outer=2), "microbatch"), P(None, None)),
        (slot((4, 8), Batched(0), stacked=True), P(None, "data", None)),
        (slot((6, 9)), P(None, "model")),
        (slot((9, 6)), P("model", None)),
        (slot((6, 6)), P(None, "model")),
        (slot((9, 10)), P("model", None)),
        (slot((8, 10)), P(None, None)),
        (slot((9,)), P(None)),
        (slot((6, 9), dtype=np.int32), P(None, None)),
        (slot((6, 9), scope="microbatch"), P(None, None)),
        (slot((6, 9), Partial("sum")), P("data", None, "model")),
        (slot((), Partial("max")), P("data")),
        (slot(()), P()),
    ],
)
def test_default_rule(value, spec):
    assert slot_sharding(value, BOTH) == spec


def test_stored_shapes():
    assert stored_aval(slot((4, 8), Batched(0), stacked=True), BOTH, 5).shape == (5, 4, 8)
    assert stored_aval(slot((4, 8), Partial()), BOTH, 5).shape == (2, 4, 8)
    alone = Replica("g", (0,), ())
    assert stored_aval(slot((4, 8), Partial()), alone, 5).shape == (4, 8)


def test_overrides():
    assert slot_sharding(slot((4, 8)), BOTH, (("data",), ())) == P("data", None)
    both = slot_sharding(slot((6, 8)), BOTH, (("data", "model"), ()))
    assert both == P(("data", "model"), None)
    # An accumulator's parts already lie along the data axis.
    assert slot_sharding(slot((6, 8), Partial()), BOTH, (("data", "model"), ())) == P(
        "data", "model", None
    )


@pytest.mark.parametrize(
    "override",
    [((),), (("pipe",), ()), (("data",), ("data",)), ((), ("model",))],
    ids=["rank", "axis", "twice", "indivisible"],
)
def test_bad_overrides_are_refused(override):
    with pytest.raises(PlanError) as caught:
        slot_sharding(slot((4, 8)), BOTH, override)
    assert caught.value.code == "HP-PLAN-SHARDING"


def test_an_indivisible_microbatch_is_refused_with_legal_values():
    plan = plan_of((("data", 4),), (), microbatches=4)
    with pytest.raises(PlanError) as caught:
        stage_replicas(mlp(2, 4).staged, plan)  # b = 6
    assert caught.value.code == "HP-PLAN-DATA-AXIS"
    text = str(caught.value)
    assert "2, 3, 6" in text
    assert "16, 32" in text  # batches


def test_plans_for_something_else_are_refused():
    staged = mlp(2, 1).staged
    two = plan_of((), ())
    (pipeline,) = two.pipelines
    with pytest.raises(PlanError, match="HP-PLAN-STAGES"):
        stage_replicas(staged, plan_of(()))
    with pytest.raises(PlanError, match="HP-PLAN-PIPELINES"):
        stage_replicas(staged, Plan((pipeline, pipeline)))
    first = pipeline.stages[0]
    doubled = dataclasses.replace(first, replicas=(*first.replicas, Replica("h", (0,), ())))
    stages = (doubled, pipeline.stages[1])
    with pytest.raises(PlanError, match="HP-PLAN-REPLICAS"):
        stage_replicas(staged, Plan((dataclasses.replace(pipeline, stages=stages),)))
    replicas = stage_replicas(staged, two)
    with pytest.raises(PlanError, match="HP-PLAN-GROUP"):
        stage_meshes(replicas, {"g0": jax.devices()})
    with pytest.raises(PlanError, match="HP-PLAN-DEVICE"):
        stage_meshes(replicas, {"g0": jax.devices(), "g1": []})


def test_state_comes_back_as_it_went_in():
    staged = mlp(2, 2).staged
    plan = plan_of((("model", 2),), (("data", 2),))
    first = dataclasses.replace(plan.pipelines[0].stages[0], shardings={"w0": (("model",), ())})
    stages = (first, plan.pipelines[0].stages[1])
    plan = Plan((dataclasses.replace(plan.pipelines[0], stages=stages),))
    found = slot_specs(staged, plan, stage_replicas(staged, plan))
    by_name = {s.name: found[s.index] for s in staged.slots}
    assert by_name["w0"] == P("model", None)
    assert by_name["w0+"] == by_name["w0"]
    assert by_name["w1+"] == by_name["w1"]
