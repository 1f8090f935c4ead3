"""What is merged, and what must not be."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hetpass.frontend.backward_marks import backward_marks
from hetpass.frontend.common_subexpressions import merge_common_subexpressions
from tests.frontend import layer_models as m
from tests.frontend.step_programs import step_program


def merged(step, state, batch):
    program = step_program(step, state, batch)
    return program, merge_common_subexpressions(program, backward_marks(program))


def count(program, name):
    return sum(e.primitive.name == name for e in program.region.eqns)


def forward_step(forward):
    return lambda w, batch: forward(w, batch["x"])


def test_equal_equations_are_one_and_the_rest_follows():
    def forward(w, x):
        return jnp.tanh(x @ w) + jnp.tanh(x @ w) * jnp.cos(x @ w)

    before, after = merged(forward_step(forward), m.sds(8, 8), m.vectors(8, 8))
    assert count(before, "dot_general") == 3
    assert count(after, "dot_general") == 1
    assert count(after, "tanh") == 1
    assert len(after.origin) == len(after.region.eqns)
    for eqn, source in zip(after.region.eqns, after.origin, strict=True):
        assert eqn.primitive is after.traced.jaxpr.eqns[source].primitive
    assert set(after.kinds) >= {
        *after.region.invars,
        *(v for e in after.region.eqns for v in e.outvars),
    }


def test_parameters_and_signs_of_zero_tell_equations_apart():
    def forward(w, x):
        zeros = x * 0.0, x * -0.0, x * jnp.float32("nan"), x * jnp.float32("nan")
        return sum(z.sum(0) + z.sum(1) for z in zeros)

    _, after = merged(forward_step(forward), m.sds(), m.vectors(4, 4))
    assert count(after, "mul") == 3
    assert count(after, "reduce_sum") == 6


def test_bodies_of_loops_are_compared_by_structure():
    def forward(w, x):
        def loop(scale):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) * scale, None), x, None, length=3)[0]

        return loop(2.0) + loop(2.0) + loop(3.0)

    _, after = merged(forward_step(forward), m.sds(4, 4), m.vectors(4, 4))
    assert count(after, "scan") == 2


def test_results_keep_their_names():
    def step(w, batch):
        return batch["x"] @ w, batch["x"] @ w, jnp.sin(batch["x"] @ w)

    before, after = merged(step, m.sds(4, 4), m.vectors(4, 4))
    assert len(set(after.region.outvars)) == len(before.region.outvars) == 3
    assert count(after, "dot_general") == 2, "two results, and the third product is one of them"


def test_recomputation_is_kept():
    def step(w, batch):
        block = jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w)
        return jax.value_and_grad(lambda w: block(w, batch["x"]).sum())(w)

    before, after = merged(step, m.sds(8, 8), m.vectors(8, 8))
    assert count(after, "dot_general") == count(before, "dot_general")


def test_dead_equations_are_dropped():
    def step(w, batch):
        jnp.sin(batch["x"]).sum()
        unused, used = jnp.split(batch["x"] @ w, 2, axis=1)
        del unused
        return used

    _, after = merged(step, m.sds(8, 8), m.vectors(8, 8))
    assert count(after, "sin") == 0
    assert count(after, "dot_general") == 1
