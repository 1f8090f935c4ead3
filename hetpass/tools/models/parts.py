"""What the transformers share: norms, attention, the head's loss. Shapes are (batch, tokens, …)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax


def layer_norm(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Over the last dimension, computed in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return (scaled * weights["scale"] + weights["bias"]).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Over the last dimension, computed in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(
        x.dtype
    )


def dense(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """`x @ w + b` in the type of x."""
    return x @ weights["w"].astype(x.dtype) + weights["b"].astype(x.dtype)


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Each token sees itself and those before it.

    Args:
      query: (batch, tokens, heads, width).
      key, value: (batch, tokens, key heads, width); `heads` is a multiple of `key heads`.

    Returns:
      (batch, tokens, heads · width).
    """
    batch, tokens, heads, width = query.shape
    groups = heads // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / width**0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(value.dtype), value)
    return mixed.reshape(batch, tokens, heads * width)


def token_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of (batch, tokens, vocabulary) against (batch, tokens)."""
    wide = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()
