"""A5: what mixes examples: exact, refused by name, or per microbatch where that is asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.models import (
    DIM,
    Batch,
    Params,
    cross_entropy,
    mlp_params,
    normal,
    regression,
    sgd,
    sgd_step,
    weight,
)
from tests.programs.program import Program, Run, mean_of_slices, program


def _batch_norm(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    mean, variance = x.mean(0), x.var(0)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale, mean, variance


def _batch_norm_step(state: Params, batch: Batch) -> Any:
    def loss_fn(params: Params) -> Any:
        x, mean, variance = _batch_norm(batch["x"] @ params["in"], params["scale"])
        return ((jnp.tanh(x) @ params["out"] - batch["y"]) ** 2).mean(), (mean, variance)

    (loss, fresh), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    running = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["running"], fresh)
    return {"params": sgd(state["params"], grads), "running": running}, {"loss": loss, "g": grads}


def _batch_norm_run(**options: Any) -> Run:
    draw = np.random.default_rng(70)
    params = {"in": weight(draw, DIM, 12), "scale": normal(draw, 12), "out": weight(draw, 12, 4)}
    state = {"params": params, "running": (jnp.zeros(12), jnp.ones(12))}
    return Run(_batch_norm_step, (state, regression(draw)), options=options)


@program("A5", expect="either", naive=mean_of_slices, shouts=0.3)
def batch_norm() -> Run:
    return _batch_norm_run()


def _contrastive_loss(params: Params, batch: Batch) -> jax.Array:
    def unit(x: jax.Array) -> jax.Array:
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    left = unit(jnp.tanh(batch["x"] @ params["left"]) @ params["last"])
    right = unit(jnp.tanh(batch["y"] @ params["right"]) @ params["last"])
    scores = left @ right.T / 0.2
    return cross_entropy(scores, jnp.arange(scores.shape[0])).mean()


def _contrastive_run(**options: Any) -> Run:
    draw = np.random.default_rng(71)
    params = {
        "left": weight(draw, DIM, 12),
        "right": weight(draw, DIM, 12),
        "last": weight(draw, 12, 8),
    }
    return Run(sgd_step(_contrastive_loss), (params, regression(draw, DIM, DIM)), options=options)


@program("A5", expect="either", naive=mean_of_slices, shouts=0.3)
def contrastive_loss() -> Run:
    return _contrastive_run()


def _experts(draw: np.random.Generator) -> Params:
    return {"router": weight(draw, DIM, 4), "up": normal(draw, 4, DIM, DIM, scale=0.3)}


def _capacity_routing_loss(params: Params, batch: Batch) -> jax.Array:
    """Each expert takes its first half-a-batch tokens, in the order of the batch."""
    gates = jax.nn.softmax(batch["x"] @ params["router"])
    choice = jax.nn.one_hot(gates.argmax(-1), 4)
    capacity = batch["x"].shape[0] // 2
    place = (jnp.cumsum(choice, axis=0) - 1) * choice
    slots = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
    dispatch = choice[:, :, None] * slots[:, None, :]
    inputs = jnp.einsum("bec,bd->ecd", dispatch, batch["x"])
    outputs = jnp.tanh(jnp.einsum("ecd,edf->ecf", inputs, params["up"]))
    combined = jnp.einsum("bec,ecf->bf", dispatch * gates[:, :, None], outputs)
    return ((combined - batch["y"]) ** 2).mean()


def _capacity_run(**options: Any) -> Run:
    draw = np.random.default_rng(72)
    step = sgd_step(_capacity_routing_loss)
    # 16 examples: capacity is a whole number for two examples, the smallest microbatch of M = 8
    batch = {name: normal(draw, 16, DIM) + 0.5 for name in ("x", "y")}
    return Run(step, (_experts(draw), batch), options=options)


@program("A5", expect="either", naive=mean_of_slices, shouts=0.2)
def capacity_routing() -> Run:
    return _capacity_run()


def _balance_loss(params: Params, batch: Batch) -> jax.Array:
    """Switch's auxiliary loss: a product of two means over the batch."""
    gates = jax.nn.softmax(batch["x"] @ params["router"])
    choice = jax.nn.one_hot(gates.argmax(-1), 4)
    every = jnp.tanh(jnp.einsum("bd,edf->bef", batch["x"], params["up"]))
    mixed = jnp.einsum("be,bef->bf", choice * gates, every)
    balance = 4 * (choice.mean(0) * gates.mean(0)).sum()
    return ((mixed - batch["y"]) ** 2).mean() + 0.5 * balance


def _balance_run(**options: Any) -> Run:
    draw = np.random.default_rng(73)
    step = sgd_step(_balance_loss)
    return Run(step, (_experts(draw), regression(draw, DIM, DIM)), options=options)


@program("A5", expect="either", naive=mean_of_slices, shouts=0.01)
def balance_of_experts() -> Run:
    return _balance_run()


@program("A5", expect="either")
def standardized_targets() -> Run:
    """Statistics of the data alone: cheap, so exact in the prologue is best."""

    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        y = (batch["y"] - batch["y"].mean(0)) / (batch["y"].std(0) + 1e-3)
        x = jnp.tanh(batch["x"] @ params[0]["w"] + params[0]["b"])
        return ((x @ params[1]["w"] + params[1]["b"] - y) ** 2).mean()

    draw = np.random.default_rng(74)
    return Run(sgd_step(loss_fn), (mlp_params(draw, DIM, 12, 4), regression(draw)))


def per_microbatch_programs() -> tuple[Program, ...]:
    """The same steps where the user takes the per-microbatch meaning knowingly."""
    statistics = {"batch_statistics": "per_microbatch"}
    routing = {"routing": "per_microbatch"}

    def asked(name: str, make: Any, settings: dict[str, str]) -> Program:
        from hetpass.api import Options

        return Program(
            f"{name}_per_microbatch",
            "A5",
            lambda: make(options=Options(**settings)),
            reference=mean_of_slices,
            # Centred gradients of a normalized layer are small differences of larger numbers.
            tolerance=5e-5 if name == "batch_norm" else None,
        )

    return (
        asked("batch_norm", _batch_norm_run, statistics),
        asked("contrastive_loss", _contrastive_run, statistics),
        asked("capacity_routing", _capacity_run, routing),
        asked("balance_of_experts", _balance_run, routing),
    )
