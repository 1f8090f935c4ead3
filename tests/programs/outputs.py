"""A7: results beside the new state: each comes back by its kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.models import (
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
    tokens,
    transformer,
    transformer_params,
)
from tests.programs.program import Run, program


@program("A7")
def every_kind_of_metric() -> Run:
    def step(params: list[Params], batch: Batch) -> Any:
        def loss_fn(params: list[Params]) -> Any:
            logits = mlp(params, batch["x"])
            losses = cross_entropy(logits, batch["y"])
            return losses.mean(), (logits, losses)

        (loss, (logits, losses)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        hits = logits.argmax(-1) == batch["y"]
        metrics = {
            "loss": loss,
            "loss_sum": losses.sum(),
            "loss_max": losses.max(),
            "loss_min": losses.min(),
            "losses": losses,
            "logits": logits,
            "transposed": logits.T,
            "accuracy": hits.mean(),
            "hits": hits.sum(),
            "hit": hits,
            "any": hits.any(),
            "all": hits.all(),
            "per_class": jnp.zeros(5).at[batch["y"]].add(losses),
            "moments": (losses.mean(), (losses**2).mean() - losses.mean() ** 2),
            "grads": grads,
        }
        return sgd(params, grads), metrics

    draw = np.random.default_rng(90)
    return Run(step, (mlp_params(draw, DIM, 12, 8, 5), classes(draw)))


@program("A7")
def step_count_rate_constant_and_untouched_leaves() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        def loss_fn(params: list[Params]) -> jax.Array:
            return ((mlp(params, batch["x"]) - batch["y"]) ** 2).mean()

        rate = 0.1 / jnp.sqrt(1.0 + state["count"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        new = state | {"params": sgd(state["params"], grads, rate), "count": state["count"] + 1}
        metrics = {
            "rate": rate,
            "constant": jnp.float32(3.5),
            "python": 7,
            "table": jnp.arange(4),
            "input": batch["y"],
            "same_twice": (loss, loss),
            "parameter": state["params"][0]["b"],
            "name": None,
        }
        return new, metrics

    draw = np.random.default_rng(91)
    state = {
        "params": mlp_params(draw, DIM, 12, 4),
        "count": jnp.int32(5),
        "frozen": normal(draw, 3, 3),
        "empty": jnp.zeros((0, 4)),
        "unset": None,
    }
    return Run(step, (state, regression(draw) | {"unused": normal(draw, 8, 2)}))


@program("A7")
def logits_of_a_language_model_in_order() -> Run:
    def step(params: Params, batch: Batch) -> Any:
        def loss_fn(params: Params) -> Any:
            logits = transformer(params, batch["tokens"])
            return cross_entropy(logits, batch["labels"]).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        flat = logits.reshape(-1, logits.shape[-1])
        return sgd(params, grads), (loss, logits, flat, flat.argmax(-1), logits.swapaxes(0, 1))

    draw = np.random.default_rng(92)
    return Run(step, (transformer_params(draw, layers=2), tokens(draw)))


@program("A7")
def hidden_values_and_statistics_of_every_layer() -> Run:
    def step(params: list[Params], batch: Batch) -> Any:
        def loss_fn(params: list[Params]) -> Any:
            x, seen = batch["x"], []
            for layer in params:
                x = jnp.tanh(x @ layer["w"] + layer["b"])
                seen.append({"mean": x.mean(), "largest": jnp.abs(x).max(), "value": x})
            return ((x - batch["y"]) ** 2).mean(), seen

        (loss, seen), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        norms = jax.tree.map(jnp.linalg.norm, grads)
        return sgd(params, grads), {"loss": loss, "seen": seen, "norms": norms}

    draw = np.random.default_rng(93)
    return Run(step, (mlp_params(draw, DIM, 12, 12, 8, 4), regression(draw)))


@program("A7")
def metrics_from_a_second_forward_pass() -> Run:
    def step(params: list[Params], batch: Batch) -> Any:
        def loss_fn(params: list[Params]) -> jax.Array:
            return ((mlp(params, batch["x"]) - batch["y"]) ** 2).mean()

        grads = jax.grad(loss_fn)(params)
        new = sgd(params, grads)
        return new, {"before": loss_fn(params), "predictions": mlp(params, batch["x"])}

    draw = np.random.default_rng(94)
    return Run(step, (mlp_params(draw, DIM, 12, 8, 4), regression(draw)))


# The loss after the update needs all of the gradient first: a second pass over the batch.
@program("A7", expect="either")
def metrics_after_the_update() -> Run:
    def step(params: list[Params], batch: Batch) -> Any:
        def loss_fn(params: list[Params]) -> jax.Array:
            return ((mlp(params, batch["x"]) - batch["y"]) ** 2).mean()

        new = sgd(params, jax.grad(loss_fn)(params))
        return new, {"after": loss_fn(new)}

    draw = np.random.default_rng(95)
    return Run(step, (mlp_params(draw, DIM, 12, 4), regression(draw)))
