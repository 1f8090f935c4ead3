"""The mean over unmasked tokens. How many there are is known only over the whole batch: hetpass
counts them once, before the microbatches, and every microbatch divides by that."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax

import hetpass as hp

CLASSES, TOKENS, HIDDEN = 16, 8, 32
cluster = hp.Cluster.emulated({"fast": 4, "slow": 2})


def train_step(weights, batch):
    def loss_fn(weights):
        x = batch["x"]
        for w in weights[:-1]:
            x = x + jnp.tanh(x @ w)
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ weights[-1], batch["labels"])
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), {"loss": loss, "grads": grads}


def example_arguments():
    keys = jax.random.split(jax.random.key(0), 8)
    weights = [0.3 * jax.random.normal(key, (HIDDEN, HIDDEN)) for key in keys[:4]]
    weights.append(0.3 * jax.random.normal(keys[4], (HIDDEN, CLASSES)))
    lengths = jax.random.randint(keys[5], (16, 1), 0, TOKENS)  # some examples have no token at all
    return weights, {
        "x": jax.random.normal(keys[6], (16, TOKENS, HIDDEN)),
        "labels": jax.random.randint(keys[7], (16, TOKENS), 0, CLASSES),
        "mask": (jnp.arange(TOKENS) < lengths).astype(jnp.float32),
    }


def main():
    report = hp.verify(
        train_step, *example_arguments(), cluster=cluster, num_microbatches=8, plan="even"
    )
    print(report)
    return report


if __name__ == "__main__":
    main().raise_if_different()
