"""A pre-norm GPT in flax linen: learned positions, causal attention, GELU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from benchmarks.models.sizes import GPTConfig


class Attention(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x: (batch, seq, hidden) -> the same shape."""
        c = self.config
        batch, seq, hidden = x.shape
        dense = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        qkv = nn.Dense(3 * hidden, name="qkv", **dense)(x)
        q, k, v = jnp.split(qkv.reshape(batch, seq, c.heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (hidden // c.heads) ** 0.5
        causal = jnp.tril(jnp.ones((seq, seq), bool))
        scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores.astype(jnp.promote_types(scores.dtype, jnp.float32)))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)
        return nn.Dense(hidden, name="out", **dense)(mixed.reshape(batch, seq, hidden))


class Block(nn.Module):
    config: GPTConfig
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        norm = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        drop = nn.Dropout(c.dropout, deterministic=not self.train)
        attended = Attention(c, name="attn")(nn.LayerNorm(name="norm_attn", **norm)(x))
        x = x + drop(attended)
        hidden = nn.Dense(4 * c.hidden, name="up", **norm)(nn.LayerNorm(name="norm_mlp", **norm)(x))
        return x + drop(nn.Dense(c.hidden, name="down", **norm)(nn.gelu(hidden)))


class _ScanBlock(nn.Module):
    config: GPTConfig
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        block = nn.remat(Block, prevent_cse=False) if self.config.remat else Block
        return block(self.config, self.train, name="block")(x), None


class GPT(nn.Module):
    """Logits for every position: tokens (batch, seq) int -> (batch, seq, vocab) float32."""

    config: GPTConfig
    train: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        init = nn.initializers.normal(0.02)
        kinds = {"dtype": c.dtype, "param_dtype": c.param_dtype}
        embed = nn.Embed(c.vocab, c.hidden, embedding_init=init, name="wte", **kinds)
        positions = self.param("wpe", init, (c.seq, c.hidden), c.param_dtype)
        x = embed(tokens) + positions[: tokens.shape[1]].astype(c.dtype)
        x = nn.Dropout(c.dropout, deterministic=not self.train)(x)
        if c.scan:
            x, _ = nn.scan(
                _ScanBlock,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=c.layers,
            )(c, self.train, name="blocks")(x, None)
        else:
            block = nn.remat(Block) if c.remat else Block
            for i in range(c.layers):
                x = block(c, self.train, name=f"block_{i}")(x)
        x = nn.LayerNorm(name="norm", **kinds)(x)
        if c.tied:
            logits = embed.attend(x)
        else:
            logits = nn.Dense(c.vocab, use_bias=False, kernel_init=init, name="head", **kinds)(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


class GPTState(TrainState):
    """A flax TrainState that also carries the key from which every step draws its dropout."""

    dropout_key: jax.Array


def make_create_state(
    config: GPTConfig, optimizer: optax.GradientTransformation
) -> Callable[[jax.Array], GPTState]:
    """A function from a key to fresh parameters and optimizer state.

    `apply_fn` is part of the state's structure and is compared by identity, so all states that
    one function makes share one.
    """
    apply_fn = GPT(config, train=config.dropout > 0).apply

    def create_state(key: jax.Array) -> GPTState:
        params_key, dropout_key = jax.random.split(key)
        tokens = jnp.zeros((1, config.seq), jnp.int32)
        params = GPT(config).init(params_key, tokens)["params"]
        return GPTState.create(
            apply_fn=apply_fn, params=params, tx=optimizer, dropout_key=dropout_key
        )

    return create_state


def train_step(
    state: GPTState, batch: dict[str, jax.Array], keep_grads: bool = False
) -> tuple[GPTState, dict[str, Any]]:
    """One step on batch = {"tokens", "labels"}, each (batch, seq) int32: plain flax and optax.

    With `keep_grads` the gradient is among the metrics.
    """

    def loss_fn(params: Any) -> jax.Array:
        rngs = {"dropout": jax.random.fold_in(state.dropout_key, state.step)}
        logits = state.apply_fn({"params": params}, batch["tokens"], rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    if keep_grads:
        metrics["grads"] = grads
    return state.apply_gradients(grads=grads), metrics


def eval_step(state: GPTState, batch: dict[str, jax.Array], config: GPTConfig) -> jax.Array:
    """The mean loss on a batch, without dropout."""
    evaluated = dataclasses.replace(config, dropout=0.0)
    logits = GPT(evaluated).apply({"params": state.params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
