"""Mixture of experts: GPT whose every second MLP is a set of them (GShard, Lepikhin et al. 2020).

Each token goes to its two best experts. An expert takes at most its capacity of every example, so
that examples do not compete with each other and the step is the same for any number of
microbatches.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hetpass.tools.models import gpt
from hetpass.tools.models.names import TransformerSize
from hetpass.tools.models.parts import layer_norm, token_loss

CAPACITY_FACTOR = 1.25
BALANCE_WEIGHT = 0.01


def parameters(size: TransformerSize) -> dict[str, Any]:
    """Zeros of the right shapes; meant for `jax.eval_shape`."""
    h, f = size.hidden, size.feedforward
    plain = gpt.parameters(size)
    (block, *_) = plain["blocks"]
    attention = {k: v for k, v in block.items() if k not in ("up", "down")}
    wide = {
        "up": {"w": jnp.zeros((h, f)), "b": jnp.zeros(f)},
        "down": {"w": jnp.zeros((f, h)), "b": jnp.zeros(h)},
    }
    experts = {
        "gate": jnp.zeros((h, size.experts)),
        "up": jnp.zeros((size.experts, h, f)),
        "down": jnp.zeros((size.experts, f, h)),
    }
    pair = [attention | wide, attention | experts]
    return plain | {"blocks": (pair * size.layers)[: size.layers]}


def loss(params: dict[str, Any], batch: dict[str, jax.Array], size: TransformerSize,
         dtype: str) -> jax.Array:  # fmt: skip
    """The tokens' loss plus the experts' balance; blocks are recomputed in backward."""

    @jax.checkpoint
    def block(x: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        x = gpt.attention(x, weights, size.heads)
        if "gate" not in weights:
            return gpt.mlp(x, weights), jnp.zeros(x.shape[0])
        mixed, balance = experts(layer_norm(x, weights["norm_mlp"]), weights)
        return x + mixed, balance

    x = (params["tokens"][batch["tokens"]] + params["positions"]).astype(dtype)
    balances = jnp.zeros(x.shape[0])
    for weights in params["blocks"]:
        x, balance = block(x, weights)
        balances = balances + balance
    logits = layer_norm(x, params["norm"]) @ params["tokens"].T.astype(dtype)
    return token_loss(logits, batch["labels"]) + BALANCE_WEIGHT * balances.mean()


def experts(x: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """What the two best experts of each token make of it, and an example's balance loss.

    Args:
      x: (batch, tokens, hidden).

    Returns:
      The same shape, and (batch,).
    """
    tokens = x.shape[1]
    count = weights["gate"].shape[1]
    capacity = max(1, int(2 * CAPACITY_FACTOR * tokens / count))
    chances = jax.nn.softmax(x.astype(jnp.float32) @ weights["gate"])
    first = jax.nn.one_hot(chances.argmax(-1), count)
    second = jax.nn.one_hot((chances * (1 - first)).argmax(-1), count)
    balance = count * (chances.mean(1) * first.mean(1)).sum(-1)
    # An expert's places are given out in the order of the tokens, first choices before second.
    place_first = (first.cumsum(1) - 1) * first
    place_second = (second.cumsum(1) - 1 + first.sum(1, keepdims=True)) * second
    combine = jnp.zeros((*chances.shape, capacity))
    for choice, place in ((first, place_first), (second, place_second)):
        kept = choice * (place < capacity)
        share = (chances * kept).sum(-1)
        slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
        combine = combine + share[..., None, None] * kept[..., None] * slot[:, :, None, :]
    combine = combine.astype(x.dtype)
    sent = jnp.einsum("btec,bth->bech", (combine > 0).astype(x.dtype), x)
    up = jax.nn.gelu(jnp.einsum("bech,ehf->becf", sent, weights["up"].astype(x.dtype)))
    made = jnp.einsum("becf,efh->bech", up, weights["down"].astype(x.dtype))
    return jnp.einsum("btec,bech->bth", combine, made), balance
