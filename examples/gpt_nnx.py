"""A small GPT in flax nnx. The step is a function of the model's state; its structure is static."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import hetpass as hp

VOCABULARY, TOKENS, HIDDEN, HEADS, BLOCKS = 64, 16, 32, 4, 2


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.norm_mlp = (nnx.LayerNorm(HIDDEN, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, HIDDEN, decode=False, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, HIDDEN, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (TOKENS, HIDDEN)))
        self.blocks = nnx.List(Block(rngs) for _ in range(BLOCKS))
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def create(key):
    model = GPT(nnx.Rngs(key))
    return nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)))


graph, _ = jax.eval_shape(lambda: create(jax.random.key(0)))
cluster = hp.Cluster.emulated({"fast": 4, "slow": 2}, speeds={"slow": 0.5})


@hp.het_parallelize(cluster=cluster, num_microbatches=4, plan="even")
def train_step(state, batch):
    model, optimizer = nnx.merge(graph, state)

    def loss_fn(model):
        logits = model(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


def example_arguments():
    text = jax.random.randint(jax.random.key(2), (16, TOKENS + 1), 0, VOCABULARY)
    return create(jax.random.key(0))[1], {"tokens": text[:, :-1], "labels": text[:, 1:]}


def main(steps=5):
    state, batch = example_arguments()
    losses = []
    for _ in range(steps):
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    print(losses)
    return losses


if __name__ == "__main__":
    main()
