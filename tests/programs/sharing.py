"""A1: one parameter read in several places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.models import (
    DIM,
    Params,
    block,
    block_params,
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
from tests.programs.program import Run, instead, program

Cut = Callable[[jax.Array], jax.Array]


def _keep(x: jax.Array) -> jax.Array:
    return x


def _tied_step(cut: Cut) -> Any:
    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = embed(params, batch["tokens"])
        for one in params["blocks"]:
            x = block(one, x)
        logits = x @ cut(params["embed"]).T
        return cross_entropy(logits, batch["labels"]).mean()

    return sgd_step(loss_fn)


@program("A1", naive=instead(_tied_step(jax.lax.stop_gradient)), shouts=0.7)
def tied_embedding() -> Run:
    draw = np.random.default_rng(10)
    return Run(_tied_step(_keep), (transformer_params(draw), tokens(draw)))


def _shared_bias_step(cut: Cut) -> Any:
    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = batch["x"]
        for w in params["ws"][:-1]:
            x = jnp.tanh(x @ w + cut(params["bias"]))
        x = jnp.tanh(x @ params["ws"][-1] + params["bias"])
        return ((x - batch["y"]) ** 2).mean()

    return sgd_step(loss_fn)


@program("A1", naive=instead(_shared_bias_step(jax.lax.stop_gradient)), shouts=0.3)
def one_bias_in_every_layer() -> Run:
    draw = np.random.default_rng(11)
    params = {"ws": [weight(draw, DIM, DIM) for _ in range(5)], "bias": normal(draw, DIM)}
    return Run(_shared_bias_step(_keep), (params, regression(draw, DIM, DIM)))


def _twice_step(cut: Cut) -> Any:
    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params["in"])
        x = x + jnp.tanh(x @ params["twice"]) @ cut(params["twice"]).T
        return ((x @ params["out"] - batch["y"]) ** 2).mean()

    return sgd_step(loss_fn)


@program("A1", naive=instead(_twice_step(jax.lax.stop_gradient)), shouts=0.3)
def read_twice_inside_one_layer() -> Run:
    draw = np.random.default_rng(12)
    params = {
        "in": weight(draw, DIM, DIM),
        "twice": weight(draw, DIM, 2 * DIM),
        "out": weight(draw, DIM, 4),
    }
    return Run(_twice_step(_keep), (params, regression(draw)))


@program("A1")
def one_block_for_every_layer() -> Run:
    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = embed(params, batch["tokens"])
        for _ in range(4):
            x = block(params["block"], x)
        return cross_entropy(x @ params["embed"].T, batch["labels"]).mean()

    draw = np.random.default_rng(13)
    params = transformer_params(draw, layers=0)
    params["block"] = block_params(draw)
    return Run(sgd_step(loss_fn), (params, tokens(draw)))


@program("A1")
def tied_autoencoder() -> Run:
    def loss_fn(params: list[Params], batch: Params) -> jax.Array:
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        for layer in reversed(params):
            x = (x - layer["b"]) @ layer["w"].T
        return ((x - batch["x"]) ** 2).mean()

    draw = np.random.default_rng(14)
    return Run(sgd_step(loss_fn), (mlp_params(draw, DIM, 12, 8, 6), {"x": regression(draw)["x"]}))


@program("A1")
def tied_through_state_twice() -> Run:
    """The same weights under two names of the state, kept equal by the step itself."""

    def step(state: Params, batch: Params) -> Any:
        def loss_fn(w: jax.Array) -> jax.Array:
            x = jnp.tanh(batch["x"] @ w)
            x = jnp.tanh(x @ state["mid"]) @ state["copy"].T
            return ((x @ w - batch["x"]) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        w = state["w"] - 0.1 * grad
        return {"w": w, "mid": state["mid"], "copy": w}, {"loss": loss, "grad": grad}

    draw = np.random.default_rng(15)
    w = weight(draw, DIM, DIM)
    state = {"w": w, "mid": weight(draw, DIM, DIM), "copy": w + 0}
    return Run(step, (state, {"x": regression(draw)["x"]}))
