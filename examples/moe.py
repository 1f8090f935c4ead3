"""Experts (GShard's top-2 gate) with a capacity per example, so that examples do not compete."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

import hetpass as hp
from hetpass.tools.models.steps import model_step

cluster = hp.Cluster.emulated({"fast": 4, "slow": 2})
model = model_step("moe-tiny", batch_size=8, dtype="float32")
train_step = model.step


def example_arguments():
    def filled(shape):
        key = jax.random.key(sum(shape.shape))
        if jax.numpy.issubdtype(shape.dtype, jax.numpy.integer):
            return jax.random.randint(key, shape.shape, 0, 64)
        return 0.1 * jax.random.normal(key, shape.shape, shape.dtype)

    state = jax.tree.map(filled, model.state)
    moments = jax.tree.map(jax.numpy.abs, state["optimizer"])  # as Adam's are
    return {**state, "optimizer": moments}, jax.tree.map(filled, model.batch)


def loss_only(state, batch):
    """The loss alone: Adam turns rounding of vanishing gradients into steps of its own."""
    return train_step(state, batch)[1]["loss"]


def main():
    settings = {"cluster": cluster, "num_microbatches": 4, "plan": "even"}
    report = hp.verify(loss_only, *example_arguments(), **settings)
    print(report)
    return report


if __name__ == "__main__":
    main().raise_if_different()
