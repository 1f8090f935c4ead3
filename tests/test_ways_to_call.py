"""Calls that a user may try: by keyword, transformed, without a cluster, arrays laid out anyhow."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import hetpass as hp
from tests.equality import assert_equal


def _step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch["x"] @ p) ** 2))(params)
    return params - 0.1 * grads, loss


def _arguments():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (6, 6)), {"x": jax.random.normal(keys[1], (8, 6))}


def _parallel():
    return hp.het_parallelize(
        _step, cluster=hp.Cluster.emulated({"a": 1}), num_microbatches=4, donate_argnums=()
    )


def test_the_batch_by_keyword_is_the_batch():
    params, batch = _arguments()
    expected = jax.jit(_step)(params, batch)
    for args, kwargs in (((params,), {"batch": batch}), ((), {"params": params, "batch": batch})):
        traced = _parallel().trace(*args, **kwargs)
        assert traced.program.batch_size == 8
        assert traced.plan().layered.program.num_microbatches == 4
        for want, got in zip(expected, _parallel()(*args, **kwargs), strict=True):
            np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: jax.grad(lambda p, b: f(p, b)[1])])
def test_a_transformation_of_the_compiled_step_is_refused(transform):
    with pytest.raises(hp.HetpassError, match="HP-RUN-TRACED"):
        transform(_parallel())(*_arguments())


def test_a_cluster_that_is_none_is_refused():
    with pytest.raises(hp.HetpassError, match="HP-CLUSTER-TYPE"):
        hp.het_parallelize(_step, cluster="mixed.toml")


@pytest.mark.parametrize(
    "draw",
    [
        lambda key, b: jax.random.gamma(key, 0.4, (b.shape[0], 1)),
        lambda key, b: jax.random.gamma(key, 1 + b[:, :1] ** 2),
        lambda key, b: jax.random.beta(key, 0.5, 0.5, (b.shape[0], 1)),
        lambda key, b: jax.random.dirichlet(key, jnp.ones(6), (b.shape[0],)),
    ],
)
def test_draws_of_one_key_differ_between_microbatches(draw):
    params, batch = _arguments()

    def step(params, batch):
        drawn = draw(jax.random.key(3), batch["x"])
        return jax.grad(lambda p: jnp.mean(jnp.tanh((batch["x"] * drawn) @ p) ** 2))(params), drawn

    parallel = hp.het_parallelize(
        step, cluster=hp.Cluster.emulated({"a": 1}), num_microbatches=4, donate_argnums=()
    )
    for want, got in zip(jax.jit(step)(params, batch), parallel(params, batch), strict=True):
        np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-6)


def test_a_batch_by_keyword_alone_is_named_in_the_way_out():
    def step(params, *, batch):
        return _step(params, batch)

    cluster = hp.Cluster.emulated({"a": 1})
    params, batch = _arguments()
    with pytest.raises(hp.HetpassError, match="HP-SPLIT-PROBE") as refused:
        hp.het_parallelize(step, cluster=cluster, num_microbatches=4)(params, batch=batch)
    assert "hp.Options(batch_axes={'batch': 0}) if batch is it" in refused.value.ways_out
    options = hp.Options(batch_axes={"batch": 0})
    parallel = hp.het_parallelize(
        step, cluster=cluster, num_microbatches=4, options=options, donate_argnums=()
    )
    assert_equal(parallel(params, batch=batch), jax.jit(step)(params, batch=batch))


def _columns_first(tree):
    """The same numbers, laid out column by column, as a `jit` with such a layout returns them."""
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.device_put(a, Format(Layout((1, 0)), device)), tree)


@pytest.mark.parametrize("groups", [{"a": 1}, {"a": 2, "b": 1}])
@pytest.mark.parametrize("donated", [(), (0,)])
def test_arrays_may_be_laid_out_in_any_way(groups, donated):
    draw = np.random.default_rng(0)
    state = [jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((8, 6), (6, 8))]
    batch = jnp.asarray(draw.normal(size=(16, 8)), jnp.float32)

    def step(state, batch):
        def loss_fn(state):
            return jnp.mean(jnp.tanh(jnp.tanh(batch @ state[0]) @ state[1]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], loss

    expected = jax.jit(step)(state, batch)
    parallel = hp.het_parallelize(
        step, cluster=hp.Cluster.emulated(groups), num_microbatches=4, donate_argnums=donated
    )
    assert_equal(parallel(_columns_first(state), _columns_first(batch)), expected)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_arrays_may_lie_on_any_mesh(axes):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axes,), devices=jax.devices()[4:8])
    draw = np.random.default_rng(0)
    state = [draw.normal(size=s).astype(np.float32) for s in ((8, 8), (8, 8))]
    batch = draw.normal(size=(16, 8)).astype(np.float32)

    def step(state, batch):
        def loss_fn(state):
            return jnp.mean(jnp.tanh(jnp.tanh(batch @ state[0]) @ state[1]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], loss

    def rows(tree):
        return jax.device_put(tree, NamedSharding(mesh, PartitionSpec("d")))

    parallel = hp.het_parallelize(
        step, cluster=hp.Cluster.emulated({"a": 2, "b": 1}), num_microbatches=4
    )
    assert_equal(parallel(rows(state), rows(batch)), jax.jit(step)(state, batch))


def test_requests_of_shardings_and_layouts_change_no_number():
    """They name devices and arrays that the step no longer has; the plan shards."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    draw = np.random.default_rng(0)
    weights = jnp.asarray(draw.normal(size=(8, 8)), jnp.float32)
    batch = jnp.asarray(draw.normal(size=(16, 8)), jnp.float32)

    def asked(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("d")))
        return with_layout_constraint(x, Layout((1, 0)))

    def step(asked, weights, batch):
        def loss_fn(weights):
            return jnp.mean(asked(jnp.tanh(asked(batch @ asked(weights)))) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return asked(weights - 0.1 * grads), {"loss": loss, "grads": asked(grads)}

    parallel = hp.het_parallelize(
        partial(step, asked), cluster=hp.Cluster.emulated({"a": 2, "b": 1}), num_microbatches=4
    )
    expected = jax.jit(partial(step, lambda x: x))(weights, batch)
    assert_equal(parallel(weights, batch), expected)
