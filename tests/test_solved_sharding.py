"""Steps planned with solved shardings: run, equal jax.jit, and carry on through a saved plan."""

from __future__ import annotations

import jax
import pytest

import hetpass as hp
from hetpass.errors import TraceError
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
