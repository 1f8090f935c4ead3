"""One small step at every level, made by the passes themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


def small_step(state, batch):
    """Two layers, a bias computed once, a norm of all gradients, errors per example, a counter."""
    import jax
    import jax.numpy as jnp

    def loss_fn(p):
        hidden = jnp.tanh(batch["x"] @ p["w1"])
        hidden = jnp.tanh(hidden @ p["w2"] + jnp.exp(jnp.sin(p["b"])))
        errors = hidden @ p["w3"] - batch["y"]
        return jnp.mean(errors**2), errors

    (loss, errors), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["p"])
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    params = jax.tree.map(lambda p, g: p - 0.1 * g / norm, state["p"], grads)
    return {"p": params, "n": state["n"] + 1}, {"loss": loss, "errors": errors}


def small_arguments():
    import jax
    import jax.numpy as jnp

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"w1": array(4, 8), "w2": array(8, 8), "b": array(8), "w3": array(8, 2)}
    state = {"p": params, "n": jax.ShapeDtypeStruct((), jnp.int32)}
    return state, {"x": array(8, 4), "y": array(8, 2)}


@pytest.fixture(scope="session")
def values():
    """traced, program, layered, staged of the small step: M = 4, two stages."""
    from hetpass.frontend.microbatch import split
    from hetpass.frontend.segment import segment
    from hetpass.frontend.trace import trace
    from hetpass.ir.cluster import Cluster
    from hetpass.ir.plan import Plan
    from hetpass.transforms.partition import partition

    traced = trace(small_step, small_arguments(), {}, arg_names=("state", "batch"))
    program = split(traced, 4)
    layered = segment(program)
    last = layered.num_layers - 1
    plan = Plan.parse(
        f"a: 0-{last - 1} | b: {last}",
        cluster=Cluster.emulated({"a": 2, "b": 1}),
        num_layers=layered.num_layers,
        num_microbatches=4,
    )
    staged = partition(layered, plan)
    return SimpleNamespace(traced=traced, program=program, layered=layered, staged=staged)


@pytest.fixture(scope="session")
def scanned():
    """The Layered of a scan over four equal layers, M = 2."""
    import jax
    import jax.numpy as jnp

    from hetpass.frontend.microbatch import split
    from hetpass.frontend.segment import segment
    from hetpass.frontend.trace import trace

    def step(weights, batch):
        def loss_fn(w):
            hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, w)
            return jnp.sum(hidden**2)

        return jax.value_and_grad(loss_fn)(weights)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 8, 8), (4, 8))]
    return segment(split(trace(step, shapes, {}, arg_names=("weights", "batch")), 2))
