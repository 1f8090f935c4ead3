"""The same pre-norm GPT in flax nnx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.models.sizes import GPTConfig


def _kinds(config: GPTConfig) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype}


class Attention(nnx.Module):
    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.qkv = nnx.Linear(config.hidden, 3 * config.hidden, rngs=rngs, **_kinds(config))
        self.out = nnx.Linear(config.hidden, config.hidden, rngs=rngs, **_kinds(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: (batch, seq, hidden) -> the same shape."""
        batch, seq, hidden = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(batch, seq, self.heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (hidden // self.heads) ** 0.5
        causal = jnp.tril(jnp.ones((seq, seq), bool))
        scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores.astype(jnp.promote_types(scores.dtype, jnp.float32)))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)
        return self.out(mixed.reshape(batch, seq, hidden))


class Block(nnx.Module):
    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        kinds = _kinds(config)
        self.norm_attn = nnx.LayerNorm(config.hidden, rngs=rngs, **kinds)
        self.attn = Attention(config, rngs)
        self.norm_mlp = nnx.LayerNorm(config.hidden, rngs=rngs, **kinds)
        self.up = nnx.Linear(config.hidden, 4 * config.hidden, rngs=rngs, **kinds)
        self.down = nnx.Linear(4 * config.hidden, config.hidden, rngs=rngs, **kinds)
        self.drop_attn = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None
        self.drop_mlp = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        attended = self.attn(self.norm_attn(x))
        x = x + (self.drop_attn(attended) if self.drop_attn else attended)
        mixed = self.down(nnx.gelu(self.up(self.norm_mlp(x))))
        return x + (self.drop_mlp(mixed) if self.drop_mlp else mixed)


def _apply_block(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


class GPT(nnx.Module):
    """Logits for every position: tokens (batch, seq) int -> (batch, seq, vocab) float32."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        init, kinds = nnx.initializers.normal(0.02), _kinds(config)
        self.config = config
        self.wte = nnx.Embed(config.vocab, config.hidden, embedding_init=init, rngs=rngs, **kinds)
        shape = (config.seq, config.hidden)
        self.wpe = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        if config.scan:
            make = nnx.vmap(lambda r: Block(config, r), in_axes=0, out_axes=0)
            self.blocks = make(rngs.split(config.layers))
        else:
            self.blocks = nnx.List(Block(config, rngs) for _ in range(config.layers))
        self.norm = nnx.LayerNorm(config.hidden, rngs=rngs, **kinds)
        self.head = (
            None
            if config.tied
            else nnx.Linear(
                config.hidden, config.vocab, use_bias=False, kernel_init=init, rngs=rngs, **kinds
            )
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        x = self.wte(tokens) + self.wpe[: tokens.shape[1]].astype(c.dtype)
        apply = nnx.remat(_apply_block) if c.remat else _apply_block
        if c.scan:
            carry = nnx.scan(lambda x, block: apply(block, x), in_axes=(nnx.Carry, 0),
                             out_axes=nnx.Carry)  # fmt: skip
            x = carry(x, self.blocks)
        else:
            for block in self.blocks:
                x = apply(block, x)
        x = self.norm(x)
        logits = self.head(x) if self.head else self.wte.attend(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _create(key: jax.Array, config: GPTConfig, optimizer: optax.GradientTransformation) -> Any:
    model = GPT(config, nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1)))
    return nnx.split((model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)))


def make_create_state(
    config: GPTConfig, optimizer: optax.GradientTransformation
) -> Callable[[jax.Array], nnx.State]:
    """A function from a key to fresh parameters, optimizer state and dropout streams."""

    def create_state(key: jax.Array) -> nnx.State:
        return _create(key, config, optimizer)[1]

    return create_state


def make_train_step(
    config: GPTConfig, optimizer: optax.GradientTransformation, keep_grads: bool = False
) -> Callable[[nnx.State, dict[str, jax.Array]], tuple[nnx.State, dict[str, Any]]]:
    """A train step over the nnx.State of `make_create_state`; the module's structure is static.

    With `keep_grads` the gradient is among the metrics.
    """
    abstract = jax.eval_shape(lambda: _create(jax.random.key(0), config, optimizer))
    graph = abstract[0]

    def train_step(
        state: nnx.State, batch: dict[str, jax.Array]
    ) -> tuple[nnx.State, dict[str, Any]]:
        model, optim = nnx.merge(graph, state)

        def loss_fn(model: GPT) -> jax.Array:
            logits = model(batch["tokens"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return losses.mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optim.update(model, grads)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        if keep_grads:
            metrics["grads"] = grads
        return nnx.state((model, optim)), metrics

    return train_step
