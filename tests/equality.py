"""What "equal to `jax.jit`" means in the tests, and the layouts that every case is run in.

Two results are equal if their trees, shapes, dtypes and weak types are the same, integers, bools
and keys agree exactly, NaN and infinities stand at the same places, and for every floating leaf

    norm(parallel - reference) <= tolerance * norm(reference)

over the finite entries, with tolerance 1e-12 (float64), 1e-5 (float32) or 1e-2 (bfloat16). A leaf
that is zero mathematically holds rounding noise only, in any program: such leaves are named by the
case, and their noise must stay under FLOOR per entry, in both results.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
FLOOR = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Difference:
    """One leaf that is not equal: its path, and why."""

    path: str
    why: str
    relative: float = float("inf")

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


def relative_error(actual: Any, expected: Any) -> float:
    """norm(actual - expected) / norm(expected), over entries that are finite in `expected`.

    Infinite if other entries are not finite, or if `expected` is zero and `actual` is not.
    """
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, e = np.asarray(actual).astype(wide), np.asarray(expected).astype(wide)
    if a.shape != e.shape:
        return float("inf")
    finite = np.isfinite(e)
    same_elsewhere = np.array_equal(a[~finite], e[~finite], equal_nan=True)
    if not same_elsewhere or not np.isfinite(a[finite]).all():
        return float("inf")
    gap, size = np.linalg.norm(a[finite] - e[finite]), np.linalg.norm(e[finite])
    return float(gap / size) if size else (float("inf") if gap else 0.0)


def differences(
    actual: Any,
    expected: Any,
    precision: str = "float32",
    zeros: Sequence[str] = (),
    tolerance: float | None = None,
) -> list[Difference]:
    """Every leaf of `actual` that is not equal to `expected`; see the head of this module.

    Args:
      actual, expected: results, trees of arrays.
      precision: the coarsest type that the step computes in.
      zeros: fnmatch patterns over key paths of leaves that are zero mathematically; in a pattern
        brackets mean themselves.
      tolerance: instead of that of `precision`.
    """
    bound = TOLERANCE[precision] if tolerance is None else tolerance
    trees = jax.tree.structure(actual), jax.tree.structure(expected)
    if trees[0] != trees[1]:
        return [Difference("the result", f"tree {trees[0]} instead of {trees[1]}")]
    found = []
    for (path, e), a in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        name = jax.tree_util.keystr(path)
        floor = FLOOR[precision] if any(_matches(name, pattern) for pattern in zeros) else None
        found += _leaf_differences(name, a, e, bound, floor)
    return found


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern.replace("[", "[[]"))


def _leaf_differences(
    path: str, actual: Any, expected: Any, bound: float, floor: float | None
) -> list[Difference]:
    """`floor`: for a leaf that is zero mathematically, the largest entry allowed."""
    kinds = [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in (actual, expected)]
    if kinds[0] != kinds[1]:
        return [Difference(path, f"(shape, dtype, weak) {kinds[0]} instead of {kinds[1]}")]
    if jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    if not jax.numpy.issubdtype(expected.dtype, jax.numpy.inexact):
        same = np.array_equal(np.asarray(actual), np.asarray(expected))
        return [] if same else [Difference(path, f"{actual} instead of {expected}")]
    if floor is not None:
        noise = max(float(np.abs(np.asarray(x, np.float64)).max()) for x in (actual, expected))
        return [] if noise <= floor else [Difference(path, f"{noise:.1e}, not zero")]
    error = relative_error(actual, expected)
    if error <= bound:
        return []
    return [Difference(path, f"relative error {error:.2e}", error)]


def assert_equal(
    actual: Any,
    expected: Any,
    precision: str = "float32",
    zeros: Sequence[str] = (),
    tolerance: float | None = None,
) -> None:
    """Fails with every leaf that is not equal; arguments as for `differences`."""
    found = differences(actual, expected, precision, zeros, tolerance)
    assert not found, f"{len(found)} leaves differ:\n" + "\n".join(f"  {d}" for d in found)


# ---------------------------------------------------------------------------------------------
# Layouts: number of microbatches, and groups of unlike devices

GROUPS: dict[int, dict[str, int]] = {
    1: {"a": 1},
    2: {"a": 2, "b": 1},
    3: {"a": 4, "b": 3, "c": 1},
}
MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Layout:
    """How a case is run: M microbatches over the `num_groups` unequal groups of GROUPS."""

    num_microbatches: int
    num_groups: int

    def __str__(self) -> str:
        return f"M{self.num_microbatches}-groups{self.num_groups}"


ALL_LAYOUTS = tuple(Layout(m, g) for g in GROUPS for m in MICROBATCHES)


def chosen_layouts(name: str, every: bool, extra: int = 1) -> tuple[Layout, ...]:
    """All twelve layouts, or M = 4 over two groups and `extra` more drawn by the case's name."""
    if every:
        return ALL_LAYOUTS
    first = Layout(4, 2)
    others = [layout for layout in ALL_LAYOUTS if layout != first]
    return (first, *random.Random(name).sample(others, extra))


def plan_text(num_layers: int, num_groups: int, draw: random.Random, rows: int | None) -> str:
    """A plan as one line: the layers cut at random places, in order of groups, on random meshes.

    Args:
      num_layers: of the program; fewer layers than groups leave the last groups idle.
      num_groups: as in GROUPS.
      draw: the source of cuts and meshes.
      rows: examples of a microbatch, which the data axis must divide; None: no batch.
    """
    groups = list(GROUPS[num_groups].items())[: max(num_layers, 1)]
    cuts = sorted(draw.sample(range(1, num_layers), len(groups) - 1)) if num_layers > 1 else []
    edges = [0, *cuts, num_layers]
    stages = []
    for (group, devices), first, end in zip(groups, edges, edges[1:], strict=False):
        meshes = [
            (d, m)
            for d in range(1, devices + 1)
            for m in range(1, devices // d + 1)
            if d == 1 or (rows is not None and rows % d == 0)
        ]
        data, model = draw.choice(meshes)
        span = f"{first}" if end - first == 1 else f"{first}-{end - 1}"
        stages.append(f"{group}[{data * model}](data={data},model={model}): {span}")
    return " | ".join(stages)
