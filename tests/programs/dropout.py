"""A4: random values: what the full batch draws is what the microbatches use, slice by slice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.models import (
    DIM,
    Batch,
    Params,
    block,
    block_params,
    cross_entropy,
    embed,
    mlp_params,
    normal,
    regression,
    sgd,
    tokens,
    transformer_params,
    weight,
)
from tests.programs.program import Run, mean_of_slices, program

KEEP = 0.7


def _dropped(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mask = jax.random.bernoulli(key, KEEP, x.shape)
    return jnp.where(mask, x / KEEP, 0), mask


def _state(draw: np.random.Generator, *sizes: int) -> Params:
    return {"params": mlp_params(draw, *sizes), "key": jax.random.key(int(draw.integers(1000)))}


def _dropout_step(wrap: Any = lambda f: f) -> Any:
    """An MLP with dropout after every layer; the masks are outputs."""

    def layer(p: Params, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _dropped(key, jnp.tanh(x @ p["w"] + p["b"]))

    def step(state: Params, batch: Batch) -> Any:
        next_key, *keys = jax.random.split(state["key"], 1 + len(state["params"]))

        def loss_fn(params: list[Params]) -> Any:
            x, masks = batch["x"], []
            for p, key in zip(params, keys, strict=True):
                x, mask = wrap(layer)(p, x, key)
                masks.append(mask)
            return ((x - batch["y"]) ** 2).mean(), masks

        (loss, masks), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        new = {"params": sgd(state["params"], grads), "key": next_key}
        return new, {"loss": loss, "masks": masks, "grads": grads}

    return step


@program("A4", naive=mean_of_slices, shouts=0.5)
def masks_equal_the_full_draw() -> Run:
    draw = np.random.default_rng(50)
    return Run(_dropout_step(), (_state(draw, DIM, 24, 12, 4), regression(draw)))


@program("A4", naive=mean_of_slices, shouts=0.5)
def masks_under_remat() -> Run:
    draw = np.random.default_rng(51)
    return Run(_dropout_step(jax.checkpoint), (_state(draw, DIM, 24, 12, 4), regression(draw)))


@program("A4")
def legacy_uint32_keys() -> Run:
    draw = np.random.default_rng(52)
    state = _state(draw, DIM, 24, 12, 4) | {"key": jax.random.PRNGKey(3)}
    return Run(_dropout_step(), (state, regression(draw)))


@program("A4")
def dropout_in_a_transformer() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        def loss_fn(params: Params) -> Any:
            key = jax.random.fold_in(state["key"], state["count"])
            x, mask = _dropped(key, embed(params, batch["tokens"]))
            masks = [mask]
            for i, p in enumerate(params["blocks"]):
                x, mask = _dropped(jax.random.fold_in(key, i), block(p, x))
                masks.append(mask)
            logits = x @ params["embed"].T
            return cross_entropy(logits, batch["labels"]).mean(), masks

        (loss, masks), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        new = {"params": sgd(state["params"], grads), "key": state["key"]}
        return new | {"count": state["count"] + 1}, {"loss": loss, "masks": masks, "grads": grads}

    draw = np.random.default_rng(53)
    state = {
        "params": transformer_params(draw, layers=2),
        "key": jax.random.key(7),
        "count": jnp.int32(3),
    }
    return Run(step, (state, tokens(draw)))


@program("A4")
def one_mask_per_sequence_and_one_per_position() -> Run:
    """Masks broadcast along a dimension: (batch, 1, dim) and (1, seq, dim)."""

    def step(state: Params, batch: Batch) -> Any:
        one, two = jax.random.split(state["key"])

        def loss_fn(params: Params) -> jax.Array:
            x = embed(params, batch["tokens"])
            x = x * jax.random.bernoulli(one, KEEP, (x.shape[0], 1, x.shape[2])) / KEEP
            x = block(params["blocks"][0], x)
            x = x * jax.random.bernoulli(two, KEEP, (1, *x.shape[1:])) / KEEP
            return cross_entropy(x @ params["embed"].T, batch["labels"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        return {"params": sgd(state["params"], grads), "key": two}, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(54)
    state = {"params": transformer_params(draw, layers=1), "key": jax.random.key(8)}
    return Run(step, (state, tokens(draw)))


def _weight_noise_step(state: Params, batch: Batch) -> Any:
    key, next_key = jax.random.split(state["key"])

    def loss_fn(w: list[jax.Array]) -> jax.Array:
        noise = jax.random.normal(key, w[0].shape)
        x = jnp.tanh(batch["x"] @ (w[0] + noise))
        return ((x @ w[1] - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["w"])
    return {"w": sgd(state["w"], grads), "key": next_key}, {"loss": loss, "grads": grads}


def _noise_of_every_microbatch(run: Run, m: int) -> Any:
    state, batch = run.args
    rows = batch["x"].shape[0] // m
    results = [
        jax.jit(run.step)(
            state | {"key": jax.random.fold_in(state["key"], k)},
            jax.tree.map(lambda x, k=k: x[k * rows : (k + 1) * rows], batch),
        )
        for k in range(m)
    ]
    metrics = [metrics for _, metrics in results]
    return results[0][0], jax.tree.map(lambda *xs: jnp.stack(xs).mean(0), *metrics)


@program("A4", naive=_noise_of_every_microbatch, shouts=0.4)
def noise_without_a_batch_axis_is_drawn_once() -> Run:
    draw = np.random.default_rng(55)
    state = {"w": [weight(draw, DIM, 12), weight(draw, 12, 4)], "key": jax.random.key(1)}
    return Run(_weight_noise_step, (state, regression(draw)))


@program("A4")
def one_key_read_twice_gives_equal_numbers() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        def loss_fn(w: Any) -> Any:
            x, first = _dropped(state["key"], jnp.tanh(batch["x"] @ w[0]))
            x, second = _dropped(state["key"], jnp.tanh(x @ w[1]))
            return ((x @ w[2] - batch["y"]) ** 2).mean(), (first, second)

        grads, masks = jax.grad(loss_fn, has_aux=True)(state["w"])
        return state | {"w": sgd(state["w"], grads)}, {"masks": masks, "grads": grads}

    draw = np.random.default_rng(56)
    w = [weight(draw, DIM, DIM), weight(draw, DIM, DIM), weight(draw, DIM, 4)]
    return Run(step, ({"w": w, "key": jax.random.key(2)}, regression(draw)))


@program("A4", naive=mean_of_slices, shouts=0.5)
def many_distributions_along_the_batch() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        keys = jax.random.split(state["key"], 6)
        rows = batch["x"].shape[0]

        def loss_fn(w: Any) -> Any:
            noisy = batch["x"] + 0.1 * jax.random.normal(keys[0], batch["x"].shape)
            x = jnp.tanh(noisy @ w[0]) + jax.random.uniform(keys[1], (rows, 12))
            x = x * jax.random.randint(keys[2], (rows, 1), 1, 4)
            x = x + jax.random.exponential(keys[3], (rows, 12)) * 0.1
            logits = x @ w[1]
            noise = jax.random.gumbel(keys[4], logits.shape)
            picked = jax.random.categorical(keys[5], logits)
            soft = jax.nn.softmax(logits + noise)
            return ((soft - batch["y"]) ** 2).mean(), picked

        (loss, picked), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["w"])
        return state | {"w": sgd(state["w"], grads), "key": keys[0]}, (loss, picked, grads)

    draw = np.random.default_rng(57)
    state = {"w": [weight(draw, DIM, 12), weight(draw, 12, 4)], "key": jax.random.key(4)}
    return Run(step, (state, regression(draw)))


@program("A4")
def batch_in_the_second_dimension_of_the_draw() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        key, next_key = jax.random.split(state["key"])

        def loss_fn(w: Any) -> jax.Array:
            x = jnp.tanh(batch["x"] @ w[0]).T
            mask = jax.random.bernoulli(key, KEEP, x.shape)
            return (((x * mask).T @ w[1] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        return {"w": sgd(state["w"], grads), "key": next_key}, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(58)
    state = {"w": [weight(draw, DIM, 12), weight(draw, 12, 4)], "key": jax.random.key(5)}
    return Run(step, (state, regression(draw)))


@program("A4")
def dropout_inside_a_scan_over_layers() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        key, next_key = jax.random.split(state["key"])
        keys = jax.random.split(key, 4)

        def loss_fn(params: Params) -> Any:
            def layer(x: jax.Array, layer: Any) -> Any:
                w, key = layer
                x, mask = _dropped(key, x + jnp.tanh(x @ w))
                return x, mask

            x, masks = jax.lax.scan(layer, batch["x"] @ params["in"], (params["ws"], keys))
            return ((x @ params["out"] - batch["y"]) ** 2).mean(), masks

        (loss, masks), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        new = {"params": sgd(state["params"], grads), "key": next_key}
        return new, {"loss": loss, "masks": masks, "grads": grads}

    draw = np.random.default_rng(59)
    params = {
        "in": weight(draw, DIM, 12),
        "ws": normal(draw, 4, 12, 12, scale=0.3),
        "out": weight(draw, 12, 4),
    }
    return Run(step, ({"params": params, "key": jax.random.key(6)}, regression(draw)))


@program("A4")
def stochastic_depth_drawn_once_per_layer() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        gates = jax.random.bernoulli(state["key"], 0.5, (3,))

        def loss_fn(params: Params) -> jax.Array:
            x = embed(params, batch["tokens"])
            for gate, p in zip(gates, params["blocks"], strict=True):
                x = jnp.where(gate, block(p, x), x)
            return cross_entropy(x @ params["embed"].T, batch["labels"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        return state | {"params": sgd(state["params"], grads)}, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(60)
    params = transformer_params(draw, layers=0) | {"blocks": [block_params(draw) for _ in range(3)]}
    return Run(step, ({"params": params, "key": jax.random.key(9)}, tokens(draw)))


@program("A4", expect="either")
def one_key_per_example_under_vmap() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        keys = jax.random.split(state["key"], batch["x"].shape[0])

        def one(w: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
            x, mask = _dropped(key, jnp.tanh(x @ w[0]))
            return ((x @ w[1] - y) ** 2).sum(), mask

        def loss_fn(w: Any) -> Any:
            losses, masks = jax.vmap(one, (None, 0, 0, 0))(w, batch["x"], batch["y"], keys)
            return losses.mean(), masks

        grads, masks = jax.grad(loss_fn, has_aux=True)(state["w"])
        return state | {"w": sgd(state["w"], grads)}, {"masks": masks, "grads": grads}

    draw = np.random.default_rng(61)
    state = {"w": [weight(draw, DIM, 12), weight(draw, 12, 4)], "key": jax.random.key(10)}
    return Run(step, (state, regression(draw)))


@program("A4", expect="refused")
def generator_whose_bits_depend_on_the_shape() -> Run:
    run = masks_equal_the_full_draw.make()
    state = run.args[0] | {"key": jax.random.key(3, impl="rbg")}
    return Run(run.step, (state, run.args[1]))
