"""GPT: learned positions, pre-norm blocks with GELU, the head tied to the embedding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hetpass.tools.models.names import TransformerSize
from hetpass.tools.models.parts import causal_attention, dense, layer_norm, token_loss


def _linear(inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"w": jnp.zeros((inputs, outputs)), "b": jnp.zeros(outputs)}


def _norm(hidden: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(hidden), "bias": jnp.zeros(hidden)}


def parameters(size: TransformerSize) -> dict[str, Any]:
    """Zeros of the right shapes; meant for `jax.eval_shape`."""
    h = size.hidden
    block = {
        "norm_attention": _norm(h),
        "qkv": _linear(h, 3 * h),
        "out": _linear(h, h),
        "norm_mlp": _norm(h),
        "up": _linear(h, 4 * h),
        "down": _linear(4 * h, h),
    }
    return {
        "tokens": jnp.zeros((size.vocabulary, h)),
        "positions": jnp.zeros((size.sequence, h)),
        "blocks": [block] * size.layers,
        "norm": _norm(h),
    }


def attention(x: jax.Array, block: dict[str, Any], heads: int) -> jax.Array:
    """The first half of a block: x plus what its tokens see."""
    batch, tokens, hidden = x.shape
    qkv = dense(layer_norm(x, block["norm_attention"]), block["qkv"])
    parts = jnp.split(qkv.reshape(batch, tokens, 3 * heads, hidden // heads), 3, axis=2)
    return x + dense(causal_attention(*parts), block["out"])


def mlp(x: jax.Array, block: dict[str, Any]) -> jax.Array:
    """The second half of a block."""
    return x + dense(jax.nn.gelu(dense(layer_norm(x, block["norm_mlp"]), block["up"])),
                     block["down"])  # fmt: skip


def loss(params: dict[str, Any], batch: dict[str, jax.Array], size: TransformerSize,
         dtype: str) -> jax.Array:  # fmt: skip
    """Every block is recomputed in backward, as in Alpa's suite."""

    @jax.checkpoint
    def block(x: jax.Array, weights: dict[str, Any]) -> jax.Array:
        return mlp(attention(x, weights, size.heads), weights)

    x = (params["tokens"][batch["tokens"]] + params["positions"]).astype(dtype)
    for weights in params["blocks"]:
        x = block(x, weights)
    logits = layer_norm(x, params["norm"]) @ params["tokens"].T.astype(dtype)
    return token_loss(logits, batch["labels"])
