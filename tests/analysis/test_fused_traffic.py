"""Traffic after fusion, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from hetpass._jax import Var, open_jaxpr
from hetpass.analysis.flops import aval_bytes
from hetpass.analysis.fused_traffic import fused_traffic

N = 64
ROWS = N * N * 4.0


def moved(fun, *shapes, uncounted=()):
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    jaxpr = open_jaxpr(jax.make_jaxpr(fun)(*args))[0]
    outside = {v for v in jaxpr.outvars if isinstance(v, Var)}
    skipped = {jaxpr.invars[i] for i in uncounted}
    return fused_traffic(jaxpr.eqns, outside, skipped, lambda v: aval_bytes(v.aval))


def test_a_chain_of_elementwise_equations_reads_once_and_writes_once():
    found = moved(lambda x: jnp.exp(jnp.sin(x) * 2 + x), (N, N))
    assert found.traffic_bytes == 2 * ROWS
    assert found.peak_bytes == 0


def test_a_product_reads_what_is_made_for_it():
    found = moved(lambda x, y: jnp.sin(x) @ y, (N, N), (N, N))
    assert found.traffic_bytes == 5 * ROWS  # read x, write sin x, read both, write the product
    assert found.peak_bytes == ROWS


def test_parameters_are_left_to_others():
    found = moved(lambda x, y: x @ y, (N, N), (N, N), uncounted=[1])
    assert found.traffic_bytes == 2 * ROWS


def test_a_reduction_ends_a_fusion():
    """Read for the maximum, read for the sum, read once more for the quotient."""

    def softmax(x):
        e = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
        return e / e.sum(-1, keepdims=True)

    found = moved(softmax, (N, N))
    assert 4 * ROWS <= found.traffic_bytes <= 6.2 * ROWS


def test_a_lookup_reads_rows_only():
    table = jnp.zeros((1000, N))
    found = moved(lambda t, i: t[i.astype(jnp.int32)], table.shape, (4,))
    assert found.traffic_bytes < 20 * N * 4


def test_a_scan_moves_its_body_every_time():
    def fun(x, w):
        return lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, w)[0]

    once = moved(lambda x, w: jnp.tanh(x @ w), (N, N), (N, N)).traffic_bytes
    found = moved(fun, (N, N), (5, N, N)).traffic_bytes
    assert found == 5 * once
    free = moved(fun, (N, N), (5, N, N), uncounted=[1]).traffic_bytes
    assert free == 5 * (once - ROWS)


def test_the_dearest_branch_counts():
    def fun(p, x):
        return lax.cond(p.sum() > 0, lambda x: x @ x, lambda x: x, x)

    assert moved(fun, (1,), (N, N)).traffic_bytes >= 2 * ROWS
