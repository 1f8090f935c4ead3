"""LoRA: the base weights are frozen, only narrow matrices beside them learn."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import hetpass as hp

HIDDEN, RANK = 32, 4
cluster = hp.Cluster.emulated({"fast": 4, "slow": 2})


def train_step(state, batch):
    def loss_fn(adapters):
        x = batch["x"]
        for w, adapter in zip(state["base"], adapters, strict=True):
            x = x + jnp.tanh(x @ w)
            if adapter is not None:
                x = x + x @ adapter["down"] @ adapter["up"]
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["adapters"])
    adapters = jax.tree.map(lambda a, g: a - 0.1 * g, state["adapters"], grads)
    return {**state, "adapters": adapters}, {"loss": loss, "grads": grads}


def example_arguments():
    keys = jax.random.split(jax.random.key(0), 16)
    base = [0.3 * jax.random.normal(key, (HIDDEN, HIDDEN)) for key in keys[:6]]
    adapters = [None, None, None]  # the first layers have none: no gradient ever reaches them
    for one, other in zip(keys[6:9], keys[9:12], strict=True):
        down = 0.1 * jax.random.normal(one, (HIDDEN, RANK))
        adapters.append({"down": down, "up": 0.1 * jax.random.normal(other, (RANK, HIDDEN))})
    x, y = jax.random.normal(keys[12], (2, 16, HIDDEN))
    return {"base": base, "adapters": adapters}, {"x": x, "y": y}


def main():
    settings = {"cluster": cluster, "num_microbatches": 4, "plan": "even"}
    report = hp.verify(train_step, *example_arguments(), **settings)
    print(report)
    return report


if __name__ == "__main__":
    main().raise_if_different()
