"""Scatters into the features of an example, beside a matrix that a model axis cuts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp
from tests.equality import differences


@pytest.mark.parametrize("how", ["multiply", "add", "max", "min", "set"])
def test_equals_jit_on_a_model_axis(how: str) -> None:
    draw = np.random.default_rng(0)
    params = jnp.asarray(draw.normal(size=(12, 8)), jnp.float32)
    batch = {
        "x": jnp.asarray(draw.normal(size=(8, 8, 12)), jnp.float32),
        "i": jnp.asarray(draw.integers(0, 12, 8), jnp.int32),
    }

    def step(w: Any, b: Any) -> Any:
        def loss(w: Any) -> Any:
            x = b["x"]
            h = x + jax.vmap(lambda row, k: getattr(row.at[..., k], how)(2.0))(x, b["i"])
            return (jnp.tanh(h @ w) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value, grads

    expected = jax.jit(step)(params, batch)
    cluster = hp.Cluster.emulated({"a": 4})
    for count, text in ((8, "a(data=1,model=4): 0"), (2, "a(data=2,model=2): 0")):
        parallel = hp.het_parallelize(
            step, cluster=cluster, num_microbatches=count, donate_argnums=()
        )
        traced = parallel.trace(params, batch)
        last = traced.plan().num_layers - 1
        compiled = traced.with_plan(text.replace(": 0", f": 0-{last}")).compile()
        assert differences(compiled(params, batch), expected) == [], text
