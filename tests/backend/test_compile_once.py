"""Equal fragments on one mesh are compiled once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import hetpass as hp

PLAN = "a[0-1]: 0 | b[0-0]: 1 | a[0-1]: 2 | b[0-0]: 3 | a[0-1]: 4 | b[0-0]: 5"


def test_equal_stages_on_one_submesh_share_their_executables() -> None:
    keys = jax.random.split(jax.random.key(0), 7)
    params = [0.3 * jax.random.normal(k, (16, 16)) for k in keys[:6]]
    batch = jax.random.normal(keys[6], (8, 16))

    def step(params, x):
        def loss(params):
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    parallel = hp.het_parallelize(
        step, cluster=hp.Cluster.emulated({"a": 2, "b": 1}), num_microbatches=2, donate_argnums=()
    )
    traced = parallel.trace(params, batch)
    assert traced.plan().layered.num_layers == 6
    compiled = traced.with_plan(PLAN).compile()
    calls = {
        (e.program.stage, e.program.role): e.call for e in compiled.runtime.compiled.executables
    }
    assert calls[2, "forward"] is calls[4, "forward"]
    assert calls[2, "forward"] is not calls[3, "forward"]
    for want, got in zip(
        jax.tree.leaves(jax.jit(step)(params, batch)),
        jax.tree.leaves(compiled(params, batch)),
        strict=True,
    ):
        np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-7)
