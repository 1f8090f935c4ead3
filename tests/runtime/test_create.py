"""A state that is born in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetpass.backend.compile import compile
from hetpass.runtime.create import create, input_shardings
from hetpass.runtime.local import LocalRuntime
from hetpass.schedules.make import make_schedule
from tests.backend.handmade import devices_of, mlp, plan_of
from tests.equality import relative_error

TABLE = np.linspace(0.5, 1.5, 8, dtype=np.float32)


def make_state(key):
    """Weights and biases of two stages, as the hand-made step takes them; a table is captured."""
    first, second = jax.random.split(key)
    draw = jax.jit(lambda k: jax.random.normal(k, (8, 8)) * TABLE)
    return [draw(first), draw(second)], [jnp.zeros(8), jnp.asarray(TABLE)]


def compiled(*meshes):
    step = mlp(2, 2)
    plan = plan_of(*meshes, microbatches=2)
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=2)
    return step, compile(step.staged, plan, devices_of(plan), schedule)


@pytest.mark.parametrize("meshes", [((), ()), ((("model", 2),), (("data", 2), ("model", 2)))])
def test_leaves_are_made_on_their_shardings(meshes):
    step, parts = compiled(*meshes)
    shardings = input_shardings(parts)
    assert shardings[4:] == (None, None)  # the batch is cut into microbatches
    key = jax.random.key(3)
    state = create(jax.make_jaxpr(make_state)(key), [key], shardings[:4])
    expected = jax.tree.leaves(make_state(key))
    for leaf, wanted, sharding in zip(state, expected, shardings, strict=False):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert relative_error(leaf, wanted) < 1e-6 or not np.any(wanted)
    placed = [
        feed.place(value) for feed, value in zip(LocalRuntime(parts)._feeds, state, strict=False)
    ]
    assert all(a is b for a, b in zip(placed, state, strict=True))
    LocalRuntime(parts)([*state, *step.arguments[4:]])
    assert all(leaf.is_deleted() for leaf in state)


def test_what_a_stage_does_not_need_is_not_computed_there():
    """The second stage's leaf alone reads the argument: the first never receives it."""
    _, parts = compiled((), ())
    calls = []

    def noted(x):
        return jax.pure_callback(lambda v: calls.append(1) or v, x, x)

    jaxpr = jax.make_jaxpr(lambda x: (jnp.zeros((8, 8)), noted(x)))(np.ones((8, 8), np.float32))
    shardings = [parts.shardings[0], parts.shardings[1]]
    made = create(jaxpr, [np.ones((8, 8), np.float32)], shardings)
    jax.block_until_ready(made)
    assert [next(iter(m.devices())).id for m in made] == [0, 1]
    assert len(calls) == 1
