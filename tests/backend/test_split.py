"""Equations with partial results keep one part per device, whatever the equation is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from hetpass._jax import Var, is_jaxpr, open_jaxpr
from hetpass.backend.combine import reduce_leading
from hetpass.backend.layout import batch_layout
from hetpass.backend.report import collectives
from hetpass.backend.split import DataSplit, evaluate
from hetpass.ir.kinds import Batched, Kind, Partial, Whole

D, B = 4, 8


def split() -> DataSplit:
    return DataSplit(D, B, AbstractMesh((D,), ("data",), axis_types=(AxisType.Auto,)))


def compiled(function, inputs, outputs, *values, inner=None, nested=False):
    """The function evaluated in parts on D devices: (combined results, collectives).

    `inner`: kinds of results of equations that are not the function's own results. `nested`:
    whether the kinds of variables in bodies are known.
    """
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(function)(*values))
    assert not consts
    kinds: dict[Var, Kind] = dict(zip(jaxpr.invars, inputs, strict=True))
    kinds.update(nested_kinds(jaxpr) if nested else {})
    for number, kind in (inner or {}).items():
        kinds.update((var, kind) for var in jaxpr.eqns[number].outvars)
    kinds.update(zip(jaxpr.outvars, outputs, strict=True))
    mesh = Mesh(np.array(jax.devices()[:D]), ("data",), axis_types=(AxisType.Auto,))

    def sharding(kind: Kind, ndim: int) -> NamedSharding:
        entries: list[Any] = [None] * ndim
        layout = batch_layout(kind)
        if isinstance(kind, Partial):
            entries = ["data", *entries]
        elif layout is not None and layout[1] == 1:
            entries[layout[0]] = "data"
        return NamedSharding(mesh, PartitionSpec(*entries))

    jitted = jax.jit(
        lambda *v: evaluate(jaxpr, v, kinds, split()),
        in_shardings=[sharding(k, v.ndim) for k, v in zip(inputs, values, strict=True)],
        out_shardings=[
            sharding(k, v.aval.ndim) for k, v in zip(outputs, jaxpr.outvars, strict=True)
        ],
    )
    text = jitted.lower(*values).compile().as_text()
    results = jitted(*values)
    for result, kind in zip(results, outputs, strict=True):
        if isinstance(kind, Partial):
            assert result.shape[0] == D
    combined = [
        reduce_leading(kind.op, result) if isinstance(kind, Partial) else result
        for result, kind in zip(results, outputs, strict=True)
    ]
    return combined, collectives(text)


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def scatter_add(table, rows, values):
    return jnp.zeros_like(table).at[rows].add(values, mode="promise_in_bounds")


ROWS = np.random.default_rng(5).integers(0, 6, B).astype(np.int32)
dims = (((0,), (0,)), ((), ()))

CASES = {
    "sum": (lambda x: x.sum(0), [Batched(0)], Partial(), [normal(B, 3)]),
    "max": (lambda x: x.max(1), [Batched(1)], Partial("max"), [normal(3, B)]),
    "min": (lambda x: x.min(0), [Batched(0)], Partial("min"), [normal(B, 3)]),
    "prod": (lambda x: x.prod(0), [Batched(0)], Partial("prod"), [normal(B, 3)]),
    "any": (lambda x: x.any(0), [Batched(0)], Partial("or"), [normal(B, 3) > 1.5]),
    "all": (lambda x: x.all(0), [Batched(0)], Partial("and"), [normal(B, 3) > -1.5]),
    "dot": (
        lambda x, y: jax.lax.dot_general(x, y, dims),
        [Batched(0), Batched(0)],
        Partial(),
        [normal(B, 3), normal(B, 5)],
    ),
    "merged dimension, batch outermost": (
        lambda x, y: jax.lax.dot_general(x, y, dims),
        [Batched(0), Batched(0)],
        Partial(),
        [normal(B * 2, 3), normal(B * 2, 5)],
    ),
    "merged dimension, batch within": (
        lambda x, y: jax.lax.dot_general(x, y, dims),
        [Batched(0, outer=2), Batched(0, outer=2)],
        Partial(),
        [normal(2 * B * 3, 3), normal(2 * B * 3, 5)],
    ),
    "constant along the batch": (
        lambda x: x.sum(0),
        [Batched(0, outer=None)],
        Partial(),
        [np.ones((B, 3), np.float32)],
    ),
    "linear in a partial": (lambda x, k: x * k, [Partial(), Whole()], Partial(), None),
}


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][3] is not None])
def test_one_equation(name):
    function, inputs, output, values = CASES[name]
    (result,), found = compiled(function, inputs, [output], *values)
    np.testing.assert_allclose(result, function(*values), rtol=1e-5, atol=1e-6)
    if name != "merged dimension, batch within":  # it is not sharded along the batch
        assert not found


def test_an_embedding_gradient():
    jaxpr = jax.make_jaxpr(scatter_add)(normal(6, 3), ROWS, normal(B, 3))
    position = next(i for i, e in enumerate(jaxpr.eqns) if e.primitive.name == "scatter-add")
    indices = jaxpr.eqns[position].invars[1]
    made = next(i for i, e in enumerate(jaxpr.eqns) if indices in e.outvars)
    inner = {
        i: Batched(0)
        for i, e in enumerate(jaxpr.eqns)
        if i <= made and B in e.outvars[0].aval.shape
    }
    values = (normal(6, 3), ROWS, normal(B, 3))
    (result,), found = compiled(
        scatter_add, [Whole(), Batched(0), Batched(0)], [Partial()], *values, inner=inner
    )
    np.testing.assert_allclose(result, scatter_add(*values), rtol=1e-5, atol=1e-6)
    assert "all-reduce" not in found


def test_partials_stay_in_parts_through_linear_equations():
    def function(x, k):
        return (x.sum(0) * k).reshape(3, 1).T

    inner = {0: Partial(), 1: Partial(), 2: Partial()}
    values = (normal(B, 3), normal(3))
    (result,), found = compiled(function, [Batched(0), Whole()], [Partial()], *values, inner=inner)
    np.testing.assert_allclose(result, function(*values), rtol=1e-5, atol=1e-6)
    assert not found


def test_a_convolution_gradient():
    def convolve(w, x):
        return jax.lax.conv_general_dilated(x, w, (1,), "SAME")

    x, w, ct = normal(B, 3, 7), normal(5, 3, 3), normal(B, 5, 7)
    pulled = jax.make_jaxpr(lambda x, ct: jax.vjp(convolve, w, x)[1](ct)[0])(x, ct)
    equation = next(
        e
        for e in pulled.eqns
        if e.primitive.name == "conv_general_dilated" and e.outvars[0].aval.shape[-1] == 3
    )
    lhs, rhs = (x, ct) if equation.invars[0].aval.shape == x.shape else (ct, x)

    def function(lhs, rhs):
        return equation.primitive.bind(lhs, rhs, **equation.params)

    (result,), found = compiled(function, [Batched(0)] * 2, [Partial()], lhs, rhs)
    np.testing.assert_allclose(result, function(lhs, rhs), rtol=1e-4, atol=1e-4)
    assert "all-reduce" not in found


def accumulating_scan(x, w):
    """Batched and partial results of one equation; its body is typed at b examples."""

    def body(total, row):
        wide = jnp.broadcast_to(w, row.shape[:1] + w.shape)
        return total + (row.reshape(-1) * wide.reshape(-1)).sum(), jnp.tanh(row)

    return jax.lax.scan(body, jnp.float32(0), x)


def nested_kinds(jaxpr):
    """Of the variables in bodies: those with a dimension of B, or B * 3, are batched."""
    found: dict[Var, Kind] = {}
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple) else (value,):
                if is_jaxpr(item):
                    body, _ = open_jaxpr(item)
                    found.update(nested_kinds(body))
                    variables = [*body.invars, *(v for e in body.eqns for v in e.outvars)]
                    for var in variables:
                        dims = [d for d, n in enumerate(var.aval.shape) if n in (B, 3 * B)]
                        found[var] = Batched(dims[0]) if dims else Whole()
    return found


@pytest.mark.parametrize("known", [True, False])
def test_equations_that_hold_jaxprs(known):
    """Without the kinds of its body's variables a scan is not split, and still right."""
    values = (normal(5, B, 3), normal(3))
    combined, found = compiled(
        accumulating_scan,
        [Batched(1), Whole()],
        [Partial(), Batched(1)],
        *values,
        nested=known,
    )
    for result, expected in zip(combined, accumulating_scan(*values), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert ("all-reduce" in found) != known


def test_conditionals_and_loops_over_examples():
    def function(x, p):
        total = jax.lax.cond(p, lambda v: v.sum(0), lambda v: (v * 2).sum(0), x)
        one = jax.lax.scan(lambda t, row: (t + row.sum(), None), jnp.float32(0), x)[0]
        return total, one

    values = (normal(B, 3), np.bool_(True))
    results, found = compiled(
        function, [Batched(0), Whole()], [Partial(), Partial()], *values, nested=True
    )
    for result, expected in zip(results, function(*values), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert "all-reduce" not in found


def test_a_partial_that_is_used_as_a_whole_is_combined_first():
    values = (normal(B, 3),)

    def function(x):
        return jnp.tanh(x.sum(0))

    (result,), _ = compiled(function, [Batched(0)], [Whole()], *values, inner={0: Partial()})
    np.testing.assert_allclose(result, function(*values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direct", [True, False])
def test_each_part_has_its_own_offset(direct):
    """sum over examples of their places in the full batch times x, over an inner loop: the place
    is a slice of the full draw, at the offset (directly, or at a scalar made of it)."""

    def function(x, offset):
        first = offset if direct else offset * 1

        def body(total, row):
            draw = jnp.arange(5 * B, dtype=jnp.int32)
            places = jax.lax.dynamic_slice(draw, (first,), (B,), allow_negative_indices=False)
            return total + (places * row).sum(), None

        return jax.lax.scan(body, jnp.int32(0), x)[0]

    x = np.arange(2 * B, dtype=np.int32).reshape(2, B)
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(function)(x, np.int32(16)))
    kinds = nested_kinds(jaxpr)
    kinds.update({jaxpr.invars[0]: Batched(1), jaxpr.invars[1]: Whole()})
    kinds[jaxpr.outvars[0]] = Partial()
    mesh = Mesh(np.array(jax.devices()[:D]), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(
        lambda *v: evaluate(jaxpr, v, kinds, split(), [jaxpr.invars[1]]),
        in_shardings=whole,
        out_shardings=whole,
    )
    (parts,) = run(x, np.int32(16))
    assert parts.shape == (D,)
    assert int(parts.sum()) == int(function(x, 16))
    assert (np.asarray(parts[1:]) != 0).all() == direct  # not split: part 0 holds it all


@pytest.mark.parametrize("strides", [(1,), (2,)])
def test_convolution_gradients_with_one_example_per_device(strides):
    """A grouped convolution would be what batching makes of it: wrong numbers from the compiler."""
    examples = D

    def convolve(w, x):
        return jax.lax.conv_general_dilated(x, w, strides, "SAME")

    x, w = normal(examples, 3, 8), normal(5, 3, 3)
    ct = normal(*convolve(w, x).shape)
    pulled = jax.make_jaxpr(lambda x, ct: jax.vjp(convolve, w, x)[1](ct)[0])(x, ct)
    (equation,) = (
        e
        for e in pulled.eqns
        if e.primitive.name == "conv_general_dilated"
        and set(e.invars) <= set(pulled.jaxpr.invars)
        and sorted(e.outvars[0].aval.shape) == [3, 3, 5]
    )
    lhs, rhs = (x, ct) if equation.invars[0].aval.shape == x.shape else (ct, x)

    def function(lhs, rhs):
        return equation.primitive.bind(lhs, rhs, **equation.params)

    (result,), found = compiled(function, [Batched(0)] * 2, [Partial()], lhs, rhs)
    np.testing.assert_allclose(result, function(lhs, rhs), rtol=1e-4, atol=1e-4)
    assert not found


def test_a_convolution_in_a_body_that_is_not_known():
    def function(x, w):
        def body(total, row):
            image = row.reshape(B, 1, 3)
            return total + jax.lax.conv_general_dilated(image, w, (1,), "SAME").sum(), None

        return jax.lax.scan(body, jnp.float32(0), x)[0]

    values = (normal(2, B, 3), normal(2, 1, 3))
    (result,), _ = compiled(function, [Batched(1), Whole()], [Partial()], *values)
    np.testing.assert_allclose(result, function(*values), rtol=1e-4, atol=1e-4)
