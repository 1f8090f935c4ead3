"""Plans that the search finds run, and give what `jax.jit` gives."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetpass as hp
from hetpass.ir.catalogue import find_kind
from tests.equality import assert_equal
from tests.programs.models import DIM, mlp, mlp_params, normal, sgd
from tests.small_gpt import training


def slow_cluster(sizes, speed=1e-3, memory=None):
    """Devices so slow that the links of a machine are fast: then every one of them is worth using.

    `memory`: bytes of a device, by group.
    """
    cpu = find_kind("cpu")
    groups = []
    for index, (name, count) in enumerate(sizes.items()):
        factor = speed * (1 + index / 2)
        kind = replace(
            cpu,
            name=f"slow cpu {index}",
            peak_flops={d: rate * factor for d, rate in cpu.peak_flops.items()},
            memory_bandwidth=cpu.memory_bandwidth * factor,
            memory_bytes=(memory or {}).get(name, cpu.memory_bytes),
        )
        groups.append(hp.DeviceGroup(name, kind, 1, count))
    return hp.Cluster(tuple(groups), default_link=cpu.link)


def used(plan):
    return {s.replicas[0].group for s in plan.pipelines[0].stages}


def test_the_plan_found_for_groups_of_four_three_and_one_equals_jit():
    work = training(optimizer=optax.sgd(0.1), layers=3)
    state, batch = work.state(), next(work.batches(24))
    step = hp.het_parallelize(
        work.step, cluster=slow_cluster({"a": 4, "b": 3, "c": 1}), donate_argnums=()
    )
    planned = step.trace(state, batch).plan()
    assert planned.search is not None
    assert used(planned.plan) == {"a", "b", "c"}
    assert planned.plan.num_microbatches > 1
    assert_equal(planned.compile()(state, batch), jax.jit(work.step)(state, batch))


@pytest.mark.parametrize("name", ["even", "alpa", "harp", "single_group"])
def test_plans_of_baselines_run(name):
    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: ((mlp(p, batch["x"]) - batch["y"]) ** 2).mean())(
            params
        )
        return sgd(params, grads), {"loss": loss, "grads": grads}

    draw = np.random.default_rng(0)
    params = mlp_params(draw, DIM, 12, 10, 8, 4)
    batch = {"x": normal(draw, 12, DIM), "y": normal(draw, 12, 4)}
    parallel = hp.het_parallelize(
        step, cluster=slow_cluster({"a": 2, "b": 3}), plan=name, donate_argnums=()
    )
    planned = parallel.trace(params, batch).plan()
    assert planned.search is None
    if name == "even":
        assert planned.plan.num_stages == 2
    assert_equal(planned.compile()(params, batch), jax.jit(step)(params, batch))


def wide_step(params, batch):
    def loss(p):
        x = batch["x"]
        for w in p:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return sgd(params, grads), {"loss": value, "grads": grads}


def wide_arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(k, (64, 64)) / 8 for k in keys[:4]]
    return params, {"x": jax.random.normal(keys[4], (16, 64))}


def test_what_no_device_holds_is_cut_to_fit_or_refused_with_numbers():
    params, batch = wide_arguments()
    one = hp.het_parallelize(
        wide_step, cluster=slow_cluster({"a": 1}, memory={"a": 70_000}), donate_argnums=()
    )
    with pytest.raises(hp.HetpassError) as caught:
        one.trace(params, batch).plan()
    assert caught.value.code == "HP-PLAN-MEMORY"
    assert "needs" in str(caught.value)
    assert "times as much" in str(caught.value)
    memory = dict.fromkeys("abcd", 70_000)
    four = hp.het_parallelize(
        wide_step,
        cluster=slow_cluster(dict.fromkeys("abcd", 1), memory=memory),
        donate_argnums=(),
    )
    planned = four.trace(params, batch).plan()
    assert planned.plan.num_stages >= 3
    assert_equal(planned.compile()(params, batch), jax.jit(wide_step)(params, batch))


def test_another_cluster_is_planned_from_the_same_facts():
    params, batch = wide_arguments()
    passes = []
    step = hp.het_parallelize(
        wide_step,
        cluster=slow_cluster({"a": 2, "b": 1}),
        options=hp.Options(observer=lambda record: passes.append(record.name)),
    )
    traced = step.trace(params, batch)
    first = traced.plan()
    passes.clear()
    second = traced.on(slow_cluster({"a": 2, "b": 1, "c": 3})).plan()
    assert "summarize" not in passes or second.plan.num_microbatches != first.plan.num_microbatches
    assert "trace" not in passes
    assert second.search.best.step_s <= first.search.best.step_s * (1 + 1e-9)


def test_the_explanation_says_all_of_it():
    params, batch = wide_arguments()
    step = hp.het_parallelize(wide_step, cluster=slow_cluster({"a": 2, "b": 1}))
    planned = step.trace(params, batch).plan()
    text = planned.explain()
    for part in ("parameters", "FLOPs", "transfer", "limit", "bounded by stage", "<- bottleneck",
                 "rejected after simulation", "against other ways to plan", "even:", "megatron:",
                 "alpa:", "harp:", "single_group:", "0 measured", "assumed: 50%"):  # fmt: skip
        assert part in text, part
    assert "against other ways" not in str(planned)


def test_numbers_of_microbatches_that_are_refused_are_left_out():
    """A step that mixes examples has no equal in several microbatches: it is planned whole."""

    def step(params, batch):
        def loss(p):
            x = batch["x"] @ p
            return (jax.nn.softmax(x @ x.T) @ x).var()

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    params, batch = wide_arguments()[0][0], wide_arguments()[1]
    parallel = hp.het_parallelize(step, cluster=slow_cluster({"a": 2, "b": 1}), donate_argnums=())
    planned = parallel.trace(params, batch).plan()
    assert planned.plan.num_microbatches == 1
    assert any("one microbatch" in note for note in planned.notes)
    assert_equal(planned.compile()(params, batch), jax.jit(step)(params, batch))
