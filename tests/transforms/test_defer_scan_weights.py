"""Backward scans over layers, cut in two: cotangents in B, weight gradients in W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hetpass as hp
from hetpass.ir.program import Staged
from hetpass.ir.verify import verify
from hetpass.transforms.partition import partition
from tests.transforms.build import random_tree
from tests.transforms.interpreter import assert_equal, run

BATCH, WIDTH, DEPTH = 8, 24, 6

Body = Callable[[Any, Any], tuple[Any, Any]]


def plain(h: Any, layer: Any) -> tuple[Any, Any]:
    return h + jnp.tanh(h @ layer["w"] + layer["b"]), None


def two_products(h: Any, layer: Any) -> tuple[Any, Any]:
    inner = jnp.tanh(h @ layer["w"])
    return h + jnp.sin(inner @ layer["v"]) * inner, None


def scaled(h: Any, layer: Any) -> tuple[Any, Any]:
    """The cotangent that comes in is what the weight gradient reads."""
    return h * layer["b"] + 1.0, None


def step_of(body: Body) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        def loss_of(p: Any) -> Any:
            h = batch["x"] @ p["embed"]
            h, _ = jax.lax.scan(body, h, p["layers"])
            return ((h @ p["head"] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads, loss

    return step


def arguments(**layers: tuple[int, ...]) -> tuple[Any, Any]:
    shapes = {k: (DEPTH, *shape) for k, shape in layers.items()}
    params = random_tree({"embed": (WIDTH, WIDTH), "head": (WIDTH, WIDTH), **shapes})
    params = {k: 0.3 * v for k, v in params.items()}
    stacked = {k: params.pop(k) for k in layers}
    rows = random_tree({"x": (BATCH, WIDTH), "y": (BATCH, WIDTH)}, 1)
    return {**params, "layers": stacked}, rows


def partitioned(body: Body, given: tuple[Any, Any], stages: int, schedule: str) -> Staged:
    """Checked against the step itself, in the interpreter."""
    cluster = hp.Cluster.emulated({f"g{i}": 1 for i in range(stages)})
    work = hp.het_parallelize(step_of(body), cluster=cluster, num_microbatches=4, plan="even")
    planned = work.trace(*given).plan(schedule=schedule)
    staged = partition(planned.layered, planned.plan)
    verify(staged)
    expected = jax.tree.leaves(step_of(body)(*given))
    assert_equal(run(staged, jax.tree.leaves(given)), expected, 1e-4)
    return staged


def products(staged: Staged, role: str) -> list[int]:
    """Per stage, matrix products in the scans of its fragment."""
    counts = []
    for fragment in sorted(staged.fragments, key=lambda f: f.stage):
        if fragment.role == role:
            scans = [e for e in fragment.jaxpr.eqns if e.primitive.name == "scan"]
            counts.append(sum(str(e.params["jaxpr"]).count("dot_general") for e in scans))
    return counts


W, V, B = (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("body", "layers", "count"),
    [(plain, {"w": W, "b": B}, 1), (two_products, {"w": W, "v": V}, 2), (scaled, {"b": B}, 0)],
)
def test_half_of_the_products_wait(body, layers, count, stages):
    given = arguments(**layers)
    together = partitioned(body, given, stages, "1f1b")
    assert set(products(together, "backward")) == {2 * count}
    apart = partitioned(body, given, stages, "zb-h1")
    assert set(products(apart, "backward")) == {count}
    assert set(products(apart, "weight")) == {count}


def test_a_rematerialized_body():
    body = jax.checkpoint(two_products)
    staged = partitioned(body, arguments(w=W, v=V), 2, "zb-h1")
    assert products(staged, "weight") == [2, 2]
    assert products(staged, "backward") == [4, 4]


def test_a_weight_that_every_iteration_shares_is_summed_in_b():
    """Its gradient is a carry, not rows."""
    params, rows = arguments(w=W)

    def step(params: Any, batch: Any) -> Any:
        def loss_of(p: Any) -> Any:
            def body(h: Any, layer: Any) -> tuple[Any, Any]:
                return jnp.tanh(h @ layer["w"]) @ p["head"], None

            h, _ = jax.lax.scan(body, batch["x"], p["layers"])
            return ((h - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return grads, loss

    cluster = hp.Cluster.emulated({"a": 1, "b": 1})
    work = hp.het_parallelize(
        step, cluster=cluster, num_microbatches=2, donate_argnums=(), plan="even"
    )
    planned = work.trace(params, rows).plan(schedule="zb-h2")
    staged = partition(planned.layered, planned.plan)
    verify(staged)
    assert_equal(
        run(staged, jax.tree.leaves((params, rows))),
        jax.tree.leaves(step(params, rows)),
        1e-4,
    )
