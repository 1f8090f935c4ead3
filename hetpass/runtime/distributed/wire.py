"""Arrays between the driver and the workers: numpy arrays, and PRNG keys as what is below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hetpass._jax import device_order, shard_arrays
from hetpass.backend.pieces import Box
from hetpass.backend.reshard import boxes


@dataclass(frozen=True)
class Keys:
    """PRNG keys on their way: the name of their implementation, and their integers."""

    impl: str
    data: np.ndarray


@dataclass(frozen=True)
class Shards:
    """What one process has of an array: each box once, in elements of the whole.

    Attributes:
      shape: of the whole array.
      parts: (box, values).
      impl: of PRNG keys, whose integers these are; None for other arrays.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Box, np.ndarray], ...]
    impl: str | None


def encoded(value: Any) -> Any:
    """An array as it travels. What is no array (a Python number) travels as it is."""
    if not isinstance(value, jax.Array):
        return value
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return Keys(str(jax.random.key_impl(value)), np.asarray(jax.random.key_data(value)))
    return np.asarray(value)


def decoded(value: Any) -> Any:
    """The array again; numpy arrays stay numpy arrays."""
    if isinstance(value, Keys):
        return jax.random.wrap_key_data(value.data, impl=value.impl)
    return value


def shards_of(array: jax.Array) -> Shards:
    """This process's part of an array, on the host."""
    impl = None
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    found = boxes(array.sharding, array.shape)
    parts: dict[Box, np.ndarray] = {}
    for device, shard in zip(device_order(array.sharding), shard_arrays(array), strict=True):
        if found[device.id] not in parts:
            parts[found[device.id]] = np.asarray(shard)
    return Shards(tuple(array.shape), tuple(parts.items()), impl)


def joined(pieces: Sequence[Shards]) -> Any:
    """The whole array from what all its processes have; a numpy array, or PRNG keys."""
    first = pieces[0]
    box, value = first.parts[0]
    if tuple(stop - start for start, stop in box) != first.shape:
        whole = np.empty(first.shape, value.dtype)
        for piece in pieces:
            for part, values in piece.parts:
                whole[tuple(slice(*span) for span in part)] = values
        value = whole
    return value if first.impl is None else jax.random.wrap_key_data(value, impl=first.impl)
