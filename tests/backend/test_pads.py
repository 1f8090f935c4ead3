"""Pads that XLA's partitioner gets wrong, written in another way."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetpass._jax import is_jaxpr, open_jaxpr
from hetpass.backend.pads import pad
from hetpass.backend.rewritten import bind

CONFIGS = [
    config
    for config in itertools.product((0, 2, -1), (0, 1, -1), (0, 1, 2))
    if any(e < 0 for e in config[:2]) or config[2]
]


def _sharding(devices, *spec):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("axis",))
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_pads_equal_those_of_lax_on_one_device_and_cut(config):
    for size in range(2, 6):
        x = jnp.arange(1.0, size + 1)
        expected = jax.lax.pad(x, -5.0, [config])
        np.testing.assert_array_equal(pad(x, -5.0, [config]), expected)
        for devices in (2, 4):
            if len(expected) and len(expected) % devices == 0:
                cut = jax.jit(
                    lambda x: pad(x, -5.0, [config]), out_shardings=_sharding(devices, "axis")
                )
                np.testing.assert_array_equal(cut(jax.device_put(x, _sharding(devices))), expected)


def test_a_pad_that_cuts_more_than_there_is():
    x = jnp.arange(2.0)
    for config in ((-3, 4, 0), (5, -4, 0)):
        np.testing.assert_array_equal(pad(x, 7.0, [config]), jax.lax.pad(x, 7.0, [config]))


def _strided_gradient(x):
    return jax.grad(lambda x: jnp.sin(x[::2]).sum())(x)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        lambda f: lambda x: jax.lax.scan(lambda c, r: (c, f(r) + c), 1.0, jnp.stack([x, 2 * x]))[1],
        lambda f: lambda x: jax.lax.cond(x[0] > 0, f, jnp.cos, x),
        lambda f: lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])),
                                               (0, x))[1],
        lambda f: lambda x: jax.grad(lambda x: (jax.checkpoint(f)(x) ** 2).sum())(x),
    ],
    ids=["plain", "jit", "scan", "cond", "while", "checkpoint"],
)  # fmt: skip
def test_nested_programs_keep_their_results_and_lose_such_pads(wrap):
    fun, x = wrap(_strided_gradient), jnp.arange(1.0, 7.0)
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(fun)(x))

    def rebound(x):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, x], strict=True))
        for eqn in jaxpr.eqns:
            operands = [_read(values, atom) for atom in eqn.invars]
            values.update(zip(eqn.outvars, bind(eqn, operands), strict=True))
        return [_read(values, a) for a in jaxpr.outvars]

    np.testing.assert_allclose(rebound(x)[0], fun(x), rtol=1e-6)
    assert 1 not in _interiors(jax.make_jaxpr(rebound)(x))
    assert 1 in _interiors(jax.make_jaxpr(fun)(x))


def _read(values, atom):
    return atom.val if hasattr(atom, "val") else values[atom]


def _interiors(value):
    """The interior paddings of all pads in the program, nested ones too."""
    found = []
    for eqn in open_jaxpr(value)[0].eqns:
        if eqn.primitive.name == "pad":
            found += [int(interior) for _, _, interior in eqn.params["padding_config"]]
        for p in eqn.params.values():
            for inner in p if isinstance(p, tuple) else (p,):
                found += _interiors(inner) if is_jaxpr(inner) else []
    return found
