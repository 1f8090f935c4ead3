"""Features that are indexed, beside a matrix that a model axis cuts."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp
from tests.equality import differences


def check(step: Any, params: Any, batch: Any) -> None:
    """On meshes with a model axis, also with one example per microbatch or device."""
    expected = jax.jit(step)(params, batch)
    cluster = hp.Cluster.emulated({"a": 4})
    for count, mesh in ((8, "data=1,model=4"), (2, "data=2,model=2"), (4, "data=2,model=2")):
        parallel = hp.het_parallelize(
            step, cluster=cluster, num_microbatches=count, donate_argnums=()
        )
        traced = parallel.trace(params, batch)
        last = traced.plan().num_layers - 1
        compiled = traced.with_plan(f"a({mesh}): 0-{last}").compile()
        assert differences(compiled(params, batch), expected) == [], (count, mesh)


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

    check(step, params, batch)


def scattered(how: str, x: Any, k: Any) -> Any:
    return jax.vmap(lambda row, k: getattr(row.at[..., k], how)(1.5))(x, k)


def in_scan(how: str, w: Any, b: Any) -> Any:
    """Partial sums are carried, and what is scattered into is carried beside them."""

    def body(carry: Any, k: Any) -> Any:
        x, total = carry
        x = jnp.tanh(scattered(how, x, (b["i"] + k) % 12) @ w)
        return (x, total + (x**2).sum()), x.mean()

    (x, total), means = jax.lax.scan(body, (b["x"], 0.0), jnp.arange(3))
    return total / b["x"].size + means.sum() + x.mean()


def in_fori_loop(how: str, w: Any, b: Any) -> Any:
    """The loop reads a scalar made of the batch's sums, so its results are partial."""

    def body(k: Any, x: Any) -> Any:
        return jnp.tanh(scattered(how, x, (b["i"] + k) % 12) @ w)

    return (jax.lax.fori_loop(0, 2, body, b["x"]) ** 2).mean()


def in_cond(how: str, w: Any, b: Any) -> Any:
    def one(x: Any) -> Any:
        return (scattered(how, jnp.tanh(x @ w), b["i"]) ** 2).mean()

    return jax.lax.cond(w[0, 0] > -100.0, one, lambda x: (x @ w).mean(), b["x"])


def in_checkpoint(how: str, w: Any, b: Any) -> Any:
    return jax.checkpoint(lambda x: (scattered(how, jnp.tanh(x @ w), b["i"]) ** 2).mean())(b["x"])


def gathered(how: str, w: Any, b: Any) -> Any:
    """Its gradient adds at one index per example."""
    x = jnp.tanh(b["x"] @ w)
    x = x + jax.vmap(lambda row, k: row[..., k])(x, b["i"])[..., None]
    return (jnp.tanh(x @ w) ** 2).mean()


def unrolled(how: str, w: Any, b: Any) -> Any:
    x = b["x"]
    for k in range(2):
        x = jnp.tanh(scattered(how, x, (b["i"] + k) % 12) @ w)
    return (x**2).mean()


def sliced(how: str, w: Any, b: Any) -> Any:
    """A window of features per example."""
    x = jnp.tanh(b["x"] @ w)
    part = jax.vmap(lambda row, k: jax.lax.dynamic_slice_in_dim(row, k, 3, axis=1))(x, b["i"])
    return (jnp.tanh(x @ w) ** 2).mean() + (part**2).mean()


def windowed(how: str, w: Any, b: Any) -> Any:
    """A window of positions per example, beyond the end of some; a matrix takes it on."""
    x = jnp.tanh(b["x"] @ w)
    part = jax.vmap(lambda row, k: jax.lax.dynamic_slice_in_dim(row, k, 3))(x, b["i"])
    return (jnp.tanh(part.reshape(-1, 36) @ jnp.tile(w, (3, 1))) ** 2).mean()


def sliced_alike(how: str, w: Any, b: Any) -> Any:
    """One window for all, which the parameters say; it may lie beyond the end."""
    x = jnp.tanh(b["x"] @ w)
    start = jnp.int32(w[0, 0] * 40)
    part = jax.lax.dynamic_slice_in_dim(x, start, 3, axis=2)
    x = jax.lax.dynamic_update_slice_in_dim(x, part + 1.0, start // 2, axis=2)
    return (jnp.tanh(x @ w) ** 2).mean() + (part**2).mean()


LOSSES = [in_scan, in_fori_loop, in_cond, in_checkpoint, unrolled]


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        *itertools.product(LOSSES, ["multiply", "max", "set"]),
        *((f, "") for f in (gathered, sliced, sliced_alike, windowed)),
    ],
)
def test_anywhere_equals_jit_on_a_model_axis(loss: Any, how: str) -> None:
    """Also in loops that make partial sums, and with one example per microbatch or device."""
    draw = np.random.default_rng(0)
    params = jnp.asarray(draw.normal(size=(12, 12), scale=0.4), jnp.float32)
    batch = {
        "x": jnp.asarray(draw.normal(size=(8, 4, 12)), jnp.float32),
        "i": jnp.asarray(draw.integers(0, 12, 8), jnp.int32),
    }

    def step(w: Any, b: Any) -> Any:
        value, grads = jax.value_and_grad(lambda w: loss(how, w, b))(w)
        return w - 0.1 * grads, value, grads

    check(step, params, batch)
