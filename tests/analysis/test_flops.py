"""FLOPs and bytes against closed forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from hetpass._jax import open_jaxpr
from hetpass.analysis.flops import (
    aval_bytes,
    jaxpr_bytes,
    jaxpr_flops,
    jaxpr_matmul_flops,
)


def traced(fun, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.float32) if isinstance(s, tuple) else s for s in shapes]
    return open_jaxpr(jax.make_jaxpr(fun)(*args))[0]


dims = st.integers(1, 7)


@settings(deadline=None, max_examples=25)
@given(dims, dims, dims, dims)
def test_dot_is_two_flops_per_multiply_add(b, m, k, n):
    jaxpr = traced(lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), (b, m, k), (b, k, n))
    assert jaxpr_matmul_flops(jaxpr) == 2 * b * m * k * n


@pytest.mark.parametrize(("groups", "batch_groups"), [(1, 1), (2, 1), (1, 2)])
def test_convolution(groups, batch_groups):
    n, size, cin, cout = 4, 6, 4, 8

    def fun(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
            batch_group_count=batch_groups,
        )

    jaxpr = traced(fun, (n, size, size, cin), (3, 3, cin // groups, cout))
    outputs = (n // batch_groups) * 4 * 4 * cout
    # Every output sums 3 * 3 * (cin / groups) products; with batch groups each output feature
    # sees one group of the batch only, which the number of outputs already says.
    assert jaxpr_matmul_flops(jaxpr) == 2 * outputs * 9 * cin // groups


def test_a_product_and_its_gradients_cost_three_products():
    def loss(w, x):
        return (x @ w).sum()

    forward = jaxpr_matmul_flops(traced(loss, (5, 7), (3, 5)))
    both = jaxpr_matmul_flops(traced(jax.grad(loss, (0, 1)), (5, 7), (3, 5)))
    assert forward == 2 * 3 * 5 * 7
    assert both == 3 * forward


def test_scan_counts_its_length_and_nested_scans_the_product():
    def fun(x, w):
        def inner(c, _):
            return c @ w, None

        def outer(c, _):
            return lax.scan(inner, c, None, length=3)[0], None

        return lax.scan(outer, x, None, length=5)[0]

    jaxpr = traced(fun, (4, 4), (4, 4))
    assert jaxpr_matmul_flops(jaxpr) == 15 * 2 * 4**3
    assert jaxpr_flops(jaxpr) == 15 * 2 * 4**3


def test_cond_is_its_costliest_branch_and_while_one_trip():
    def fun(p, x):
        return lax.cond(p, lambda x: x @ x @ x, lambda x: x + 1, x)

    jaxpr = traced(fun, jax.ShapeDtypeStruct((), jnp.bool_), (4, 4))
    assert jaxpr_flops(jaxpr) == 2 * 2 * 4**3

    def loop(x):
        return lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ x, x)

    assert jaxpr_matmul_flops(traced(loop, (4, 4))) == 2 * 4**3


def with_jvp(fun):
    wrapped = jax.custom_jvp(fun)
    wrapped.defjvp(lambda primals, tangents: (fun(*primals), fun(*tangents)))
    return wrapped


def with_vjp(fun):
    wrapped = jax.custom_vjp(fun)
    wrapped.defvjp(lambda x: (fun(x), x), lambda x, g: (fun(g),))
    return wrapped


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, with_jvp, with_vjp])
def test_a_call_is_its_body(wrap):
    jaxpr = traced(lambda x: wrap(lambda y: y @ y)(x), (4, 4))
    assert jaxpr_flops(jaxpr) == 2 * 4**3


def test_elementwise_reductions_and_data_movement():
    assert jaxpr_flops(traced(lambda x: jnp.exp(x) + x, (6, 4))) == 48
    assert jaxpr_flops(traced(lambda x: x.sum(), (6, 4))) == 24
    assert jaxpr_flops(traced(lambda x: x.T.reshape(2, 12)[:, ::2], (6, 4))) == 0
    scatter = traced(lambda x, u: x.at[jnp.array([1, 2])].add(u), (6, 4), (2, 4))
    updates = [e for e in scatter.eqns if e.primitive.name.startswith("scatter")]
    assert len(updates) == 1
    assert jaxpr_flops(scatter.replace(eqns=updates)) == 8


def test_bytes():
    jaxpr = traced(lambda x, y: x + y, (6, 4), (6, 4))
    assert jaxpr_bytes(jaxpr) == 3 * 96
    lookup = traced(lambda t: lax.dynamic_slice(t, (0, 0), (1, 4)), (1000, 4))
    assert jaxpr_bytes(lookup) < 100, "a lookup reads its rows, not the table"
    assert aval_bytes(jax.ShapeDtypeStruct((3, 2), jnp.bfloat16)) == 12
    assert aval_bytes(jax.typeof(jax.random.key(0))) == 8
