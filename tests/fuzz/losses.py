"""From losses per example (or per token) to one number."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from tests.fuzz.builder import Builder, piece


def _per_example(losses: Any) -> Any:
    return losses.reshape(losses.shape[0], -1).mean(1)


def _like(build: Builder) -> tuple[int, ...]:
    return (build.rows, build.length) if build.sequential else (build.rows,)


@piece("loss", "losses")
def mean_or_sum(build: Builder) -> Any:
    how = build.pick("mean", "sum", "by_size", "of_means", "largest_token")

    def loss(q: Any, losses: Any, b: Any) -> Any:
        if how == "mean":
            return losses.mean()
        if how == "sum":
            return losses.sum() * 0.1
        if how == "by_size":
            return losses.sum() / losses.shape[0]
        if how == "of_means":
            return _per_example(losses).mean()
        return losses.reshape(losses.shape[0], -1).max(1).mean()

    return loss


@piece("loss", "losses")
def with_penalty(build: Builder) -> Any:
    weight = build.pick(0.1, 0.01)

    def loss(q: Any, losses: Any, b: Any) -> Any:
        return losses.mean() + weight * sum((v**2).sum() for v in q.values())

    return loss


@piece("loss", "losses")
def weights_per_example(build: Builder) -> Any:
    name, normalized = build.data(build.rows, low=0.1, high=3.0), build.pick(True, False)

    def loss(q: Any, losses: Any, b: Any) -> Any:
        weights = b[name]
        total = (_per_example(losses) * weights).sum()
        return total / weights.sum() if normalized else total

    return loss


@piece("loss", "losses")
def class_weights_of_the_batch(build: Builder) -> Any:
    name = build.integers(build.classes, build.rows)

    def loss(q: Any, losses: Any, b: Any) -> Any:
        counts = jnp.zeros(build.classes, losses.dtype).at[b[name]].add(1.0)
        return (_per_example(losses) / counts[b[name]]).mean()

    return loss


@piece("loss", "masks")
def mean_of_unmasked(build: Builder) -> Any:
    name = build.mask(*_like(build))
    how = build.pick("product", "where", "guarded", "boolean")

    def loss(q: Any, losses: Any, b: Any) -> Any:
        mask = b[name].astype(losses.dtype)
        if how == "product":
            return (losses * mask).sum() / mask.sum()
        if how == "where":
            return jnp.where(mask > 0, losses, 0).sum() / (mask > 0).sum()
        if how == "guarded":
            return (losses * mask).sum() / jnp.maximum(mask.sum(), 1)
        return losses.mean(where=mask.astype(bool))

    return loss


@piece("loss", "masks")
def masked_means_per_example(build: Builder) -> Any:
    name = build.mask(*_like(build))

    def loss(q: Any, losses: Any, b: Any) -> Any:
        mask = b[name].reshape(losses.shape[0], -1)
        each = (losses.reshape(mask.shape) * mask).sum(1) / (mask.sum(1) + 1e-3)
        present = (mask.sum(1) > 0).astype(losses.dtype)
        return (each * present).sum() / present.sum()

    return loss


@piece("loss", "masks")
def lengths(build: Builder) -> Any:
    name = build.integers(build.length, build.rows)

    def loss(q: Any, losses: Any, b: Any) -> Any:
        wide = losses.reshape(losses.shape[0], -1)
        mask = jnp.arange(wide.shape[1])[None, :] <= b[name][:, None]
        return (wide * mask).sum() / mask.sum()

    return loss


@piece("loss", "nonlinear")
def function_of_the_mean(build: Builder) -> Any:
    how = build.pick("exp", "sqrt", "square", "log", "ratio", "clamp")

    def loss(q: Any, losses: Any, b: Any) -> Any:
        mean = losses.mean()
        if how == "exp":
            return jnp.exp(mean * 0.3)
        if how == "sqrt":
            return jnp.sqrt(mean)
        if how == "square":
            return mean**2
        if how == "log":
            return jnp.log1p(mean)
        if how == "ratio":
            return mean / (1 + lax.stop_gradient(mean))
        return jnp.where(mean > 0.5, mean * 2, mean * 3)

    return loss


@piece("loss", "nonlinear")
def log_of_a_sum(build: Builder) -> Any:
    return lambda q, losses, b: jnp.log(jnp.exp(losses * 0.2).sum())


@piece("loss", "nonlinear")
def scaled_by_a_parameter(build: Builder) -> Any:
    name = build.param(1, scale=0.3)
    return lambda q, losses, b: losses.mean() * jnp.exp(-q[name][0]) + q[name][0]


@piece("loss", "infinities")
def with_an_infinity(build: Builder) -> Any:
    name = build.data(build.rows)
    build.batch[name][int(build.draw.integers(build.rows))] = build.pick(float("inf"), 1e38)

    def loss(q: Any, losses: Any, b: Any) -> Any:
        return (_per_example(losses) + 0 * q[next(iter(q))].sum() + b[name]).mean()

    return loss


@piece("loss", "infinities")
def masked_nan(build: Builder) -> Any:
    name = build.data(build.rows)
    build.batch[name][0] = float("nan")

    def loss(q: Any, losses: Any, b: Any) -> Any:
        extra = jnp.where(jnp.isnan(b[name]), 0, b[name])
        return (_per_example(losses) * (1 + 0.1 * extra)).mean()

    return loss


@piece("loss", "mixes")
def pairs_of_examples(build: Builder) -> Any:
    how = build.pick("all", "halves", "variance", "rank")

    def loss(q: Any, losses: Any, b: Any) -> Any:
        each = _per_example(losses)
        if how == "all":
            return losses.mean() + (each[:, None] * each[None, :]).mean()
        if how == "halves":
            half = each.shape[0] // 2
            return losses.mean() + jnp.maximum(each[:half] - each[half:], 0).mean()
        if how == "variance":
            return losses.mean() + each.var()
        return (jnp.sort(each) * jnp.arange(each.shape[0])).mean()

    return loss
