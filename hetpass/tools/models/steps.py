"""A model's train step on shapes: nothing is allocated, whatever the size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetpass.tools.models import gpt, llama, moe, wide_resnet
from hetpass.tools.models.names import SIZES, ResNetSize, TransformerSize, default_batch_size

_FAMILIES: dict[str, ModuleType] = {
    "gpt": gpt,
    "llama": llama,
    "moe": moe,
    "wresnet": wide_resnet,
}


@dataclass(frozen=True)
class ModelStep:
    """A train step and shapes to trace it with.

    Attributes:
      step: (state, batch) -> (state, metrics); mixed precision, Adam with float32 moments.
      state, batch: of `jax.ShapeDtypeStruct`s.
      parameter_count: of the model.
    """

    step: Callable[[Any, Any], Any]
    state: Any
    batch: Any
    parameter_count: int


def model_step(
    name: str, batch_size: int | None = None, dtype: str | None = None, layers: int | None = None
) -> ModelStep:
    """The model called `name` (of `SIZES`).

    Args:
      batch_size: examples in a step; None: the family's usual.
      dtype: of the computation; None: float16, for Wide-ResNet float32. Parameters are float32.
      layers: of a transformer, instead of its own number.
    """
    size, module = SIZES[name], _FAMILIES[name.partition("-")[0]]
    if layers is not None and isinstance(size, TransformerSize):
        size = replace(size, layers=layers)
    kind = dtype or ("float32" if isinstance(size, ResNetSize) else "float16")
    optimizer = optax.adamw(1e-4)

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return module.loss(params, batch, size, kind)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, moments = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": moments}, {"loss": loss}

    def state() -> Any:
        params = module.parameters(size)
        return {"params": params, "optimizer": optimizer.init(params)}

    shapes = jax.eval_shape(state)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["params"]))
    examples = batch_size or default_batch_size(name)
    return ModelStep(train_step, shapes, _batch(size, examples), count)


def _batch(size: TransformerSize | ResNetSize, examples: int) -> dict[str, jax.ShapeDtypeStruct]:
    if isinstance(size, ResNetSize):
        shape = (examples, wide_resnet.IMAGE, wide_resnet.IMAGE, 3)
        images = jax.ShapeDtypeStruct(shape, jnp.float32)
        return {"images": images, "labels": jax.ShapeDtypeStruct((examples,), jnp.int32)}
    tokens = jax.ShapeDtypeStruct((examples, size.sequence), jnp.int32)
    return {"tokens": tokens, "labels": tokens}
