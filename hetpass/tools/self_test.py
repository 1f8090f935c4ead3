"""Does a device compute what numpy computes, and does a link carry what it is given?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetpass.ir.devices import Link
from hetpass.tools.measure_devices import measure_link

_LINK_BYTES = (1 << 10, 1 << 22)


@dataclass(frozen=True)
class LinkTest:
    """A link, and whether bytes arrived as they left."""

    link: Link
    intact: bool


def self_test(device: Any) -> str:
    """ "" if the device agrees with numpy; else what differs.

    A product of small whole numbers is exact in every format that products are computed in; a
    softmax may differ by rounding.
    """
    generator = np.random.default_rng(0)
    a = generator.integers(-8, 9, (64, 64)).astype(np.float32)
    x = generator.standard_normal((16, 33)).astype(np.float32)
    try:
        product = np.asarray(jax.jit(jnp.matmul)(*(jax.device_put(a, device),) * 2))
        soft = np.asarray(jax.jit(jax.nn.softmax)(jax.device_put(x, device)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    if not np.array_equal(product, a @ a):
        return "a matrix product differs from numpy's"
    powers = np.exp(x - x.max(-1, keepdims=True))
    if not np.allclose(soft, powers / powers.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6):
        return "a softmax differs from numpy's"
    return ""


def link_test(source: Any, target: Any) -> LinkTest:
    """Sends random bytes from one device to another, and measures how long that takes."""
    sent = np.random.default_rng(1).integers(0, 2**31, 4099, dtype=np.int32)
    arrived = jax.device_put(jax.device_put(sent, source), target)
    intact = arrived.devices() == {target} and np.array_equal(np.asarray(arrived), sent)
    return LinkTest(measure_link(source, target, _LINK_BYTES), bool(intact))
