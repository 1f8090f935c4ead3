"""A6: accumulation in float32, mixed types, precision attributes, float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.models import (
    DIM,
    SEQ,
    Batch,
    Params,
    block,
    cross_entropy,
    embed,
    mlp,
    mlp_params,
    regression,
    sgd,
    sgd_step,
    tokens,
    transformer,
    transformer_params,
    weight,
)
from tests.programs.program import Run, mean_of_slices, program, slices


def _half(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def _mse(params: list[Params], batch: Batch) -> jax.Array:
    return ((mlp(params, batch["x"]) - batch["y"]).astype(jnp.float32) ** 2).mean()


def _added_in_bfloat16(run: Run, m: int) -> Any:
    """Running means of the microbatches' results, added up in bfloat16 one after the other."""
    parts = slices(run, m)
    total = jax.tree.map(lambda x: (x / m).astype(jnp.bfloat16), parts[0])
    for part in parts[1:]:
        total = jax.tree.map(lambda t, x: t + (x / m).astype(jnp.bfloat16), total, part)
    return jax.tree.map(lambda t, x: t.astype(x.dtype), total, parts[0])


@program("A6", precision="bfloat16")
def bfloat16_throughout() -> Run:
    draw = np.random.default_rng(80)
    params, batch = _half(mlp_params(draw, DIM, 24, 12, 4)), _half(regression(draw))
    return Run(sgd_step(_mse), (params, batch))


# Each example's gradient is a float32 number that is cast down once, after the sum: a tolerance
# below one rounding of bfloat16 (4e-3) tells sums in float32 from sums in bfloat16.
@program("A6", tolerance=5e-4, naive=_added_in_bfloat16, shouts=2e-3)
def bfloat16_parameters_summed_in_float32() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return _mse(wide, batch)

    def step(params: list[Params], batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return params, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(88)
    return Run(step, (_half(mlp_params(draw, DIM, 24, 12, 4)), regression(draw)))


# jax.jit's own bfloat16 gradient is up to 2.6e-2 from the float32 one here: two blocks with norms,
# all in bfloat16. A mistake of ours would be far larger.
@program("A6", precision="bfloat16", tolerance=4e-2)
def float32_master_under_bfloat16_compute() -> Run:
    def step(master: Params, batch: Batch) -> Any:
        def loss_fn(params: Params) -> jax.Array:
            logits = transformer(_half(params), batch["tokens"])
            losses = cross_entropy(logits.astype(jnp.float32), batch["labels"])
            return jnp.where(batch["real"], losses, 0).sum() / batch["real"].sum()

        loss, grads = jax.value_and_grad(loss_fn)(master)
        return sgd(master, grads), {"loss": loss, "grads": grads}

    draw = np.random.default_rng(81)
    batch = tokens(draw)
    batch["real"] = batch.pop("mask") > 0
    return Run(step, (transformer_params(draw, layers=2), batch))


@program("A6", precision="bfloat16")
def gradients_stay_in_bfloat16_until_the_update() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(_mse)(_half(state["master"]), batch)
        master = jax.tree.map(lambda p, g: p - 0.1 * g.astype(jnp.float32), state["master"], grads)
        return {"master": master}, {"loss": loss, "grads": grads}

    draw = np.random.default_rng(82)
    return Run(step, ({"master": mlp_params(draw, DIM, 12, 4)}, regression(draw)))


@program("A6")
def integer_and_bool_masks() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        segment = batch["segment"]
        same = segment[:, None, :, None] == segment[:, None, None, :]
        allowed = jnp.tril(jnp.ones((SEQ, SEQ), bool)) & same
        x = embed(params, batch["tokens"])
        for p in params["blocks"]:
            x = block(p, x, allowed)
        losses = cross_entropy(x @ params["embed"].T, batch["labels"])
        count = (batch["segment"] >= 0).astype(jnp.int32).sum()
        return jnp.where(batch["segment"] >= 0, losses, 0).sum() / count

    draw = np.random.default_rng(83)
    batch = tokens(draw)
    batch["segment"] = jnp.asarray(draw.integers(-1, 2, batch["tokens"].shape), jnp.int8)
    return Run(sgd_step(loss_fn), (transformer_params(draw, layers=2), batch))


@program("A6", precision="bfloat16")
def precision_and_accumulation_type_per_product() -> Run:
    def loss_fn(params: list[jax.Array], batch: Batch) -> jax.Array:
        x = jnp.dot(batch["x"], params[0], precision=jax.lax.Precision.HIGHEST)
        x = jnp.tanh(x).astype(jnp.bfloat16)
        x = jax.lax.dot(x, params[1], preferred_element_type=jnp.float32)
        return ((jnp.tanh(x) @ params[2] - batch["y"]) ** 2).mean()

    draw = np.random.default_rng(84)
    params = [weight(draw, DIM, 12), _half(weight(draw, 12, 12)), weight(draw, 12, 4)]
    return Run(sgd_step(loss_fn), (params, regression(draw)))


@program("A6", precision="bfloat16")
def half_precision_norm_with_float32_inside() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        x = batch["x"].astype(jnp.bfloat16)
        for p in params:
            wide = x.astype(jnp.float32)
            wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
            x = jnp.tanh(wide.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)) + x[:, :1]
        return ((x[:, :4].astype(jnp.float32) - batch["y"]) ** 2).mean()

    draw = np.random.default_rng(85)
    layers = [{"w": layer["w"]} for layer in mlp_params(draw, DIM, DIM, DIM, DIM)]
    return Run(sgd_step(loss_fn), (layers, regression(draw)))


def _wide(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


@program("A6", precision="float64", x64=True, naive=mean_of_slices, shouts=0.7)
def float64_throughout() -> Run:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        return cross_entropy(transformer(params, batch["tokens"]), batch["labels"]).sum()

    draw = np.random.default_rng(86)
    return Run(sgd_step(loss_fn, 1e-3), _wide((transformer_params(draw, layers=2), tokens(draw))))


@program("A6", precision="float64", x64=True)
def float64_indices_and_counts() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        losses = ((mlp(params, batch["x"]) - batch["y"]) ** 2).sum(-1)
        return (losses * batch["count"]).sum() / batch["count"].sum()

    draw = np.random.default_rng(87)
    batch = _wide(regression(draw)) | {"count": jnp.asarray(draw.integers(1, 9, 8))}
    return Run(sgd_step(loss_fn), (_wide(mlp_params(draw, DIM, 12, 4)), batch))
