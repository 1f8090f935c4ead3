"""A9: optimizers and what is trained."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.programs.models import (
    DIM,
    Batch,
    Params,
    cross_entropy,
    mlp,
    mlp_params,
    normal,
    regression,
    sgd,
    tokens,
    transformer,
    transformer_params,
    weight,
)
from tests.programs.program import Program, Run, program


def _mse(params: Any, batch: Batch) -> jax.Array:
    return ((mlp(params, batch["x"]) - batch["y"]) ** 2).mean()


def _named(params: list[Params]) -> Any:
    """Which parameters are weights and which biases, by rank."""
    return jax.tree.map(lambda p: "weight" if p.ndim > 1 else "bias", params)


def _optimizer_step(optimizer: optax.GradientTransformation, steps: int = 1) -> Any:
    def step(state: Any, batch: Batch) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(_mse)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "grads": grads}

    return step


def _trained_by(name: str, optimizer: Any, calls: int = 0) -> Program:
    """A Program with this optimizer; `calls` steps were taken before by one device."""

    def make() -> Run:
        draw = np.random.default_rng(100)
        params, batch = mlp_params(draw, DIM, 12, 8, 4), regression(draw)
        state = (params, optimizer.init(params))
        step = _optimizer_step(optimizer)
        for _ in range(calls):
            state, _ = jax.jit(step)(state, batch)
        return Run(step, (state, batch))

    return Program(name, "A9", make)


_SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)

by_optimizer: tuple[Program, ...] = (
    _trained_by("sgd_with_momentum", optax.sgd(0.1, momentum=0.9, nesterov=True), 2),
    _trained_by("adamw_with_a_schedule", optax.adamw(_SCHEDULE, weight_decay=1e-2), 3),
    _trained_by("adafactor", optax.adafactor(1e-2, min_dim_size_to_factor=4), 1),
    _trained_by("lion", optax.lion(1e-3), 2),
    _trained_by("lamb", optax.lamb(1e-2), 1),
    _trained_by("multi_steps_accumulating", optax.MultiSteps(optax.sgd(0.1), 3), 0),
    _trained_by("multi_steps_applying", optax.MultiSteps(optax.adam(1e-2), 2), 1),
    _trained_by("apply_if_finite", optax.apply_if_finite(optax.sgd(0.1, 0.9), 3), 1),
    _trained_by(
        "multi_transform",
        optax.multi_transform({"weight": optax.adam(1e-2), "bias": optax.sgd(0.1)}, _named),
        1,
    ),
    _trained_by(
        "masked_weight_decay",
        optax.chain(
            optax.masked(
                optax.add_decayed_weights(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
            ),
            optax.sgd(0.1),
        ),
    ),
    _trained_by("injected_hyperparameters", optax.inject_hyperparams(optax.adam)(1e-2), 1),
)


@program("A9")
def average_of_parameters() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(_mse)(state["params"], batch)
        params = sgd(state["params"], grads)
        average = optax.incremental_update(params, state["average"], 0.01)
        return {"params": params, "average": average}, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(101)
    params = mlp_params(draw, DIM, 12, 8, 4)
    average = jax.tree.map(lambda p: p + 0.1, params)
    return Run(step, ({"params": params, "average": average}, regression(draw)))


@program("A9")
def two_networks_two_optimizers() -> Run:
    """A generator and a discriminator, each stepped on its own loss."""
    one, two = optax.adam(1e-2), optax.sgd(0.1)

    def step(state: Params, batch: Batch) -> Any:
        def judged(d: list[Params], x: jax.Array) -> jax.Array:
            return mlp(d, x)[:, 0]

        def d_loss(d: list[Params]) -> jax.Array:
            fake = mlp(state["g"], batch["y"])
            real = jax.nn.softplus(-judged(d, batch["x"]))
            return (real + jax.nn.softplus(judged(d, fake))).mean()

        def g_loss(g: list[Params]) -> jax.Array:
            return jax.nn.softplus(-judged(state["d"], mlp(g, batch["y"]))).mean()

        d_value, d_grads = jax.value_and_grad(d_loss)(state["d"])
        g_value, g_grads = jax.value_and_grad(g_loss)(state["g"])
        d_up, d_opt = one.update(d_grads, state["d_opt"])
        g_up, g_opt = two.update(g_grads, state["g_opt"])
        new = {
            "d": optax.apply_updates(state["d"], d_up),
            "g": optax.apply_updates(state["g"], g_up),
            "d_opt": d_opt,
            "g_opt": g_opt,
        }
        return new, {"losses": (d_value, g_value), "grads": (d_grads, g_grads)}

    draw = np.random.default_rng(102)
    g, d = mlp_params(draw, 4, 12, DIM), mlp_params(draw, DIM, 12, 1)
    state = {"d": d, "g": g, "d_opt": one.init(d), "g_opt": two.init(g)}
    # The last bias of the discriminator moves real and fake alike; it is not zero by symmetry.
    return Run(step, (state, regression(draw)))


@program("A9")
def frozen_first_layers() -> Run:
    """The first stages have no gradient, so no backward."""

    def step(state: Params, batch: Batch) -> Any:
        def loss_fn(head: list[Params]) -> jax.Array:
            x = jnp.tanh(mlp(state["body"], batch["x"]))
            return ((mlp(head, x) - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["head"])
        return state | {"head": sgd(state["head"], grads)}, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(103)
    state = {"body": mlp_params(draw, DIM, 24, 24, 12), "head": mlp_params(draw, 12, 8, 4)}
    return Run(step, (state, regression(draw)))


@program("A9")
def frozen_last_layers() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        def loss_fn(body: list[Params]) -> jax.Array:
            x = jnp.tanh(mlp(body, batch["x"]))
            return ((mlp(state["head"], x) - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["body"])
        return state | {"body": sgd(state["body"], grads)}, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(104)
    state = {"body": mlp_params(draw, DIM, 24, 12), "head": mlp_params(draw, 12, 24, 8, 4)}
    return Run(step, (state, regression(draw)))


@program("A9")
def low_rank_adapters() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        def adapted(low: Params) -> Params:
            blocks = [
                base | {"qkv": base["qkv"] + a["down"] @ a["up"]}
                for base, a in zip(state["base"]["blocks"], low["blocks"], strict=True)
            ]
            return state["base"] | {"blocks": blocks}

        def loss_fn(low: Params) -> jax.Array:
            logits = transformer(adapted(low), batch["tokens"])
            return cross_entropy(logits, batch["labels"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["low"])
        return state | {"low": sgd(state["low"], grads)}, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(105)
    low = {
        "blocks": [
            {"down": weight(draw, DIM, 2), "up": normal(draw, 2, 3 * DIM, scale=0.1)}
            for _ in range(3)
        ]
    }
    return Run(step, ({"base": transformer_params(draw), "low": low}, tokens(draw)))


@program("A9")
def distillation_from_a_teacher() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        def loss_fn(student: list[Params]) -> jax.Array:
            wanted = jax.nn.softmax(mlp(state["teacher"], batch["x"]))
            return -(wanted * jax.nn.log_softmax(mlp(student, batch["x"]))).sum(-1).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["student"])
        return state | {"student": sgd(state["student"], grads)}, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(106)
    state = {"teacher": mlp_params(draw, DIM, 32, 16, 4), "student": mlp_params(draw, DIM, 8, 4)}
    return Run(step, (state, {"x": regression(draw)["x"]}))


@program("A9")
def weight_normalized_layers_and_spectral_state() -> Run:
    """One power iteration on a weight each step: whole values that feed the forward pass."""

    def step(state: Params, batch: Batch) -> Any:
        u = state["w"] @ (state["w"].T @ state["u"])
        u = u / jnp.linalg.norm(u)

        def loss_fn(w: jax.Array) -> jax.Array:
            sigma = jnp.linalg.norm(w.T @ jax.lax.stop_gradient(u))
            return ((jnp.tanh(batch["x"] @ (w / sigma)) - batch["y"]) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        return {"w": state["w"] - 0.1 * grad, "u": u}, {"loss": loss, "grad": grad}

    draw = np.random.default_rng(107)
    return Run(step, ({"w": weight(draw, DIM, 4), "u": normal(draw, DIM)}, regression(draw)))
