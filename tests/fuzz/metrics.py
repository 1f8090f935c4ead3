"""What a step returns beside its loss: any tree of arrays, from outputs and losses per example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.fuzz.builder import Builder, piece


@piece("metric", "plain")
def nothing(build: Builder) -> Any:
    return lambda q, out, losses, b: ()


@piece("metric", "metrics")
def scalars(build: Builder) -> Any:
    index = build.integers(build.classes, build.rows)

    def metric(q: Any, out: Any, losses: Any, b: Any) -> Any:
        flat = out.reshape(out.shape[0], -1)[:, : build.classes]
        hits = flat.argmax(-1) == b[index]
        return {"accuracy": hits.mean(), "hits": hits.sum(), "loss": losses.sum()}

    return metric


@piece("metric", "metrics")
def per_example(build: Builder) -> Any:
    def metric(q: Any, out: Any, losses: Any, b: Any) -> Any:
        return {"out": out, "losses": losses, "top": out.argmax(-1), "rows": out.shape[0]}

    return metric


@piece("metric", "metrics")
def inputs_and_constants(build: Builder) -> Any:
    name = build.data(build.rows, 3)

    def metric(q: Any, out: Any, losses: Any, b: Any) -> Any:
        return [b[name], jnp.float32(3), jnp.arange(4), b["step"] + 1, jnp.zeros(losses.shape)]

    return metric


@piece("metric", "metrics")
def over_the_sorted_batch(build: Builder) -> Any:
    how = build.pick("median", "sort", "cumsum", "first", "best", "roll", "quantile")

    def metric(q: Any, out: Any, losses: Any, b: Any) -> Any:
        each = lax.stop_gradient(losses.reshape(losses.shape[0], -1).mean(1))
        if how == "median":
            return jnp.median(each)
        if how == "sort":
            return jnp.sort(each)
        if how == "cumsum":
            return jnp.cumsum(each)
        if how == "first":
            return each[0], each[-1]
        if how == "best":
            return lax.top_k(each, 2)
        if how == "roll":
            return jnp.roll(each, 1)
        return jnp.quantile(each, 0.25)

    return metric


@piece("metric", "reductions")
def extremes(build: Builder) -> Any:
    def metric(q: Any, out: Any, losses: Any, b: Any) -> Any:
        return {
            "max": out.max(),
            "min": losses.min(),
            "span": losses.max() - losses.min(),
            "columns": out.reshape(-1, out.shape[-1]).max(0),
            "abs": -jnp.abs(out).max(),
            "where": losses.argmax(),
        }

    return metric


@piece("metric", "reductions")
def booleans(build: Builder) -> Any:
    index = build.integers(build.classes, build.rows)

    def metric(q: Any, out: Any, losses: Any, b: Any) -> Any:
        any_, all_ = (out > 0.5).any(), (losses > 0).all()
        finite = jnp.isfinite(out).all()
        return {
            "any": any_,
            "all": all_.astype(jnp.float32),
            "neither": ~any_ & all_,
            "bad": (~finite).astype(jnp.int32),
            "count": (out > 0).sum(dtype=jnp.int32),
            "index": b[index].max(),
        }

    return metric


@piece("metric", "reductions")
def products_and_moments(build: Builder) -> Any:
    def metric(q: Any, out: Any, losses: Any, b: Any) -> Any:
        out, losses = lax.stop_gradient((out, losses))
        return {
            "prod": jnp.prod(1 + 0.01 * jnp.tanh(losses)),
            "var": out.var(),
            "norm": jnp.sqrt((out**2).sum()),
            "moment": jnp.einsum("...i,...j->ij", out, out),
            "logsumexp": jax.nn.logsumexp(losses),
        }

    return metric


@piece("metric", "reductions")
def histograms(build: Builder) -> Any:
    index = build.integers(build.classes, build.rows)

    def metric(q: Any, out: Any, losses: Any, b: Any) -> Any:
        each = losses.reshape(losses.shape[0], -1).mean(1)
        sums = jax.ops.segment_sum(each, b[index], build.classes)
        counts = jnp.bincount(b[index], length=build.classes)
        return sums, counts, sums / jnp.maximum(counts, 1)

    return metric


@piece("metric", "metrics")
def of_the_parameters(build: Builder) -> Any:
    def metric(q: Any, out: Any, losses: Any, b: Any) -> Any:
        norm = jnp.sqrt(sum((v**2).sum() for v in q.values()))
        return {"norm": norm, "relative": losses.mean() / norm, "rows": jnp.float32(len(q))}

    return metric
