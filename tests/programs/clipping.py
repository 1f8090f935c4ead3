"""A3: what needs the whole gradient: clipping, loss scaling."""

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
    regression,
    tokens,
    transformer,
    transformer_params,
)
from tests.programs.program import Run, instead, mean_of_slices, program


def _loss(params: list[Params], batch: Batch) -> jax.Array:
    return ((mlp(params, batch["x"]) - batch["y"]) ** 2).mean()


def _clipped_step(clip: Any) -> Any:
    def step(params: list[Params], batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(_loss)(params, batch)
        clipped = clip(grads)
        new = jax.tree.map(lambda p, g: p - g, params, clipped)
        return new, {"loss": loss, "clipped": clipped, "norm": optax.tree.norm(grads)}

    return step


def _by_global_norm(grads: Any) -> Any:
    scale = jnp.minimum(1.0, 0.1 / optax.tree.norm(grads))
    return jax.tree.map(lambda g: g * scale, grads)


def _by_layer(grads: Any) -> Any:
    return [_by_global_norm(layer) for layer in grads]


def _clipped_run() -> Run:
    draw = np.random.default_rng(40)
    return Run(_clipped_step(_by_global_norm), (mlp_params(draw, DIM, 24, 8, 4), regression(draw)))


@program("A3", naive=instead(_clipped_step(_by_layer)), shouts=0.4)
def clipping_by_global_norm_not_per_stage() -> Run:
    return _clipped_run()


@program("A3", naive=mean_of_slices, shouts=0.2)
def clipping_by_global_norm_not_per_microbatch() -> Run:
    return _clipped_run()


@program("A3", naive=mean_of_slices, shouts=0.1)
def clipping_by_optax_in_a_transformer() -> Run:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))

    def step(state: Any, batch: Batch) -> Any:
        params, opt_state = state

        def loss_fn(params: Params) -> jax.Array:
            return cross_entropy(transformer(params, batch["tokens"]), batch["labels"]).mean()

        grads = jax.grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"grads": grads, "u": updates}

    draw = np.random.default_rng(41)
    params = transformer_params(draw, layers=2)
    return Run(step, ((params, optimizer.init(params)), tokens(draw)))


@program("A3")
def clipping_elementwise_and_by_block() -> Run:
    optimizer = optax.chain(optax.clip(0.05), optax.adaptive_grad_clip(0.02), optax.sgd(0.5))

    def step(state: Any, batch: Batch) -> Any:
        params, opt_state = state
        grads = jax.grad(_loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"grads": grads}

    draw = np.random.default_rng(42)
    params = mlp_params(draw, DIM, 24, 8, 4)
    return Run(step, ((params, optimizer.init(params)), regression(draw)))


def _scaled_step(state: Params, batch: Batch) -> Any:
    optimizer = optax.adam(1e-2)

    def scaled_loss(params: list[Params]) -> jax.Array:
        return _loss(params, batch) * state["scale"]

    grads = jax.tree.map(lambda g: g / state["scale"], jax.grad(scaled_loss)(state["params"]))
    finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    updates, opt_state = optimizer.update(grads, state["adam"], state["params"])
    stepped = {"params": optax.apply_updates(state["params"], updates), "adam": opt_state}
    kept = {"params": state["params"], "adam": state["adam"]}
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), stepped, kept)
    new["scale"] = jnp.where(finite, state["scale"], state["scale"] / 2)
    return new, {"finite": finite, "grads": grads}


def _scaled_run(injected: float) -> Run:
    draw = np.random.default_rng(43)
    params, batch = mlp_params(draw, DIM, 12, 8, 4), regression(draw)
    batch["x"] = batch["x"].at[5, 3].add(injected)
    state = {"params": params, "adam": optax.adam(1e-2).init(params), "scale": jnp.float32(1024)}
    return Run(_scaled_step, (state, batch))


@program("A3", naive=mean_of_slices, shouts=0.1)
def loss_scale_halves_on_an_infinity() -> Run:
    return _scaled_run(float("inf"))


@program("A3")
def loss_scale_stays_without() -> Run:
    return _scaled_run(0.0)


@program("A3")
def skipped_update_by_cond() -> Run:
    def step(params: list[Params], batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(_loss)(params, batch)
        new = jax.lax.cond(
            optax.tree.norm(grads) < 1e-3,
            lambda p, g: p,
            lambda p, g: jax.tree.map(lambda a, b: a - 0.1 * b, p, g),
            params,
            grads,
        )
        return new, {"loss": loss}

    draw = np.random.default_rng(44)
    return Run(step, (mlp_params(draw, DIM, 12, 8, 4), regression(draw)))
