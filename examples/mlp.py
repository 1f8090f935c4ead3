"""A plain-JAX train step over two unlike groups of devices."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import hetpass as hp

cluster = hp.Cluster.emulated({"fast": 4, "slow": 2}, speeds={"slow": 0.5})


@hp.het_parallelize(cluster=cluster, num_microbatches=4)
def train_step(weights, batch):
    def loss_fn(weights):
        x = batch["x"]
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def example_arguments():
    keys = jax.random.split(jax.random.key(0), 8)
    weights = [0.3 * jax.random.normal(key, (32, 32)) for key in keys]
    x, y = jax.random.normal(keys[0], (2, 32, 32))
    return weights, {"x": x, "y": y}


def main(steps=5):
    weights, batch = example_arguments()
    print(train_step.trace(weights, batch).plan().explain())
    losses = []
    for _ in range(steps):
        weights, loss = train_step(weights, batch)
        losses.append(float(loss))
    print(losses)
    return losses


if __name__ == "__main__":
    main()
