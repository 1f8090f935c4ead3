"""B11: values that cross stages: skips, tables that all stages read, integers, constants."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.models import (
    BATCH,
    DIM,
    SEQ,
    Batch,
    Params,
    block,
    cross_entropy,
    embed,
    mlp_params,
    normal,
    regression,
    sgd_step,
    tokens,
    transformer_params,
    weight,
)
from tests.programs.program import Run, program


@program("B11")
def u_net() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x, kept = batch["x"], []
        for w in params["down"]:
            x = jnp.tanh(x @ w)
            kept.append(x)
        for w, skip in zip(params["up"], reversed(kept), strict=True):
            x = jnp.tanh(jnp.concatenate([x, skip], -1) @ w)
        return ((x - batch["x"]) ** 2).mean()

    draw = np.random.default_rng(140)
    sizes = (DIM, 14, 12, 10, 8)
    pairs = list(itertools.pairwise(sizes))
    params = {
        "down": [weight(draw, a, b) for a, b in pairs],
        "up": [weight(draw, 2 * b, a) for a, b in reversed(pairs)],
    }
    return Run(sgd_step(loss_fn), (params, {"x": normal(draw, BATCH, DIM)}))


@program("B11")
def dense_connections_from_every_layer_to_every_later_one() -> Run:
    def loss_fn(params: list[jax.Array], batch: Batch) -> jax.Array:
        seen = [batch["x"]]
        for w in params[:-1]:
            seen.append(jnp.tanh(jnp.concatenate(seen, -1) @ w))
        return ((jnp.concatenate(seen, -1) @ params[-1] - batch["y"]) ** 2).mean()

    draw = np.random.default_rng(141)
    params = [weight(draw, DIM + 6 * i, 6) for i in range(5)] + [weight(draw, DIM + 30, 4)]
    return Run(sgd_step(loss_fn), (params, regression(draw)))


@program("B11")
def attention_mask_and_rotary_table_of_every_stage() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        lengths = batch["mask"].sum(1).astype(jnp.int32)
        alive = jnp.arange(SEQ)[None] < lengths[:, None]
        causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))
        mask = (causal & alive[:, None, :])[:, None]
        table = jnp.cos(jnp.arange(SEQ)[:, None] * 0.5 ** jnp.arange(DIM))
        x = embed(params, batch["tokens"])
        for p in params["blocks"]:
            x = block(p, x * table, mask)
        losses = cross_entropy(x @ params["embed"].T, batch["labels"])
        return jnp.where(alive, losses, 0).sum() / alive.sum()

    draw = np.random.default_rng(142)
    return Run(sgd_step(loss_fn), (transformer_params(draw, layers=3), tokens(draw)))


@program("B11")
def integers_and_bools_cross_the_cuts() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        x, path = batch["x"], jnp.zeros(batch["x"].shape[0], jnp.int32)
        alive = jnp.ones(batch["x"].shape[0], bool)
        for p in params:
            y = jnp.tanh(x @ p["w"] + p["b"])
            alive = alive & (y[:, 0] < 0.9)
            path = path * 2 + (y[:, 1] > 0)
            x = jnp.where(alive[:, None], y, x)
        return ((x * (1 + path % 3)[:, None]) ** 2).mean()

    draw = np.random.default_rng(143)
    return Run(sgd_step(loss_fn), (mlp_params(draw, DIM, DIM, DIM, DIM, DIM), regression(draw)))


@program("B11")
def closed_over_constants() -> Run:
    draw = np.random.default_rng(144)
    table = normal(draw, 10, DIM)
    scale = np.linspace(0.5, 1.5, 12, dtype=np.float32)
    late = normal(draw, 4, 4)

    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        x = batch["x"] + table[batch["id"]]
        x = jnp.tanh(x @ params[0]["w"] + params[0]["b"]) * scale
        x = jnp.tanh(x @ params[1]["w"] + params[1]["b"])
        return ((x @ late - batch["y"]) ** 2).mean()

    batch = regression(draw) | {"id": jnp.asarray(draw.integers(0, 10, BATCH))}
    return Run(sgd_step(loss_fn), (mlp_params(draw, DIM, 12, 4), batch))


@program("B11")
def encoder_read_by_every_layer_of_the_decoder() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        memory = embed(params, batch["tokens"])
        for p in params["blocks"][:2]:
            memory = block(p, memory)
        x = embed(params, batch["labels"])
        for p, w in zip(params["blocks"][2:], params["cross"], strict=True):
            scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w, memory))
            x = block(p, x + scores @ memory)
        return cross_entropy(x @ params["embed"].T, batch["labels"]).mean()

    draw = np.random.default_rng(145)
    params = transformer_params(draw, layers=4)
    params["cross"] = [weight(draw, DIM, DIM) for _ in range(2)]
    return Run(sgd_step(loss_fn), (params, tokens(draw)))


@program("B11")
def two_towers_and_a_loss_in_the_middle() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        left, right, early = batch["x"], batch["y"], 0.0
        for one, two in zip(params["left"], params["right"], strict=True):
            left = jnp.tanh(left @ one["w"] + one["b"])
            right = jnp.tanh(right @ two["w"] + two["b"])
            early = early + ((left - right) ** 2).mean()
        return (left * right).sum(-1).mean() + 0.1 * early

    draw = np.random.default_rng(146)
    params = {"left": mlp_params(draw, DIM, 8, 8, 8), "right": mlp_params(draw, 4, 8, 8, 8)}
    return Run(sgd_step(loss_fn), (params, regression(draw)))


@program("B11")
def early_exits_with_their_own_losses() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x, total = embed(params, batch["tokens"]), 0.0
        for i, p in enumerate(params["blocks"]):
            x = block(p, x)
            total += (i + 1) * cross_entropy(x @ params["embed"].T, batch["labels"]).mean()
        return total

    draw = np.random.default_rng(147)
    return Run(sgd_step(loss_fn), (transformer_params(draw, layers=3), tokens(draw)))


@program("B11")
def input_read_again_at_the_end() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return ((x + batch["x"] * batch["y"][:, :1]) ** 2).mean()

    draw = np.random.default_rng(148)
    return Run(sgd_step(loss_fn), (mlp_params(draw, DIM, 8, 8, DIM), regression(draw)))


def trained_two_passes(params: Any, batch: Any) -> Any:
    """Two gradients of one loss at two points (sharpness-aware): a second pass over the batch."""

    def loss_fn(params: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params[0]["w"] + params[0]["b"])
        return ((x @ params[1]["w"] + params[1]["b"] - batch["y"]) ** 2).mean()

    first = jax.grad(loss_fn)(params)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(first)))
    moved = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, first)
    grads = jax.grad(loss_fn)(moved)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads


# The second pass needs the whole first gradient.
@program("B11", expect="either")
def sharpness_aware_two_passes() -> Run:
    draw = np.random.default_rng(149)
    return Run(trained_two_passes, (mlp_params(draw, DIM, 8, 4), regression(draw)))
