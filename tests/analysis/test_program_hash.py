"""What cached plans are found by."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from hetpass.analysis.program_hash import program_hash
from hetpass.frontend.trace import trace


def _hash(captured: np.ndarray[Any, Any]) -> str:
    def step(weights: Any, x: Any) -> Any:
        return (x @ weights).sum(0) + jnp.asarray(captured)

    return program_hash(trace(step, (jnp.ones((3, 3)), jnp.ones((4, 3))), {}))


def test_values_of_captured_arrays_do_not_count_but_zeros_do():
    """A sum that starts at zeros may be split; one that starts at something else may not."""
    ones, twos, zeros = (np.full(3, value, np.float32) for value in (1, 2, 0))
    assert _hash(ones) == _hash(twos)
    assert _hash(ones) != _hash(zeros)
