"""Wide-ResNet (Zagoruyko and Komodakis, 2016) with bottlenecks, on images of 224 · 224.

Norms are over channel groups of one example: batch norm's statistics mix examples, and a step with
them has no exact equal in microbatches.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetpass.tools.models.names import ResNetSize

CLASSES, IMAGE = 1000, 224
_NORM_GROUPS = 16


def parameters(size: ResNetSize) -> dict[str, Any]:
    """Zeros of the right shapes; meant for `jax.eval_shape`."""

    def conv(window: int, inputs: int, outputs: int) -> dict[str, jax.Array]:
        kernel = jnp.zeros((window, window, inputs, outputs))
        return {"kernel": kernel, "scale": jnp.ones(outputs), "bias": jnp.zeros(outputs)}

    groups = []
    inputs = size.channels
    for number, count in enumerate(size.blocks):
        channels = size.channels * 2**number
        blocks = []
        for index in range(count):
            block = {
                "in": conv(1, inputs, channels),
                "wide": conv(3, channels, channels * size.width),
                "out": conv(1, channels * size.width, 4 * channels),
            }
            if index == 0:
                block["skip"] = conv(1, inputs, 4 * channels)
            blocks.append(block)
            inputs = 4 * channels
        groups.append(blocks)
    return {
        "stem": conv(7, 3, size.channels),
        "groups": groups,
        "head": {"w": jnp.zeros((inputs, CLASSES)), "b": jnp.zeros(CLASSES)},
    }


def loss(params: dict[str, Any], batch: dict[str, jax.Array], size: ResNetSize,
         dtype: str) -> jax.Array:  # fmt: skip
    """Every block is recomputed in backward."""
    del size

    @jax.checkpoint
    def first_block(x: jax.Array, block: dict[str, Any]) -> jax.Array:
        return _block(x, block, 2)

    @jax.checkpoint
    def later_block(x: jax.Array, block: dict[str, Any]) -> jax.Array:
        return _block(x, block, 1)

    x = jax.nn.relu(_conv(batch["images"].astype(dtype), params["stem"], 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for number, blocks in enumerate(params["groups"]):
        for index, block in enumerate(blocks):
            x = (first_block if number and index == 0 else later_block)(x, block)
    pooled = x.mean((1, 2)).astype(jnp.float32)
    logits = pooled @ params["head"]["w"] + params["head"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def _block(x: jax.Array, block: dict[str, Any], stride: int) -> jax.Array:
    inner = jax.nn.relu(_conv(x, block["in"], 1))
    inner = jax.nn.relu(_conv(inner, block["wide"], stride))
    skip = _conv(x, block["skip"], stride) if "skip" in block else x
    return jax.nn.relu(skip + _conv(inner, block["out"], 1))


def _conv(x: jax.Array, weights: dict[str, jax.Array], stride: int) -> jax.Array:
    """Convolution and group norm; x is (batch, height, width, channels)."""
    kernel = weights["kernel"].astype(x.dtype)
    y = jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    batch, height, width, channels = y.shape
    parts = y.astype(jnp.float32).reshape(batch, height, width, _NORM_GROUPS, -1)
    centred = parts - parts.mean((1, 2, 4), keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean((1, 2, 4), keepdims=True) + 1e-5)
    normed = scaled.reshape(batch, height, width, channels) * weights["scale"] + weights["bias"]
    return normed.astype(y.dtype)
