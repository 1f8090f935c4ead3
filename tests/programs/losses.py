"""A2: what the loss says, not what a pipeline assumes (a mean over the batch)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.models import (
    BATCH,
    DIM,
    Batch,
    Params,
    classes,
    cross_entropy,
    mlp,
    mlp_params,
    normal,
    regression,
    sgd,
    sgd_step,
    tokens,
    transformer,
    transformer_params,
)
from tests.programs.program import Run, mean_of_slices, program, sum_of_slices


def _language_model(loss_fn: Any, seed: int, **entries: Any) -> Run:
    draw = np.random.default_rng(seed)
    params = transformer_params(draw, layers=2, tied=False)
    return Run(sgd_step(loss_fn), (params, tokens(draw) | entries))


def _perceptron(step: Any, seed: int, **entries: Any) -> Run:
    draw = np.random.default_rng(seed)
    return Run(step, (mlp_params(draw, DIM, 12, 8, 4), regression(draw) | entries))


def _token_losses(params: Params, batch: Batch) -> jax.Array:
    return cross_entropy(transformer(params, batch["tokens"]), batch["labels"])


@program("A2", naive=sum_of_slices, shouts=2.9)
def mean_loss() -> Run:
    return _language_model(lambda p, b: _token_losses(p, b).mean(), 20)


@program("A2", naive=mean_of_slices, shouts=0.74)
def sum_loss() -> Run:
    return _language_model(lambda p, b: _token_losses(p, b).sum() * 0.01, 21)


@program("A2", naive=mean_of_slices, shouts=0.1)
def mean_over_unmasked_tokens() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        return (_token_losses(params, batch) * batch["mask"]).sum() / batch["mask"].sum()

    return _language_model(loss_fn, 22)


@program("A2", naive=mean_of_slices, shouts=float("inf"))
def one_microbatch_fully_masked() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        return (_token_losses(params, batch) * batch["mask"]).sum() / batch["mask"].sum()

    run = _language_model(loss_fn, 23)
    mask = run.args[1]["mask"].at[2:4].set(0)  # microbatch 1 of 4, microbatches 2 and 3 of 8
    return Run(run.step, (run.args[0], run.args[1] | {"mask": mask}))


@program("A2", naive=mean_of_slices, shouts=0.02)
def per_example_weights() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        losses = ((mlp(params, batch["x"]) - batch["y"]) ** 2).sum(-1)
        return (losses * batch["weight"]).sum() / batch["weight"].sum()

    weights = jnp.asarray(np.random.default_rng(1).uniform(0.1, 3, BATCH), jnp.float32)
    return _perceptron(sgd_step(loss_fn), 24, weight=weights)


@program("A2")
def average_with_weights() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        losses = ((mlp(params, batch["x"]) - batch["y"]) ** 2).sum(-1)
        return jnp.average(losses, weights=batch["weight"])

    weights = jnp.asarray(np.random.default_rng(2).uniform(0.1, 3, BATCH), jnp.float32)
    return _perceptron(sgd_step(loss_fn), 25, weight=weights)


@program("A2", naive=sum_of_slices, shouts=2.9)
def mean_of_means() -> Run:
    """The mean over sequences of each sequence's own masked mean."""

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        sums = (_token_losses(params, batch) * batch["mask"]).sum(1)
        return (sums / batch["mask"].sum(1)).mean()

    return _language_model(loss_fn, 26)


@program("A2", naive=sum_of_slices, shouts=1.0)
def mean_plus_penalty_on_parameters() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        penalty = sum((p**2).sum() for p in jax.tree.leaves(params))
        return _token_losses(params, batch).mean() + 1e-2 * penalty

    return _language_model(loss_fn, 27)


@program("A2", naive=mean_of_slices, shouts=0.5)
def sum_plus_penalty_on_parameters() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        penalty = sum(jnp.abs(layer["w"]).sum() for layer in params)
        return 0.1 * ((mlp(params, batch["x"]) - batch["y"]) ** 2).sum() + 1e-2 * penalty

    return _perceptron(sgd_step(loss_fn), 28)


