"""A scalar that a scan over layers carries and sums over the batch: it crosses every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hetpass as hp
from tests.equality import differences

CLUSTER = {"fast": 3, "slow": 2, "odd": 1}
WIDTH, LAYERS, BATCH = 6, 6, 16

PLANS = (
    "fast[2]: 0-2 | odd: 3-5",
    "odd: 0-2 | slow: 3-5",
    "slow: 0-0 | odd: 1-2 | fast[2]: 3-5",
    "odd: 0-0 | fast[2](data=2,model=1): 1-3 | slow[1]: 4-5",
    "fast[2]: 0-2 | slow: 3-5",
)


def _penalty(p: Any, b: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        h = jnp.tanh(carry[0] @ w)
        return (h, carry[1] + jnp.mean(h**2)), None

    (h, penalty), _ = lax.scan(layer, (b["x"], 0.0), p)
    return jnp.mean((h - b["y"]) ** 2) + 0.1 * penalty, penalty


def _penalty_alone(p: Any, b: Any) -> Any:
    """Its start is an array that the step makes."""

    def layer(carry: Any, w: Any) -> Any:
        h = jnp.tanh(carry[0] @ w)
        return (h, carry[1] + jnp.mean(h**2)), None

    (_, penalty), _ = lax.scan(jax.checkpoint(layer), (b["x"], jnp.zeros(())), p)
    return penalty, ()


def _counter(p: Any, b: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        h = jnp.tanh(carry[0] @ w)
        return (h, carry[1] + (h > 0).sum()), None

    (h, count), _ = lax.scan(layer, (b["x"], jnp.int32(0)), p)
    return jnp.mean((h - b["y"]) ** 2), count


def _step(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(p: Any, b: Any) -> Any:
        value, grads = jax.value_and_grad(loss, has_aux=True)(p, b)
        return p - 0.1 * grads, value, grads

    return step


def _arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    params, x, y = (
        jnp.asarray(draw.normal(size=shape), jnp.float32)
        for shape in ((LAYERS, WIDTH, WIDTH), (BATCH, WIDTH), (BATCH, WIDTH))
    )
    return 0.4 * params, {"x": x, "y": y}


@pytest.mark.parametrize("loss", [_penalty, _penalty_alone, _counter])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_equals_jit_whatever_the_data_axes(loss: Callable[..., Any], num_microbatches: int) -> None:
    step, arguments = _step(loss), _arguments()
    parallel = hp.het_parallelize(
        step,
        cluster=hp.Cluster.emulated(CLUSTER),
        num_microbatches=num_microbatches,
        donate_argnums=(),
    )
    traced = parallel.trace(*arguments)
    expected = jax.jit(step)(*arguments)
    for text in PLANS:
        actual = traced.with_plan(text).compile()(*arguments)
        assert differences(actual, expected) == [], text
