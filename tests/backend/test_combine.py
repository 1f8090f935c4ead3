"""Identities and reductions of the combining operations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hetpass.backend.combine import identity, only_first, pairwise, reduce_leading

CASES = [
    ("sum", "float32"),
    ("sum", "bfloat16"),
    ("sum", "int32"),
    ("max", "float32"),
    ("max", "int8"),
    ("min", "float32"),
    ("min", "uint8"),
    ("prod", "float32"),
    ("max", "bool"),
    ("min", "bool"),
    ("or", "bool"),
    ("and", "bool"),
    ("or", "uint8"),
    ("and", "int32"),
]
NUMPY = {
    "sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod,
    "or": np.bitwise_or.reduce, "and": np.bitwise_and.reduce,
}  # fmt: skip


def _values(dtype):
    values = np.random.default_rng(1).integers(0, 5, size=(3, 4))
    if dtype == "bool":
        return jnp.asarray(values > 2)
    return jnp.asarray(values - (0 if dtype.startswith("u") else 2)).astype(dtype)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_identity_changes_nothing(op, dtype):
    values = _values(dtype)
    start = jnp.full(values.shape, identity(op, dtype), values.dtype)
    np.testing.assert_array_equal(pairwise(op, start, values), values)
    np.testing.assert_array_equal(reduce_leading(op, only_first(op, values, 3)), values)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_reduction_agrees_with_numpy_and_keeps_the_dtype(op, dtype):
    values = _values(dtype)
    reduced = reduce_leading(op, values)
    assert reduced.dtype == values.dtype
    wide = np.asarray(values, np.float32) if dtype == "bfloat16" else np.asarray(values)
    np.testing.assert_array_equal(
        np.asarray(reduced, wide.dtype), NUMPY[op](wide, axis=0).astype(wide.dtype)
    )


def test_maximum_keeps_nan():
    values = jnp.array([[1.0, jnp.nan], [2.0, 0.0]])
    np.testing.assert_array_equal(reduce_leading("max", values), [2.0, np.nan])
