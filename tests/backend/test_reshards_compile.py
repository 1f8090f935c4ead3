"""Reshards compile to the priced kinds and bytes, and keep the numbers.

All pairs on 1x8 and 2x4 meshes, one in twenty on 2x2x2 (all with --all-plans).
"""

from __future__ import annotations

import numpy as np
import pytest

from hetpass.ir.operation_graph import Mesh
from tests.backend.reshard_pairs import all_pairs, resharded

MESHES: dict[str, tuple[Mesh, tuple[int, ...]]] = {
    "1x8": ((("data", 8),), (16, 8)),
    "2x4": ((("data", 2), ("model", 4)), (16, 8)),
    "2x2x2": ((("x", 2), ("y", 2), ("z", 2)), (8, 16)),
}
_AT_ONCE = 60


@pytest.mark.parametrize("name", MESHES)
def test_reshards_compile_as_priced(name: str, all_plans: bool) -> None:
    axes, shape = MESHES[name]
    pairs = all_pairs(shape, axes)
    if name == "2x2x2" and not all_plans:
        pairs = pairs[::20]
    for start in range(0, len(pairs), _AT_ONCE):
        batch = pairs[start : start + _AT_ONCE]
        done = resharded(shape, axes, batch)
        assert done.differences == (), [str(d) for d in done.differences]
        for result, expected in zip(done.call(*done.sources), done.whole, strict=True):
            np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-5)
