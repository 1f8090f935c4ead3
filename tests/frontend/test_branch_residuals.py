"""Branches differentiated at a batch as large as a width: residuals that JAX merges by shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hetpass as hp
from hetpass import _jax
from hetpass.frontend.branch_residuals import residuals_apart
from hetpass.frontend.inline import inline
from hetpass.frontend.probes import ProbeMismatch, compare
from tests.equality import assert_equal

WIDTH = 8


def _branches(w):
    return [
        lambda h: h,
        lambda h: jnp.sin(h @ (2 * w)),  # keeps a matrix and an activation
        lambda h: 0.5 * jnp.tanh(h) * jnp.cos(h),  # keeps two activations
    ]


def _switched(index, w, h):
    return h + lax.switch(index, _branches(w), h)


def _checkpointed(index, w, h):
    return jax.checkpoint(lambda h: h + lax.switch(index, _branches(w), h))(h)


def _step(block, state, batch):
    def loss_fn(params):
        h = batch["x"]
        for n, w in enumerate(params):
            h = block((state["count"] + n) % 3, w, h)
        return jnp.mean(h**2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    new = [p - 0.1 * g for p, g in zip(state["params"], grads, strict=True)]
    return {"params": new, "count": state["count"] + 1}, {"loss": loss, "grads": grads}


def _in_a_scan(state, batch):
    def layer(h, w):
        return h + lax.cond(w[0, 0] > 0, _branches(w)[1], _branches(w)[2], h), None

    def loss_fn(params):
        return jnp.mean(lax.scan(layer, batch["x"], jnp.stack(params))[0] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    new = [p - 0.1 * g for p, g in zip(state["params"], grads, strict=True)]
    return {"params": new, "count": state["count"] + 1}, {"loss": loss, "grads": grads}


def switched(state, batch):
    return _step(_switched, state, batch)


def checkpointed(state, batch):
    return _step(_checkpointed, state, batch)


def arguments(examples, layers=3):
    keys = jax.random.split(jax.random.key(0), layers + 1)
    params = [0.4 * jax.random.normal(k, (WIDTH, WIDTH)) for k in keys[1:]]
    x = jax.random.normal(keys[0], (examples, WIDTH))
    return {"params": params, "count": jnp.int32(1)}, {"x": x}


def flat(step, examples):
    return inline(jax.make_jaxpr(step)(*arguments(examples))).jaxpr


@pytest.mark.parametrize("step", [switched, checkpointed])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_apart_it_is_the_same_program(step, count):
    jaxpr = residuals_apart(flat(step, WIDTH))
    assert _jax.jaxpr_fault(jaxpr) == ""
    state, batch = arguments(WIDTH)
    leaves = jax.tree.leaves(({**state, "count": jnp.int32(count)}, batch))
    actual = jax.core.eval_jaxpr(jaxpr, (), *leaves)
    expected = jax.core.eval_jaxpr(flat(step, WIDTH), (), *leaves)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_apart_no_two_branches_read_the_same_residual():
    jaxpr = residuals_apart(flat(switched, WIDTH))
    made = {v for e in jaxpr.eqns if e.primitive.name == "cond" for v in e.outvars}
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            branches = [_jax.open_jaxpr(branch)[0] for branch in eqn.params["branches"]]
            for k, operand in enumerate(eqn.invars[1:]):
                users = [j for j in branches if any(j.invars[k] in e.invars for e in j.eqns)]
                if operand in made and len(users) > 1:
                    found += 1
                    assert operand.aval.shape == (WIDTH, WIDTH)
    assert found == 0


@pytest.mark.parametrize("step", [switched, checkpointed])
def test_programs_at_every_batch_correspond(step):
    compare([residuals_apart(flat(step, n)) for n in (WIDTH, 2 * WIDTH, 3 * WIDTH)])


@pytest.mark.parametrize("step", [switched, checkpointed])
def test_as_large_as_a_width_it_equals_jit(step):
    state, batch = arguments(WIDTH)
    cluster = hp.Cluster.emulated({"one": 2, "other": 1})
    parallel = hp.het_parallelize(step, cluster=cluster, num_microbatches=4, donate_argnums=())
    for _ in range(3):
        expected = jax.jit(step)(state, batch)
        actual = parallel(state, batch)
        assert_equal(actual, expected)
        state = expected[0]


def test_in_a_scan_another_batch_size_is_the_way_out():
    """The residuals go from one loop to another there, where they are not taken apart."""
    cluster = hp.Cluster.emulated({"one": 2, "other": 1})
    step = hp.het_parallelize(_in_a_scan, cluster=cluster, num_microbatches=4, donate_argnums=())
    with pytest.raises(hp.HetpassError, match="another batch size: at 8 alone") as refused:
        step(*arguments(WIDTH))
    assert refused.value.code == "HP-SPLIT-PROBE"
    larger = arguments(2 * WIDTH)
    assert_equal(step(*larger), jax.jit(_in_a_scan)(*larger))


def test_a_step_that_asks_for_the_batch_size_stays_refused():
    """Another program at this size, not another way to keep residuals."""

    def asks(state, batch):
        def block(index, w, h):
            extra = jnp.sin if h.shape[0] == WIDTH else (lambda h: h)
            return h + lax.switch(index, [lambda h: h, lambda h: extra(h @ w), jnp.tanh], h)

        return _step(block, state, batch)

    with pytest.raises(ProbeMismatch):
        compare([residuals_apart(flat(asks, n)) for n in (WIDTH, 2 * WIDTH, 3 * WIDTH)])
    step = hp.het_parallelize(
        asks, cluster=hp.Cluster.emulated({"one": 2, "other": 1}), num_microbatches=4
    )
    with pytest.raises(hp.HetpassError, match="another batch size: at 8 alone"):
        step(*arguments(WIDTH))
