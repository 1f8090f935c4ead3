"""A small GPT in flax linen with dropout, AdamW and clipping; it knows nothing of stages."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import hetpass as hp

VOCABULARY, TOKENS, HIDDEN, HEADS, BLOCKS = 64, 16, 32, 4, 2


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.SelfAttention(HEADS)(nn.LayerNorm()(x), mask)
        x = x + nn.Dense(HIDDEN)(nn.gelu(nn.Dense(4 * HIDDEN)(nn.LayerNorm()(x))))
        return nn.Dropout(0.1, deterministic=False)(x)


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, HIDDEN)
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (TOKENS, HIDDEN))
        for _ in range(BLOCKS):
            x = Block()(x)
        return embed.attend(nn.LayerNorm()(x))


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
model = GPT()


def create_state(key):
    tokens = jnp.zeros((1, TOKENS), jnp.int32)
    variables = model.init({"params": key, "dropout": key}, tokens)
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)


cluster = hp.Cluster.emulated({"fast": 4, "slow": 2}, speeds={"slow": 0.5})


@hp.het_parallelize(cluster=cluster, num_microbatches=4, plan="even")
def train_step(state, batch):
    def loss_fn(params):
        key = jax.random.fold_in(jax.random.key(1), state.step)
        logits = state.apply_fn({"params": params}, batch["tokens"], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.tree.norm(grads)}


def make_batch(key):
    text = jax.random.randint(key, (16, TOKENS + 1), 0, VOCABULARY)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def example_arguments():
    return create_state(jax.random.key(0)), make_batch(jax.random.key(2))


def main(steps=5):
    batch = make_batch(jax.random.key(2))
    state = train_step.init_state(create_state, jax.random.key(0), batch=batch)
    losses = []
    for _ in range(steps):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    print(losses)
    return losses


if __name__ == "__main__":
    main()
