"""Small models as plain dictionaries of arrays, and the steps around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH, SEQ, DIM, HEADS, VOCAB = 8, 6, 16, 2, 19

Params = dict[str, Any]
Batch = dict[str, jax.Array]


def normal(draw: np.random.Generator, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(draw.normal(size=shape) * scale, jnp.float32)


def weight(draw: np.random.Generator, rows: int, columns: int) -> jax.Array:
    return normal(draw, rows, columns, scale=rows**-0.5)


# ---------------------------------------------------------------------------------------------
# A multi-layer perceptron on (batch, features)


def mlp_params(draw: np.random.Generator, *sizes: int) -> list[Params]:
    return [
        {"w": weight(draw, n, m), "b": normal(draw, m, scale=0.1)}
        for n, m in itertools.pairwise(sizes)
    ]


def mlp(params: list[Params], x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def regression(draw: np.random.Generator, features: int = DIM, targets: int = 4) -> Batch:
    return {"x": normal(draw, BATCH, features), "y": normal(draw, BATCH, targets)}


def classes(draw: np.random.Generator, features: int = DIM, kinds: int = 5) -> Batch:
    """x (batch, features) and y (batch,) int labels."""
    return {
        "x": normal(draw, BATCH, features),
        "y": jnp.asarray(draw.integers(0, kinds, BATCH), jnp.int32),
    }


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood per example (or token), shape of `labels`."""
    logp = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]


# ---------------------------------------------------------------------------------------------
# A transformer on (batch, seq) tokens


def tokens(draw: np.random.Generator) -> Batch:
    """tokens and labels (batch, seq) int32, and a mask (batch, seq) float32 with uneven rows."""
    lengths = draw.integers(1, SEQ + 1, BATCH)
    return {
        "tokens": jnp.asarray(draw.integers(0, VOCAB, (BATCH, SEQ)), jnp.int32),
        "labels": jnp.asarray(draw.integers(0, VOCAB, (BATCH, SEQ)), jnp.int32),
        "mask": jnp.asarray(np.arange(SEQ) < lengths[:, None], jnp.float32),
    }


def block_params(draw: np.random.Generator, dim: int = DIM) -> Params:
    return {
        "norm1": {"scale": normal(draw, dim, scale=0.1) + 1, "bias": normal(draw, dim, scale=0.1)},
        "qkv": weight(draw, dim, 3 * dim),
        "out": weight(draw, dim, dim),
        "norm2": {"scale": normal(draw, dim, scale=0.1) + 1, "bias": normal(draw, dim, scale=0.1)},
        "up": weight(draw, dim, 2 * dim),
        "down": weight(draw, 2 * dim, dim),
    }


def transformer_params(
    draw: np.random.Generator, layers: int = 3, dim: int = DIM, tied: bool = True
) -> Params:
    params: Params = {
        "embed": normal(draw, VOCAB, dim, scale=0.3),
        "positions": normal(draw, SEQ, dim, scale=0.3),
        "blocks": [block_params(draw, dim) for _ in range(layers)],
    }
    if not tied:
        params["head"] = weight(draw, dim, VOCAB)
    return params


def layer_norm(params: Params, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]


def attention(params: Params, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Causal self-attention; `mask`, if given, is broadcast over (batch, heads, query, key)."""
    batch, seq, dim = x.shape
    q, k, v = jnp.split((x @ params["qkv"]).reshape(batch, seq, HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (dim // HEADS) ** -0.5
    allowed = jnp.tril(jnp.ones((seq, seq), bool)) if mask is None else mask
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ params["out"]


def block(params: Params, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    x = x + attention(params, layer_norm(params["norm1"], x), mask)
    return x + jax.nn.gelu(layer_norm(params["norm2"], x) @ params["up"]) @ params["down"]


def embed(params: Params, ids: jax.Array) -> jax.Array:
    return params["embed"][ids] + params["positions"]


def transformer(params: Params, ids: jax.Array) -> jax.Array:
    """Logits (batch, seq, vocab); the head is the embedding unless there is one."""
    x = embed(params, ids)
    for one in params["blocks"]:
        x = block(one, x)
    return x @ (params["head"] if "head" in params else params["embed"].T)


# ---------------------------------------------------------------------------------------------
# Steps

Loss = Callable[[Any, Any], jax.Array]


def sgd(params: Any, grads: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g.astype(p.dtype), params, grads)


def sgd_step(loss_fn: Loss, rate: float = 0.1) -> Callable[[Any, Any], Any]:
    """(params, batch) -> (new params, {"loss", "grads"}) by plain gradient descent."""

    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads, rate), {"loss": loss, "grads": grads}

    return step
