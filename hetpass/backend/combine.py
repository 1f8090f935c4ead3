"""How partial values combine: identity, pairwise step and reduction of each operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetpass.ir.kinds import CombineOp


def identity(op: CombineOp, dtype: Any) -> np.ndarray:
    """The scalar that changes nothing under `op`."""
    dtype = jnp.dtype(dtype)
    if op in ("or", "and"):
        ones = np.array(True) if dtype == np.bool_ else np.array(-1).astype(dtype)
        return ones if op == "and" else np.zeros((), dtype)
    if op in ("max", "min"):
        return _extreme(dtype, lowest=op == "max")
    return np.array(1 if op == "prod" else 0, dtype)


def _extreme(dtype: Any, lowest: bool) -> np.ndarray:
    if dtype == np.bool_:
        return np.array(not lowest)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.array(info.min if lowest else info.max, dtype)
    return np.array(-np.inf if lowest else np.inf, dtype)


_PAIRWISE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": jax.lax.add,
    "prod": jax.lax.mul,
    "max": jax.lax.max,
    "min": jax.lax.min,
    "or": jax.lax.bitwise_or,
    "and": jax.lax.bitwise_and,
    "same": lambda left, right: right,
    "total": jax.lax.add,
}


def pairwise(op: CombineOp, left: Any, right: Any) -> Any:
    """`op` of two values of one shape; booleans add as "or" and multiply as "and"."""
    if left.dtype == np.bool_:
        op = {"sum": "or", "total": "or", "prod": "and"}.get(op, op)  # type: ignore[assignment]
    return _PAIRWISE[op](left, right)


def reduce_leading(op: CombineOp, value: Any) -> Any:
    """[D, ...] -> [...], combined by `op`."""
    if op == "same":
        return value[0]
    start = identity(op, value.dtype)
    if value.dtype == np.bool_:
        op = {"sum": "or", "total": "or", "prod": "and"}.get(op, op)  # type: ignore[assignment]
    return jax.lax.reduce(value, start, _PAIRWISE[op], (0,))


def only_first(op: CombineOp, value: Any, parts: int) -> Any:
    """[...] -> [parts, ...]: the value, then identities, so that reducing gives the value back."""
    if op == "same":
        return jnp.broadcast_to(value[None], (parts, *value.shape))
    rest = jnp.full((parts - 1, *value.shape), identity(op, value.dtype), value.dtype)
    return jnp.concatenate([value[None], rest])