@program("A2", naive=mean_of_slices, shouts=1e-4)
def perplexity_beside_the_loss() -> Run:
    def step(params: list[Params], batch: Batch) -> Any:
        def loss_fn(params: list[Params]) -> jax.Array:
            return cross_entropy(mlp(params, batch["x"]), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return sgd(params, grads), {"perplexity": jnp.exp(loss), "bits": loss / jnp.log(2.0)}

    draw = np.random.default_rng(29)
    return Run(step, (mlp_params(draw, DIM, 12, 5), classes(draw)))


@program("A2", naive=mean_of_slices, shouts=1e-4)
def rate_from_the_loss() -> Run:
    """A nonlinear use of the loss that every stage's update needs."""

    def step(params: list[Params], batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(lambda p: ((mlp(p, batch["x"]) - batch["y"]) ** 2).mean())(
            params
        )
        rate = 0.1 / (1.0 + loss**2)
        new = jax.tree.map(lambda p, g: p - rate * g, params, grads)
        return new, {"rate": rate, "grads": grads}

    return _perceptron(step, 30)


# The seed of the backward pass is the loss itself, known only after the last microbatch's forward:
# two passes over the batch, so a refusal will do.
@program("A2", expect="either", naive=mean_of_slices, shouts=1e-4)
def exponential_of_the_mean() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        return jnp.exp(((mlp(params, batch["x"]) - batch["y"]) ** 2).mean())

    return _perceptron(sgd_step(loss_fn, 0.01), 31)


@program("A2", expect="either", naive=mean_of_slices, shouts=1e-3)
def root_of_the_mean_square() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        return jnp.sqrt(((mlp(params, batch["x"]) - batch["y"]) ** 2).mean())

    return _perceptron(sgd_step(loss_fn), 32)


@program("A2")
def two_losses_with_their_own_normalizers() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        logits = transformer(params, batch["tokens"])
        masked = cross_entropy(logits, batch["labels"]) * batch["mask"]
        smooth = (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()
        return masked.sum() / batch["mask"].sum() + 1e-2 * smooth

    return _language_model(loss_fn, 33)


@program("A2")
def label_smoothing_by_one_hot() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        logits = transformer(params, batch["tokens"])
        targets = 0.9 * jax.nn.one_hot(batch["labels"], logits.shape[-1]) + 0.1 / logits.shape[-1]
        return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()

    return _language_model(loss_fn, 34)


@program("A2")
def loss_of_one_example_under_vmap() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        def one(x: jax.Array, y: jax.Array) -> jax.Array:
            return ((mlp(params, x) - y) ** 2).sum()

        return jax.vmap(one)(batch["x"], batch["y"]).mean()

    return _perceptron(sgd_step(loss_fn), 35)


@program("A2")
def divided_by_the_shape() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        return ((mlp(params, batch["x"]) - batch["y"]) ** 2).sum() / batch["x"].shape[0]

    return _perceptron(sgd_step(loss_fn), 36)


@program("A2", naive=mean_of_slices, shouts=0.05)
def huber_over_selected_examples() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        gap = jnp.abs(mlp(params, batch["x"]) - batch["y"])
        huber = jnp.where(gap < 1, 0.5 * gap**2, gap - 0.5).sum(-1)
        chosen = batch["x"][:, 0] > 0
        return jnp.where(chosen, huber, 0).sum() / jnp.maximum(chosen.sum(), 1)

    return _perceptron(sgd_step(loss_fn), 37)


@program("A2")
def quantile_loss_with_scalar_in_the_batch() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        gap = batch["y"] - mlp(params, batch["x"])
        q = batch["quantile"]
        return jnp.maximum(q * gap, (q - 1) * gap).mean()

    return _perceptron(sgd_step(loss_fn), 38, quantile=jnp.float32(0.7))


@program("A2")
def gaussian_likelihood_with_learned_scale() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        gap = (mlp(params["net"], batch["x"]) - batch["y"]) * jnp.exp(-params["log_scale"])
        return (0.5 * gap**2 + params["log_scale"]).sum(-1).mean()

    draw = np.random.default_rng(39)
    params = {"net": mlp_params(draw, DIM, 8, 4), "log_scale": normal(draw, 4, scale=0.1)}
    return Run(sgd_step(loss_fn), (params, regression(draw)))
