"""One matrix embeds on the first stage and scores on the last; its gradients meet once per step."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax

import hetpass as hp

VOCABULARY, TOKENS, HIDDEN = 64, 8, 32
cluster = hp.Cluster.emulated({"fast": 4, "slow": 2})


def train_step(params, batch):
    def loss_fn(params):
        x = params["embedding"][batch["tokens"]]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w)
        logits = x @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss, "grads": grads}


def example_arguments():
    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        "embedding": 0.3 * jax.random.normal(keys[0], (VOCABULARY, HIDDEN)),
        "layers": [0.3 * jax.random.normal(key, (HIDDEN, HIDDEN)) for key in keys[1:5]],
    }
    text = jax.random.randint(keys[5], (16, TOKENS + 1), 0, VOCABULARY)
    return params, {"tokens": text[:, :-1], "labels": text[:, 1:]}


def main():
    report = hp.verify(
        train_step, *example_arguments(), cluster=cluster, num_microbatches=4, plan="even"
    )
    print(report)
    return report


if __name__ == "__main__":
    main().raise_if_different()
