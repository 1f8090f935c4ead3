"""Steps planned with solved shardings: run, equal jax.jit, and carry on through a saved plan."""

from __future__ import annotations

import jax
import pytest

import hetpass as hp
from hetpass.cost.analytic import ASSUMED
from hetpass.errors import TraceError
from hetpass.planner.evaluate import evaluate
from tests.equality import differences
from tests.small_gpt import training

GPT = training("linen")


@pytest.fixture(scope="module")
def planned() -> hp.Planned:
    """A GPT on groups of 4 and 2."""
    cluster = hp.Cluster.emulated({"fast": 4, "slow": 2}, speeds={"slow": 0.5})
    step = hp.het_parallelize(
        GPT.step,
        cluster=cluster,
        num_microbatches=2,
        donate_argnums=(),
        options=hp.Options(sharding="solved"),
    )
    return step.trace(GPT.state(), next(GPT.batches())).plan()


def test_a_solved_plan_equals_jit(planned: hp.Planned) -> None:
    state, batch = GPT.state(), next(GPT.batches())
    stages = planned.plan.pipelines[0].stages
    assert all(len(s.assignments) == s.last_layer - s.first_layer + 1 for s in stages)
    assert max(len(r.devices) for s in stages for r in s.replicas) > 1
    found = planned.search
    assert found is not None
    evaluation = evaluate(planned.plan, planned.facts, planned.traced.cluster, ASSUMED)
    assert evaluation.step_s == pytest.approx(found.best.step_s, rel=1e-6)  # at the solver's costs
    for other in found.rejected:
        theirs = evaluate(other.plan, planned.facts, planned.traced.cluster, ASSUMED)
        assert theirs.step_s == pytest.approx(other.step_s, rel=1e-6)
    expected = jax.jit(GPT.step)(state, batch)
    assert differences(planned.compile()(state, batch), expected) == []


def test_a_solved_plan_survives_its_file(planned: hp.Planned) -> None:
    text = planned.plan.to_json()
    again = hp.Plan.from_json(text)
    assert again == planned.plan
    assert again.to_json() == text
    bound = planned.traced.with_plan(again)
    assert bound.plan.pipelines[0].stages == planned.plan.pipelines[0].stages


def test_an_unknown_sharding_is_refused() -> None:
    with pytest.raises(TraceError) as caught:
        hp.Options(sharding="guessed")  # type: ignore[arg-type]
    assert caught.value.code == "HP-TRACE-OPTION"
    assert '"solved"' in caught.value.ways_out


def test_written_stages_and_those_of_a_baseline_get_shardings(planned: hp.Planned) -> None:
    traced, last = planned.traced, planned.num_layers - 1
    written = traced.with_plan(f"fast(data=2,model=2): 0-1 | slow: 2-{last}")
    stages = written.plan.pipelines[0].stages
    assert [(s.first_layer, s.last_layer) for s in stages] == [(0, 1), (2, last)]
    assert all(len(s.assignments) == s.last_layer - s.first_layer + 1 for s in stages)
    state, batch = GPT.state(), next(GPT.batches())
    expected = jax.jit(GPT.step)(state, batch)
    assert differences(written.compile()(state, batch), expected) == []
    passes: list[str] = []
    even = hp.het_parallelize(
        GPT.step,
        cluster=traced.cluster,
        num_microbatches=2,
        plan="even",
        options=hp.Options(sharding="solved", observer=lambda done: passes.append(done.name)),
    ).trace(GPT.state(), next(GPT.batches()))
    plain = hp.het_parallelize(
        GPT.step, cluster=traced.cluster, num_microbatches=2, plan="even"
    ).trace(GPT.state(), next(GPT.batches()))
    solved_stages = even.plan().plan.pipelines[0].stages
    assert any(stage.assignments for stage in solved_stages)
    assert passes.count("plan") == passes.count("shard") == 1
    assert [(s.first_layer, s.last_layer) for s in solved_stages] == [
        (s.first_layer, s.last_layer) for s in plain.plan().plan.pipelines[0].stages
    ]


def test_stages_that_shardings_are_not_solved_for_are_told(planned: hp.Planned) -> None:
    last = planned.num_layers - 1
    written = planned.traced.with_plan(f"fast[2](data=1,model=2): 0-1 | slow: 2-{last}")
    (note,) = [n for n in written.notes if "not solved" in n]
    assert note.startswith("stage 0")
    assert "model" in note
