"""Fourier transforms next to collectives; starts of slices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp
from hetpass._jax import Literal
from hetpass.backend.rewritten import bind
from tests.equality import differences


def rows(q: Any, x: Any) -> Any:
    return jnp.fft.irfft(jnp.fft.rfft(jnp.tanh(x.transpose(1, 0, 2) @ q)) * 2.0, n=8)


def planes(q: Any, x: Any) -> Any:
    return jnp.fft.fft2(jnp.tanh(x @ q)).real @ q


def in_a_loop(q: Any, x: Any) -> Any:
    def body(x: Any, _: Any) -> Any:
        return jnp.tanh(jnp.fft.fft2(x @ q).real / 8), None

    return jax.lax.scan(body, x, None, length=2)[0]


@pytest.mark.parametrize("transform", [rows, planes, in_a_loop])
@pytest.mark.parametrize("sharding", ["axes", "solved"])
def test_equals_jit_on_every_mesh(transform: Any, sharding: Any) -> None:
    draw = np.random.default_rng(0)
    params = jnp.asarray(draw.normal(size=(8, 8), scale=0.4), jnp.float32)
    batch = jnp.asarray(draw.normal(size=(8, 6, 8)), jnp.float32)

    def step(q: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda q: (transform(q, x) ** 2).mean())(q)
        return q - 0.1 * grads, value, grads

    expected = jax.jit(step)(params, batch)
    parallel = hp.het_parallelize(
        step,
        cluster=hp.Cluster.emulated({"a": 4}),
        num_microbatches=2,
        donate_argnums=(),
        options=hp.Options(sharding=sharding),
    )
    traced = parallel.trace(params, batch)
    if sharding == "solved":
        assert differences(traced.plan().compile()(params, batch), expected) == []
        return
    last = traced.plan().num_layers - 1
    for mesh in ("data=4,model=1", "data=1,model=4", "data=2,model=2"):
        compiled = traced.with_plan(f"a({mesh}): 0-{last}").compile()
        assert differences(compiled(params, batch), expected) == [], mesh


@pytest.mark.parametrize("groups", [{"a": 1}, {"a": 2, "b": 2}])
def test_what_leaves_an_executable_is_laid_out_row_by_row(groups: Any) -> None:
    """Transforms whose results are read by other executables, and returned."""
    draw = np.random.default_rng(0)
    params = [jnp.asarray(draw.normal(size=(8, 8), scale=0.4), jnp.float32) for _ in range(3)]
    batch = jnp.asarray(draw.normal(size=(16, 6, 8)), jnp.float32)

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for q in params:
                h = jnp.fft.irfft(jnp.fft.rfft(jnp.tanh(h.transpose(0, 2, 1)), axis=1), n=8, axis=1)
                h = h.transpose(0, 2, 1) @ q
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        new = [q - 0.1 * g for q, g in zip(params, grads, strict=True)]
        return new, value, grads, jnp.fft.fft(params[0].T), jnp.fft.rfft(x @ params[0], axis=0)

    parallel = hp.het_parallelize(
        step, cluster=hp.Cluster.emulated(groups), num_microbatches=4, donate_argnums=()
    )
    traced = parallel.trace(params, batch)
    last = traced.plan().num_layers - 1
    cut = f"a: 0 | b: 1-{last}" if "b" in groups else f"a: 0-{last}"
    compiled = traced.with_plan(cut).compile()
    assert differences(compiled(params, batch), jax.jit(step)(params, batch)) == []
    for executable in compiled.runtime.compiled.executables:
        for form in jax.tree.leaves(executable.call.output_formats):
            rows = tuple(range(len(form.layout.major_to_minor)))
            assert form.layout.major_to_minor == rows


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32])
@pytest.mark.parametrize("start", [-100, -1, 0, 3, 120])
def test_starts_are_clamped_as_xla_does_it(dtype: Any, start: int) -> None:
    start_array = jnp.asarray(start, jnp.int32).astype(dtype)
    x = jnp.arange(300.0).reshape(2, 150)

    def slices(x: Any, i: Any) -> Any:
        part = jax.lax.dynamic_slice(x, (jnp.zeros_like(i), i), (2, 40))
        x = jax.lax.dynamic_update_slice(x, part * 2, (i, i))
        rows = jax.vmap(lambda r: jax.lax.dynamic_slice(r, (i,), (145,)))(x)
        return part, x, rows

    jaxpr = jax.make_jaxpr(slices)(x, start_array)

    def rewritten(*arguments: Any) -> Any:
        values = dict(zip(jaxpr.jaxpr.invars, arguments, strict=True))
        for eqn in jaxpr.jaxpr.eqns:
            operands = [a.val if isinstance(a, Literal) else values[a] for a in eqn.invars]
            values.update(zip(eqn.outvars, bind(eqn, operands), strict=True))
        return tuple(values[v] for v in jaxpr.jaxpr.outvars)

    for found, known in zip(
        jax.jit(rewritten)(x, start_array), slices(x, start_array), strict=True
    ):
        np.testing.assert_array_equal(found, known)
