"""Calls that a user may try: by keyword, under a transformation, with a cluster that is none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp


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
