"""Functions that treat examples alike are cut into microbatches, whatever JAX makes of them.

New versions of JAX write old functions with new primitives: a sweep over the functions that models
use tells when one has no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn
from jax.scipy import special, stats

import hetpass as hp
from hetpass.frontend.microbatch import split
from hetpass.frontend.trace import Signature, trace
from tests.equality import differences

EDGES = np.linspace(-2.0, 2.0, 6, dtype=np.float32)

PLAIN: list[Callable[[Any], Any]] = [
    *(nn.celu, nn.elu, nn.gelu, nn.glu, nn.hard_sigmoid, nn.hard_silu, nn.hard_swish, nn.hard_tanh),
    *(nn.leaky_relu, nn.log_sigmoid, nn.log_softmax, nn.mish, nn.relu, nn.relu6, nn.selu, nn.silu),
    *(nn.sigmoid, nn.soft_sign, nn.softmax, nn.softplus, nn.sparse_plus, nn.sparse_sigmoid),
    *(nn.squareplus, nn.standardize, nn.tanh),
    *(jnp.abs, jnp.arcsinh, jnp.arctan, jnp.cbrt, jnp.ceil, jnp.cos, jnp.cosh, jnp.deg2rad),
    *(jnp.diff, jnp.exp, jnp.exp2, jnp.expm1, jnp.flip, jnp.floor, jnp.nan_to_num),
    *(jnp.negative, jnp.rint, jnp.sign, jnp.sin, jnp.sinc, jnp.sinh, jnp.sort, jnp.square),
    *(jnp.tan, jnp.tanh, jnp.trunc, jnp.i0, jnp.positive, jnp.reciprocal, jnp.argsort),
    *(lax.erf, lax.erfc, lax.is_finite, lax.round),
    *(special.digamma, special.erf, special.expit, special.i0e, special.i1e, special.log_ndtr),
    *(special.ndtr, stats.norm.cdf, stats.norm.logpdf, stats.norm.logcdf),
]

GIVEN: dict[str, Callable[[Any], Any]] = {
    "gelu exact": lambda x: nn.gelu(x, approximate=False),
    "log": lambda x: jnp.log(1 + x * x),
    "log2": lambda x: jnp.log2(1 + x * x),
    "log10": lambda x: jnp.log10(1 + x * x),
    "log1p": lambda x: jnp.log1p(x * x),
    "sqrt": lambda x: jnp.sqrt(1 + x * x),
    "rsqrt": lambda x: lax.rsqrt(1 + x * x),
    "erf_inv": lambda x: lax.erf_inv(0.9 * jnp.tanh(x)),
    "arctanh": lambda x: jnp.arctanh(0.9 * jnp.tanh(x)),
    "arcsin": lambda x: jnp.arcsin(0.9 * jnp.tanh(x)),
    "arctan2": lambda x: jnp.arctan2(x, 2.0),
    "hypot": lambda x: jnp.hypot(x, 2.0),
    "power": lambda x: (1 + x * x) ** 1.7,
    "logaddexp": lambda x: jnp.logaddexp(x, 0.0),
    "copysign": lambda x: jnp.copysign(x, -1.0),
    "ldexp": lambda x: jnp.ldexp(x, 2),
    "frexp": lambda x: jnp.frexp(x)[0],
    "heaviside": lambda x: jnp.heaviside(x, 0.5) * x,
    "digitize": lambda x: x + 0.1 * jnp.digitize(x, EDGES),
    "searchsorted": lambda x: x * jnp.searchsorted(EDGES, x),
    "interp": lambda x: jnp.interp(x, EDGES, EDGES**2),
    "polyval": lambda x: jnp.polyval(EDGES[:3], x),
    "xlogy": lambda x: special.xlogy(x * x, 1 + x * x),
    "gammaln": lambda x: special.gammaln(1 + x * x),
    "betainc": lambda x: lax.betainc(1.5, 2.5, nn.sigmoid(x)),
    "igamma": lambda x: lax.igamma(2.0, 1 + x * x),
    "median": lambda x: x - jnp.median(x, axis=1, keepdims=True),
    "quantile": lambda x: x - jnp.quantile(x, 0.3, axis=1, keepdims=True),
    "cross": lambda x: jnp.cross(x[:, :3], x[:, 3:]),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "convolve": lambda x: jax.vmap(lambda row: jnp.convolve(row, EDGES[:3], "same"))(x),
    "trapezoid": lambda x: jnp.trapezoid(x, axis=-1),
    "unwrap": lambda x: jnp.unwrap(x, axis=-1),
    "solve": lambda x: jnp.linalg.solve(9 * jnp.eye(6) + jnp.outer(EDGES, EDGES), x[..., None]),
    "cummax": lambda x: lax.cummax(x, axis=1),
    "cumprod": lambda x: lax.cumprod(x, axis=1),
    "logsumexp": lambda x: nn.logsumexp(x, axis=-1),
    "norm": lambda x: jnp.linalg.norm(x, axis=-1),
    "one_hot": lambda x: nn.one_hot(x.argmax(-1), 6) * x,
    "where": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "take_along_axis": lambda x: jnp.take_along_axis(x, x.argmax(-1, keepdims=True), -1),
}
FUNCTIONS = {getattr(f, "__name__", str(f)): f for f in PLAIN} | GIVEN


def step_of(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            h = jnp.tanh(batch @ params[0])
            return (h @ params[1]).mean() + (function(h) * 1.0).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value, grads

    return step


def arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    params = [jnp.asarray(draw.normal(size=(6, 6), scale=0.5), jnp.float32) for _ in range(2)]
    return params, jnp.asarray(draw.normal(size=(8, 6)), jnp.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_cut_into_microbatches(name: str) -> None:
    traced = trace(step_of(FUNCTIONS[name]), arguments(), {}, Signature())
    assert split(traced, 4).num_microbatches == 4


@pytest.mark.parametrize("name", ["gelu exact", "log2", "digitize", "interp", "sinc"])
def test_equals_jit(name: str) -> None:
    step = step_of(FUNCTIONS[name])
    parallel = hp.het_parallelize(
        step, cluster=hp.Cluster.emulated({"a": 2}), num_microbatches=4, donate_argnums=()
    )
    expected = jax.jit(step)(*arguments())
    assert differences(parallel(*arguments()), expected) == []
