"""Reshards between any two layouts, compiled, and held against the priced path."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from hetpass.backend.compiled_collectives import compiled_collectives
from hetpass.backend.laid_out import NOMINAL_LINK, LaidOut, MeshLayouts
from hetpass.backend.priced_collectives import CollectiveDifference, collective_differences
from hetpass.cost.layouts import layouts
from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.ir.operation_graph import Layout
from hetpass.ir.operation_graph import Mesh as Axes

Pair = tuple[Layout, Layout]


def all_pairs(shape: tuple[int, ...], axes: Axes) -> list[Pair]:
    """From every layout, partial ones too, to every other one without summands.

    Axes on one dimension stand in the order of the mesh, as assignments have them.
    """
    sources = layouts(shape, axes, partial=True)
    targets = layouts(shape, axes)
    return [(a, b) for a, b in itertools.product(sources, targets) if a != b]


@dataclass(frozen=True)
class Resharded:
    """A program that does some reshards at once.

    Attributes:
      call: from their stored arrays to the results.
      sources: per reshard, a value that lies as it should at first.
    """

    call: Callable[..., Any]
    sources: tuple[jax.Array, ...]
    whole: tuple[np.ndarray, ...]
    differences: tuple[CollectiveDifference, ...]


def resharded(shape: tuple[int, ...], axes: Axes, pairs: Sequence[Pair]) -> Resharded:
    """Compiles reshards of values of their own, so that no two share a collective."""
    names, sizes = zip(*axes, strict=True)
    count = int(np.prod(sizes))
    grid = np.array(jax.devices()[:count], dtype=object).reshape(sizes)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    linked = MeshLayouts(LinkedMesh(axes, (NOMINAL_LINK,) * len(axes)))

    def run(*arrays: Any) -> tuple[Any, ...]:
        return tuple(
            linked.reshard(LaidOut(x, a), b, f"{a} to {b}").array
            for x, (a, b) in zip(arrays, pairs, strict=True)
        )

    given, whole = [], []
    for k, (source, _) in enumerate(pairs):
        parts = tuple(size for name, size in axes if name in source.partial)
        value = np.random.default_rng(k).normal(size=(*parts, *shape)).astype(np.float32)
        whole.append(value.reshape(-1, *shape).sum(0))
        given.append(jax.device_put(value, NamedSharding(mesh, linked.spec(source))))
    ends = tuple(NamedSharding(mesh, linked.spec(target)) for _, target in pairs)
    starts = tuple(x.sharding for x in given)
    call = jax.jit(run, in_shardings=starts, out_shardings=ends).lower(*given).compile()
    made = compiled_collectives(call.as_text() or "", axes)
    found = collective_differences(linked.emitted, made, axes)
    return Resharded(call, tuple(given), tuple(whole), found)
