"""B10: one unusual operation in the middle of a two-layer network: right, or a named refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.programs.models import BATCH, Batch, Params, normal, sgd_step, weight
from tests.programs.program import Expect, Program, Run

ROWS, COLUMNS = 6, 8  # the network's hidden value is (batch, ROWS, COLUMNS)

Change = Callable[[jax.Array, Params, Batch], jax.Array]


def _network(
    name: str, change: Change, expect: Expect = "equal", zeros: tuple[str, ...] = ()
) -> Program:
    """x -> (batch, ROWS, COLUMNS) -> change -> flat -> linear -> squared error."""

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params["in"]).reshape(-1, ROWS, COLUMNS)
        x = change(x, params, batch)
        x = x.reshape(x.shape[0], -1)
        return ((jnp.tanh(x) @ params["out"][: x.shape[1]] - batch["y"]) ** 2).mean()

    def make() -> Run:
        draw = np.random.default_rng(130)
        params = {
            "in": weight(draw, 8, ROWS * COLUMNS),
            "out": normal(draw, 2 * ROWS * COLUMNS, 3, scale=0.2),
            "square": weight(draw, COLUMNS, COLUMNS),
            "vector": normal(draw, COLUMNS),
            "table": normal(draw, 10, COLUMNS),
        }
        batch = {
            "x": normal(draw, BATCH, 8),
            "y": normal(draw, BATCH, 3),
            "ids": jnp.asarray(draw.integers(0, 10, (BATCH, ROWS)), jnp.int32),
            "index": jnp.asarray(draw.integers(0, ROWS, BATCH), jnp.int32),
        }
        return Run(sgd_step(loss_fn), (params, batch))

    return Program(name, "B10", make, expect, zeros=zeros)


# ---------------------------------------------------------------------------------------------
# Custom derivatives


@jax.custom_vjp
def _clipped_backward(x: jax.Array) -> jax.Array:
    return x


def _clip_forward(x: jax.Array) -> Any:
    return x, None


def _clip_backward(_: None, g: jax.Array) -> Any:
    return (jnp.clip(g, -1e-3, 1e-3),)


_clipped_backward.defvjp(_clip_forward, _clip_backward)


@jax.custom_vjp
def _scaled_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _scaled_forward(x: jax.Array, w: jax.Array) -> Any:
    return x @ w, (x, w)


def _scaled_backward(saved: Any, g: jax.Array) -> Any:
    x, w = saved
    return g @ w.T, 2.0 * jnp.einsum("brc,brd->cd", x, g)


_scaled_product.defvjp(_scaled_forward, _scaled_backward)


@jax.custom_jvp
def _softplus(x: jax.Array) -> jax.Array:
    return jnp.log1p(jnp.exp(x))


@_softplus.defjvp
def _softplus_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return _softplus(x), t * jax.nn.sigmoid(x)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rounded(x: jax.Array, levels: int) -> jax.Array:
    return jnp.round(x * levels) / levels


_rounded.defvjp(lambda x, levels: (_rounded(x, levels), None), lambda levels, _, g: (g,))


# ---------------------------------------------------------------------------------------------
# Control flow


def _fixed_rounds(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["square"]), x)


def _while_on_parameters(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    size = lax.stop_gradient(jnp.abs(p["vector"]).max())
    scale = lax.while_loop(lambda s: s > 1.0, lambda s: s * 0.5, size)
    return x * scale


def _newton_per_example(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    """A while loop over values of the batch, whose condition is free of it."""
    start = (jnp.int32(0), lax.stop_gradient(jnp.abs(x) + 1.0))
    _, root = lax.while_loop(
        lambda c: c[0] < 4, lambda c: (c[0] + 1, 0.5 * (c[1] + 2.0 / c[1])), start
    )
    return x * root


def _cond_on_parameters(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    return lax.cond(p["vector"].sum() > 0, lambda x: jnp.sin(x), lambda x: x @ p["square"], x)


def _switch_on_parameters(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    branches = [jnp.sin, lambda x: x * 2, lambda x: x - x.mean(-1, keepdims=True)]
    return lax.switch((p["vector"].sum() > 0).astype(jnp.int32) + 1, branches, x)


def _cond_per_example(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    def one(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.cond(i > 2, jnp.sin, lambda x: x @ p["square"], x)

    return jax.vmap(one)(x, b["index"])


def _scan_over_rows(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    def cell(h: jax.Array, row: jax.Array) -> Any:
        h = jnp.tanh(row + h @ p["square"])
        return h, h

    _, hidden = lax.scan(cell, jnp.zeros((x.shape[0], COLUMNS)), x.swapaxes(0, 1))
    return hidden.swapaxes(0, 1)


def _associative(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    return lax.associative_scan(combine, (jax.nn.sigmoid(x), x), axis=1)[1]


# ---------------------------------------------------------------------------------------------
# Gathers, scatters, windows


def _pick_row(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    return jnp.take_along_axis(x, b["index"][:, None, None], axis=1)


def _vmapped_dynamic_slice(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    return jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (2, COLUMNS)))(x, b["index"])


def _scatter_rows(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    rows = jnp.arange(x.shape[0])
    return x.at[rows, b["index"]].set(p["vector"])


def _scatter_per_example(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    return jax.vmap(lambda x, i: x.at[i].add(p["vector"]))(x, b["index"])


def _onto_a_table(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    """A scatter-add of the batch onto a parameter: a sum over examples that a layer then reads."""
    return x + p["table"].at[b["ids"][:, 0]].add(x[:, 0]).mean()


def _segment_sums_per_example(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    return jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids % 3, num_segments=3))(x, b["ids"])


def _conv(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    kernel = p["square"].reshape(COLUMNS, COLUMNS, 1)
    return lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NHC", "OIH", "NHC")
    )


def _depthwise_conv(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    kernel = p["square"][:3, None, :]
    return lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"),
        feature_group_count=COLUMNS,
    )  # fmt: skip


def _transposed_conv(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    kernel = p["square"].reshape(1, COLUMNS, COLUMNS)
    return lax.conv_transpose(x, kernel, (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def _max_pool(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")


def _resized(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    return jax.image.resize(x, (x.shape[0], 9, COLUMNS), "linear")


def _whitened(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    factor = jnp.linalg.cholesky(p["square"] @ p["square"].T + jnp.eye(COLUMNS))
    return jax.scipy.linalg.solve_triangular(factor, x.swapaxes(1, 2), lower=True).swapaxes(1, 2)


def _solved_per_example(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    matrices = jnp.einsum("brc,brd->bcd", x, x) + 2 * jnp.eye(COLUMNS)
    return jnp.linalg.solve(matrices, x.swapaxes(1, 2)).swapaxes(1, 2)


def _grouped_einsum(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    heads = x.reshape(-1, ROWS, 2, COLUMNS // 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads, heads)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads).reshape(x.shape)


def _rotary(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    angles = jnp.arange(ROWS)[:, None] / 10 ** jnp.arange(COLUMNS // 2)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * jnp.cos(angles) - odd * jnp.sin(angles),
              even * jnp.sin(angles) + odd * jnp.cos(angles))  # fmt: skip
    return jnp.stack(turned, -1).reshape(x.shape)


def _second_order(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    """A gradient inside the forward pass, differentiated again."""

    def energy(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ p["square"]).sum()

    return x - 0.1 * jax.vmap(jax.grad(energy))(x)


def _hessian_product(x: jax.Array, p: Params, b: Batch) -> jax.Array:
    def f(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ p["square"])

    return jax.jvp(f, (x,), (jnp.ones_like(x),))[1]


operations: tuple[Program, ...] = (
    _network("nested_jit", lambda x, p, b: jax.jit(jax.jit(lambda x: jnp.sin(x) * 2))(x)),
    _network("custom_vjp_clips", lambda x, p, b: _clipped_backward(x)),
    _network("custom_vjp_with_residuals", lambda x, p, b: _scaled_product(x, p["square"])),
    _network("custom_vjp_static_argument", lambda x, p, b: _rounded(x, 8)),
    _network("custom_jvp", lambda x, p, b: _softplus(x)),
    _network("fori_loop", _fixed_rounds),
    _network("while_on_parameters", _while_on_parameters),
    _network("while_over_the_batch", _newton_per_example),
    _network("cond_on_parameters", _cond_on_parameters),
    _network("switch_on_parameters", _switch_on_parameters),
    _network("cond_per_example", _cond_per_example),
    _network("scan_over_rows", _scan_over_rows),
    _network("associative_scan", _associative),
    _network("fft", lambda x, p, b: jnp.abs(jnp.fft.rfft(x, axis=1))),
    _network("fft_two_axes", lambda x, p, b: jnp.real(jnp.fft.fft2(x))),
    _network("sort_columns", lambda x, p, b: jnp.sort(x, axis=-1)),
    _network("argsort_and_gather",
             lambda x, p, b: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1)),
    _network("sort_by_key", lambda x, p, b: lax.sort((x, x**2), dimension=1)[1]),
    _network("top_k", lambda x, p, b: lax.top_k(x, 3)[0]),
    _network("gather_from_a_table", lambda x, p, b: x + p["table"][b["ids"]]),
    _network("take_with_clipping", lambda x, p, b: x + jnp.take(p["table"], b["ids"] + 7, axis=0,
                                                                mode="clip")),
    _network("pick_a_row", _pick_row),
    _network("dynamic_slice_per_example", _vmapped_dynamic_slice),
    _network("dynamic_slice_by_parameter", lambda x, p, b: lax.dynamic_slice_in_dim(
        x, (p["vector"][0] > 0).astype(jnp.int32), 3, axis=1)),
    _network("dynamic_update_slice", lambda x, p, b: lax.dynamic_update_slice(
        x, jnp.zeros((x.shape[0], 1, COLUMNS)), (0, 2, 0))),
    _network("scatter_set_by_position", _scatter_rows, "either"),
    _network("scatter_add_per_example", _scatter_per_example),
    _network("scatter_onto_a_parameter", _onto_a_table, "either"),
    _network("segment_sums_per_example", _segment_sums_per_example),
    _network("pad", lambda x, p, b: jnp.pad(x, ((0, 0), (1, 2), (0, 0)))),
    _network("pad_reflecting", lambda x, p, b: jnp.pad(x, ((0, 0), (2, 1), (0, 0)), "reflect")),
    _network("cumulative_sum", lambda x, p, b: jnp.cumsum(x, axis=1)),
    _network("cumulative_maximum", lambda x, p, b: lax.cummax(x, axis=2)),
    _network("cumulative_product", lambda x, p, b: jnp.cumprod(x + 1, axis=1)),
    _network("cumulative_logsumexp", lambda x, p, b: lax.cumlogsumexp(x, axis=1)),
    _network("convolution", _conv),
    _network("depthwise_convolution", _depthwise_conv),
    _network("transposed_convolution", _transposed_conv),
    _network("max_pool", _max_pool),
    _network("one_hot", lambda x, p, b: x + jax.nn.one_hot(b["ids"], COLUMNS)),
    _network("einsum_with_batch_dimensions", _grouped_einsum),
    _network("einsum_outer", lambda x, p, b: jnp.einsum("brc,brd->bcd", x, x)),
    _network("rotary_embedding", _rotary),
    _network("reverse_rows", lambda x, p, b: x[:, ::-1]),
    _network("roll_rows", lambda x, p, b: jnp.roll(x, 2, axis=1)),
    _network("strided_rows", lambda x, p, b: x[:, ::2]),
    _network("concatenate_and_split", lambda x, p, b: jnp.concatenate(
        jnp.split(x, 2, axis=2)[::-1], axis=2)),
    _network("transposed_to_batch_last", lambda x, p, b: jnp.tanh(
        x.transpose(1, 2, 0) * 1.5).transpose(2, 0, 1)),
    _network("maximum_and_minimum", lambda x, p, b: jnp.concatenate(
        [x.max(1), x.min(1), x.prod(1)], -1)),
    _network("logsumexp", lambda x, p, b: jax.nn.logsumexp(x, axis=1)),
    _network("standard_deviation_of_rows", lambda x, p, b: (
        x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-3)),
    _network("norm_of_rows", lambda x, p, b: x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
    _network("complex_numbers", lambda x, p, b: jnp.abs(
        x * jnp.exp(1j * p["vector"])), zeros=("*'grads']['vector']",)),
    _network("special_functions", lambda x, p, b: lax.erf(x) + lax.lgamma(jnp.abs(x) + 1)
             + lax.digamma(jnp.abs(x) + 1) + jax.scipy.special.i0(x)),
    _network("powers", lambda x, p, b: (
        x**3 + (1 + jnp.abs(x)) ** p["vector"] + lax.integer_pow(x, 2))),
    _network("integer_arithmetic", lambda x, p, b: x * ((b["ids"] // 3) % 2 == 0)[..., None]
             + (b["ids"] << 1 ^ 3)[..., None] / 10),
    _network("select_by_case", lambda x, p, b: lax.select_n((b["ids"] % 3)[..., None]
             + jnp.zeros(x.shape, jnp.int32), x, x * 2, jnp.sin(x))),
    _network("clamp", lambda x, p, b: lax.clamp(-0.4, x, 0.4)),
    _network("cast_to_half_and_back", lambda x, p, b: x.astype(jnp.float16).astype(jnp.float32)),
    _network("bits_of_floats", lambda x, p, b: x * (1 + (lax.bitcast_convert_type(
        b["ids"] / 8, jnp.int32) >> 20 & 3))[..., None]),
    _network("reduce_precision", lambda x, p, b: lax.reduce_precision(x, 8, 10)),
    _network("optimization_barrier", lambda x, p, b: lax.optimization_barrier(x)),
    _network("stop_gradient", lambda x, p, b: x + lax.stop_gradient(x @ p["square"])),
    _network("resized_image", _resized, "either"),
    _network("cholesky_of_a_parameter", _whitened, "either"),
    _network("solve_per_example", _solved_per_example, "either"),
    _network("eigenvalues_per_example", lambda x, p, b: jnp.linalg.eigvalsh(
        jnp.einsum("brc,brd->bcd", x, x)), "either"),
    _network("gradient_inside_the_forward_pass", _second_order),
    _network("forward_mode_inside", _hessian_product),
    _network("two_vmaps", lambda x, p, b: jax.vmap(jax.vmap(lambda r: jnp.tanh(p["square"] @ r)))(
        x)),
    _network("vmap_over_columns", lambda x, p, b: jax.vmap(
        lambda c: jnp.cumsum(c, axis=1), in_axes=2, out_axes=2)(x)),
    _network("broadcast_against_a_parameter", lambda x, p, b: (
        x[:, :, None, :] * p["square"]).sum(-1)),
    _network("map_over_rows", lambda x, p, b: lax.map(
        lambda r: jnp.tanh(r @ p["square"]), x.swapaxes(0, 1)).swapaxes(0, 1)),
)  # fmt: skip
