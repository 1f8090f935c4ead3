"""Blocks of the model: hidden value in, hidden value of the same shape out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.fuzz.builder import Builder, dense, piece


@piece("block", "plain")
def perceptron(build: Builder) -> Any:
    one, act = dense(build), build.pick(jnp.tanh, jax.nn.gelu, jax.nn.silu, jnp.sin)
    residual = build.pick(True, False)
    return lambda q, h, b: (h if residual else 0) + act(one(q, h))


@piece("block", "plain")
def normalized(build: Builder) -> Any:
    one = dense(build)

    def block(q: Any, h: Any, b: Any) -> Any:
        centred = h - h.mean(-1, keepdims=True)
        return h + one(q, centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-3))

    return block


@piece("block", "plain")
def gated(build: Builder) -> Any:
    one, two = dense(build), dense(build)
    return lambda q, h, b: h + jax.nn.sigmoid(one(q, h)) * two(q, h)


@piece("block", "plain")
def attention(build: Builder) -> Any:
    if not build.sequential:
        return perceptron(build)
    maps = [dense(build) for _ in range(3)]
    causal = build.pick(True, False)

    def block(q: Any, h: Any, b: Any) -> Any:
        query, key, value = (f(q, h) for f in maps)
        scores = jnp.einsum("btd,bsd->bts", query, key) / np.sqrt(build.width)
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        return h + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), value)

    return block


@piece("block", "tied")
def one_weight_twice(build: Builder) -> Any:
    name = build.param(build.width, build.width)
    return lambda q, h, b: h + jnp.tanh(jnp.tanh(h @ q[name]) @ q[name].T)


@piece("block", "tied")
def weight_through_a_reshape(build: Builder) -> Any:
    name = build.param(build.width * build.width, scale=0.3)

    def block(q: Any, h: Any, b: Any) -> Any:
        weight = q[name].reshape(build.width, build.width)
        return jnp.tanh(h @ weight) + h * q[name][: build.width] + weight.sum() * 0.01

    return block


@piece("block", "tied")
def first_parameter_again(build: Builder) -> Any:
    first = next(iter(build.params), None) or build.param(build.width, build.width)
    one = dense(build)
    return lambda q, h, b: jnp.tanh(one(q, h)) * (1 + 0.1 * q[first].sum())


@piece("block", "dropout")
def dropout(build: Builder) -> Any:
    own, rate, one = build.key(), build.pick(0.1, 0.5), dense(build)

    def block(q: Any, h: Any, b: Any) -> Any:
        keep = jax.random.bernoulli(own(b), 1 - rate, h.shape)
        return jnp.where(keep, jnp.tanh(one(q, h)) / (1 - rate), 0)

    return block


@piece("block", "dropout")
def noise_and_a_whole_draw(build: Builder) -> Any:
    own, one = build.key(), dense(build)

    def block(q: Any, h: Any, b: Any) -> Any:
        first, second = jax.random.split(own(b))
        row = jax.random.normal(first, (h.shape[-1],), h.dtype)
        return one(q, h + 0.1 * jax.random.normal(second, h.shape, h.dtype)) * (1 + 0.1 * row)

    return block


@piece("block", "dropout")
def one_mask_per_example(build: Builder) -> Any:
    own = build.key()

    def block(q: Any, h: Any, b: Any) -> Any:
        shape = (h.shape[0],) + (1,) * (h.ndim - 1)
        keep = jax.random.uniform(own(b), shape, h.dtype) < 0.7
        again = jax.random.uniform(own(b), shape, h.dtype)  # the same key: the same numbers
        return h * keep * (1 + again)

    return block


@piece("block", "dropout")
def a_key_per_example(build: Builder) -> Any:
    own = build.key()

    def block(q: Any, h: Any, b: Any) -> Any:
        keys = jax.random.split(own(b), h.shape[0])
        return h + 0.1 * jax.vmap(lambda k: jax.random.normal(k, h.shape[1:], h.dtype))(keys)

    return block


@piece("block", "dropout")
def dropout_under_remat(build: Builder) -> Any:
    inner = dropout(build)
    return lambda q, h, b: jax.checkpoint(lambda h: inner(q, h, b))(h)


@piece("block", "positions")
def ramp_over_the_batch(build: Builder) -> Any:
    def block(q: Any, h: Any, b: Any) -> Any:
        n = h.shape[0]
        ramp = jnp.arange(n).astype(h.dtype).reshape((n,) + (1,) * (h.ndim - 1))
        return h * (1 + ramp / n)

    return block


@piece("block", "positions")
def own_row_and_a_chosen_column(build: Builder) -> Any:
    index, name = build.integers(build.width, build.rows), build.param(build.width)

    def block(q: Any, h: Any, b: Any) -> Any:
        n = h.shape[0]
        flat = h.reshape(n, -1)
        chosen = flat[jnp.arange(n), b[index]]
        marked = flat.at[jnp.arange(n), b[index]].add(jnp.tanh(chosen)).reshape(h.shape)
        return marked * q[name]

    return block


@piece("block", "positions")
def table_of_the_size_of_the_batch(build: Builder) -> Any:
    name = build.param(build.rows, build.width)

    def block(q: Any, h: Any, b: Any) -> Any:
        rows = q[name][jnp.arange(h.shape[0]) % build.rows]
        return h + rows.reshape(h.shape[0], *(1,) * (h.ndim - 2), build.width)

    return block


@piece("block", "merged_dims")
def batch_major(build: Builder) -> Any:
    one = dense(build)

    def block(q: Any, h: Any, b: Any) -> Any:
        return jnp.tanh(one(q, h.reshape(-1, build.width))).reshape(h.shape)

    return block


@piece("block", "merged_dims")
def time_major(build: Builder) -> Any:
    one = dense(build)

    def block(q: Any, h: Any, b: Any) -> Any:
        wide = h[:, None] if h.ndim == 2 else h
        flipped = wide.swapaxes(0, 1)
        flat = jnp.tanh(one(q, flipped.reshape(-1, build.width)))
        return flat.reshape(flipped.shape).swapaxes(0, 1).reshape(h.shape)

    return block


@piece("block", "merged_dims")
def batch_and_features_merged(build: Builder) -> Any:
    scale = build.param(1, scale=1.0)

    def block(q: Any, h: Any, b: Any) -> Any:
        flat = jnp.sin(h.reshape(-1) * q[scale])
        return h + flat.reshape(h.shape)

    return block


@piece("block", "merged_dims")
def features_split_off(build: Builder) -> Any:
    weight = build.param(build.width // 2, build.width // 2)

    def block(q: Any, h: Any, b: Any) -> Any:
        halves = h.reshape(*h.shape[:-1], 2, build.width // 2)
        mixed = jnp.tanh(halves @ q[weight])
        return mixed.swapaxes(-1, -2).reshape(h.shape)

    return block


@piece("block", "scan")
def scan_over_layers(build: Builder) -> Any:
    name, depth = build.param(3, build.width, build.width, scale=0.4), 3
    remat, outputs = build.pick(True, False), build.pick(True, False)

    def block(q: Any, h: Any, b: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w), (h.mean(-1) if outputs else None)

        h, seen = lax.scan(jax.checkpoint(layer) if remat else layer, h, q[name], length=depth)
        return h + seen.sum(0)[..., None] * 0.1 if outputs else h

    return block


@piece("block", "scan")
def scan_with_keys(build: Builder) -> Any:
    own, name = build.key(), build.param(2, build.width, build.width, scale=0.4)

    def block(q: Any, h: Any, b: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            h, key, total = carry
            key, use = jax.random.split(key)
            h = jnp.tanh(h @ w) * jax.random.bernoulli(use, 0.7, h.shape)
            return (h, key, total + w.sum()), None

        (h, key, total), _ = lax.scan(layer, (h, own(b), jnp.zeros((), h.dtype)), q[name])
        return h + 0.1 * total + 0.1 * jax.random.uniform(key, (build.width,), h.dtype)

    return block


@piece("block", "scan")
def scan_over_time(build: Builder) -> Any:
    one, two = dense(build), build.param(build.width, build.width, scale=0.3)
    backwards = build.pick(True, False)

    def block(q: Any, h: Any, b: Any) -> Any:
        steps = (h[:, None] if h.ndim == 2 else h).swapaxes(0, 1)

        def cell(carry: Any, x: Any) -> Any:
            carry = jnp.tanh(one(q, x) + carry @ q[two])
            return carry, carry

        _, out = lax.scan(cell, jnp.zeros_like(steps[0]), steps, reverse=backwards)
        return out.swapaxes(0, 1).reshape(h.shape)

    return block


@piece("block", "scan")
def scan_that_carries_a_sum(build: Builder) -> Any:
    name = build.param(3, build.width, build.width, scale=0.4)

    def block(q: Any, h: Any, b: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            h, count = carry
            return (jnp.tanh(h @ w), count + 1), None

        (h, count), _ = lax.scan(layer, (h, 0), q[name])
        return h / count

    return block


@piece("block", "cond")
def branch_on_a_parameter(build: Builder) -> Any:
    gate, one, two = build.param(1), dense(build), dense(build)

    def block(q: Any, h: Any, b: Any) -> Any:
        return lax.cond(
            q[gate][0] > 0, lambda h: jnp.tanh(one(q, h)), lambda h: h + 0.1 * two(q, h), h
        )

    return block


@piece("block", "cond")
def switch_on_the_step(build: Builder) -> Any:
    one = dense(build)

    def block(q: Any, h: Any, b: Any) -> Any:
        branches = [lambda h: h, lambda h: jnp.sin(one(q, h)), lambda h: jnp.zeros_like(h) + 0.5]
        return h + lax.switch(b["step"] % 3, branches, h)

    return block


@piece("block", "remat")
def remat(build: Builder) -> Any:
    one, two = dense(build), dense(build)
    policies = jax.checkpoint_policies
    policy = build.pick(None, policies.dots_saveable, policies.nothing_saveable)

    def block(q: Any, h: Any, b: Any) -> Any:
        return jax.checkpoint(lambda h: h + two(q, jnp.tanh(one(q, h))), policy=policy)(h)

    return block


@piece("block", "remat")
def remat_in_jit_in_scan(build: Builder) -> Any:
    name = build.param(2, build.width, build.width, scale=0.4)
    inner = jax.jit(jax.checkpoint(lambda h, w: jnp.tanh(h @ w) + h))
    return lambda q, h, b: lax.scan(lambda h, w: (inner(h, w), None), h, q[name])[0]


@piece("block", "loops")
def map_over_examples(build: Builder) -> Any:
    one = dense(build)
    return lambda q, h, b: lax.map(lambda x: jnp.tanh(one(q, x)) + x.mean(), h)


@piece("block", "loops")
def counted_loop(build: Builder) -> Any:
    one = dense(build)
    return lambda q, h, b: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(one(q, h)) + 0.1 * i, h)


@piece("block", "loops")
def loop_until_a_parameter_says(build: Builder) -> Any:
    one = dense(build)

    def block(q: Any, h: Any, b: Any) -> Any:
        factor, _ = lax.while_loop(
            lambda c: c[1] < 4, lambda c: (c[0] * 1.1, c[1] + 1), (jnp.ones((), h.dtype), 0)
        )
        return jnp.tanh(one(q, h)) * factor

    return block


@piece("block", "custom")
def custom_vjp(build: Builder) -> Any:
    one = dense(build)

    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return jnp.sin(x)

    clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * jnp.cos(x),))
    return lambda q, h, b: clipped(one(q, h))


@piece("block", "custom")
def custom_jvp_and_stopped(build: Builder) -> Any:
    one = dense(build)

    @jax.custom_jvp
    def f(x: Any) -> Any:
        return jnp.where(x > 0, x, 0.1 * x)

    f.defjvp(lambda p, t: (f(p[0]), jnp.where(p[0] > 0, t[0], 0.3 * t[0])))

    def block(q: Any, h: Any, b: Any) -> Any:
        straight = h + lax.stop_gradient(jnp.round(h) - h)
        return f(one(q, straight))

    return block


@piece("block", "indexing")
def embedding(build: Builder) -> Any:
    name, index = build.param(build.classes, build.width), build.integers(build.classes, build.rows)

    def block(q: Any, h: Any, b: Any) -> Any:
        return h + q[name][b[index]].reshape(h.shape[0], *(1,) * (h.ndim - 2), build.width)

    return block


@piece("block", "indexing")
def along_the_features(build: Builder) -> Any:
    index = build.integers(build.width, *build.hidden)
    return lambda q, h, b: h + jnp.take_along_axis(jnp.sin(h), b[index], axis=-1)


@piece("block", "indexing")
def one_hot_product(build: Builder) -> Any:
    name, index = build.param(build.classes, build.width), build.integers(build.classes, build.rows)

    def block(q: Any, h: Any, b: Any) -> Any:
        hot = jax.nn.one_hot(b[index], build.classes, dtype=h.dtype)
        return h * (hot @ q[name]).reshape(h.shape[0], *(1,) * (h.ndim - 2), build.width)

    return block


@piece("block", "indexing")
def fixed_columns(build: Builder) -> Any:
    order = [int(i) for i in build.draw.permutation(build.width)]  # of no integer type
    return lambda q, h, b: h[..., np.array(order)] + h.at[..., :2].set(0.5)


@piece("block", "indexing")
def scatter_into_features(build: Builder) -> Any:
    index = build.integers(build.width, build.rows)

    def block(q: Any, h: Any, b: Any) -> Any:
        return h + jax.vmap(lambda x, i: x.at[..., i].multiply(2.0))(h, b[index])

    return block


@piece("block", "ordering")
def ordered_features(build: Builder) -> Any:
    how = build.pick("sort", "cumsum", "flip", "roll", "top_k", "cummax")

    def block(q: Any, h: Any, b: Any) -> Any:
        if how == "top_k":
            return h * lax.top_k(h, 2)[0].sum(-1, keepdims=True)
        functions = {
            "sort": lambda x: jnp.sort(x, -1),
            "cumsum": lambda x: jnp.cumsum(x, -1) * 0.3,
            "flip": lambda x: jnp.flip(x, -1),
            "roll": lambda x: jnp.roll(x, 1, -1),
            "cummax": lambda x: lax.cummax(x, axis=x.ndim - 1),
        }
        return h + functions[how](jnp.tanh(h))

    return block


@piece("block", "spectral")
def fourier(build: Builder) -> Any:
    name = build.param(build.width // 2 + 1)

    def block(q: Any, h: Any, b: Any) -> Any:
        wide = h.astype(jnp.promote_types(h.dtype, jnp.float32))
        return jnp.fft.irfft(jnp.fft.rfft(wide) * q[name], n=build.width).astype(h.dtype)

    return block


@piece("block", "spectral")
def convolution(build: Builder) -> Any:
    kernel = build.param(3, build.width, build.width, scale=0.2)

    def block(q: Any, h: Any, b: Any) -> Any:
        x = h[:, None] if h.ndim == 2 else h
        out = lax.conv_general_dilated(
            x, q[kernel], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.tanh(out).reshape(h.shape)

    return block


@piece("block", "einsum")
def heads(build: Builder) -> Any:
    weight = build.param(2, build.width // 2, build.width // 2, scale=0.5)

    def block(q: Any, h: Any, b: Any) -> Any:
        x = h.reshape(*h.shape[:-1], 2, build.width // 2)
        return jnp.tanh(jnp.einsum("...kd,kde->...ke", x, q[weight])).reshape(h.shape)

    return block


@piece("block", "einsum")
def outer_product(build: Builder) -> Any:
    other = build.data(build.rows, 3)
    name = build.param(3, build.width)

    def block(q: Any, h: Any, b: Any) -> Any:
        flat = h.reshape(h.shape[0], -1, build.width)
        pairs = jnp.einsum("bsd,bk->bsdk", flat, b[other])
        return jnp.tanh(jnp.einsum("bsdk,kd->bsd", pairs, q[name])).reshape(h.shape)

    return block


@piece("block", "einsum")
def vectorized(build: Builder) -> Any:
    one, other = dense(build), build.data(build.width, build.rows)
    build.axes[other] = 1

    def block(q: Any, h: Any, b: Any) -> Any:
        return jax.vmap(lambda x, y: jnp.tanh(one(q, x)) * y, in_axes=(0, 1))(h, b[other])

    return block


@piece("block", "batch_numbers")
def scaled_by_the_batch_size(build: Builder) -> Any:
    one, how = dense(build), build.pick("divide", "clip", "power", "column", "iterate")

    def block(q: Any, h: Any, b: Any) -> Any:
        n, out = h.shape[0], jnp.tanh(one(q, h))
        if how == "divide":
            return out * 4 / n + h
        if how == "clip":
            return jnp.clip(out, -2 / n, 4 / n)
        if how == "power":
            return h + (out * 0.9) ** n
        if how == "column":
            return h * jnp.take(jnp.tile(out, 8), n, axis=-1)[..., None]
        return lax.stop_gradient(lax.fori_loop(0, n, lambda i, x: jnp.sin(x) + 0.1, h)) + out

    return block


@piece("block", "constants")
def captured_arrays(build: Builder) -> Any:
    row = build.draw.normal(size=(build.width,)).astype(np.float32)
    table = build.draw.normal(size=(build.rows, build.width)).astype(np.float32)

    def block(q: Any, h: Any, b: Any) -> Any:
        n = h.shape[0]
        ramp = np.linspace(0, 1, n, dtype=np.float32).reshape((n,) + (1,) * (h.ndim - 1))
        return (
            h * row.astype(h.dtype)
            + ramp.astype(h.dtype)
            + (h @ table.astype(h.dtype).T).mean(-1, keepdims=True)
        )

    return block


@piece("block", "mixes")
def mixes_examples(build: Builder) -> Any:
    how, one = (
        build.pick("norm", "attend", "roll", "sort", "rank", "permute", "shift"),
        dense(build),
    )
    order = build.draw.permutation(build.rows)

    def block(q: Any, h: Any, b: Any) -> Any:
        out = one(q, h)
        flat = out.reshape(h.shape[0], -1)
        if how == "norm":
            out = (out - out.mean(0)) / jnp.sqrt(out.var(0) + 1e-3)
        elif how == "attend":
            out = (jax.nn.softmax(flat @ flat.T) @ flat).reshape(h.shape)
        elif how == "roll":
            out = jnp.roll(out, 1, axis=0)
        elif how == "sort":
            out = jnp.sort(out, axis=0)
        elif how == "rank":
            out = out * jnp.argsort(flat[:, 0]).astype(h.dtype).reshape(-1, *(1,) * (h.ndim - 1))
        elif how == "permute":
            out = out[jnp.argsort(jnp.sin(jnp.arange(h.shape[0]) * 7.0))] + out * float(order[0])
        else:
            out = out - jnp.concatenate([out[1:], out[:1]])
        return h + jnp.tanh(out)

    return block
