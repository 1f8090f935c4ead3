"""LLaMA: RMSNorm, rotary positions, SwiGLU, grouped-query attention, a head of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hetpass.tools.models.names import TransformerSize
from hetpass.tools.models.parts import causal_attention, rms_norm, token_loss


def parameters(size: TransformerSize) -> dict[str, Any]:
    """Zeros of the right shapes; meant for `jax.eval_shape`."""
    h, f = size.hidden, size.feedforward
    keys = h // size.heads * size.key_heads
    block = {
        "norm_attention": jnp.ones(h),
        "query": jnp.zeros((h, h)),
        "key": jnp.zeros((h, keys)),
        "value": jnp.zeros((h, keys)),
        "out": jnp.zeros((h, h)),
        "norm_mlp": jnp.ones(h),
        "gate": jnp.zeros((h, f)),
        "up": jnp.zeros((h, f)),
        "down": jnp.zeros((f, h)),
    }
    return {
        "tokens": jnp.zeros((size.vocabulary, h)),
        "blocks": [block] * size.layers,
        "norm": jnp.ones(h),
        "head": jnp.zeros((h, size.vocabulary)),
    }


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al., 2021) on (batch, tokens, heads, width)."""
    tokens, width = x.shape[1], x.shape[3]
    rates = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * rates
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


def loss(params: dict[str, Any], batch: dict[str, jax.Array], size: TransformerSize,
         dtype: str) -> jax.Array:  # fmt: skip
    """Every block is recomputed in backward."""

    def heads(x: jax.Array, weight: jax.Array, count: int) -> jax.Array:
        return (x @ weight.astype(x.dtype)).reshape(*x.shape[:2], count, -1)

    @jax.checkpoint
    def block(x: jax.Array, w: dict[str, Any]) -> jax.Array:
        seen = rms_norm(x, w["norm_attention"])
        query = rotated(heads(seen, w["query"], size.heads))
        key = rotated(heads(seen, w["key"], size.key_heads))
        value = heads(seen, w["value"], size.key_heads)
        x = x + causal_attention(query, key, value) @ w["out"].astype(x.dtype)
        seen = rms_norm(x, w["norm_mlp"])
        gated = jax.nn.silu(seen @ w["gate"].astype(x.dtype)) * (seen @ w["up"].astype(x.dtype))
        return x + gated @ w["down"].astype(x.dtype)

    x = params["tokens"][batch["tokens"]].astype(dtype)
    for weights in params["blocks"]:
        x = block(x, weights)
    logits = rms_norm(x, params["norm"]) @ params["head"].astype(dtype)
    return token_loss(logits, batch["labels"])
