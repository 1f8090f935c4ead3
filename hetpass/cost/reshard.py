"""Resharding as the cheapest sequence of steps along single axes. No JAX.

From one layout of an array to another lead steps that the compiler does as they are written, each
with one constraint: a slice cuts a dimension further (free), an all-gather undoes the last cut of
a dimension, an all-to-all moves the last cut of one dimension to another, a permutation hands whole
pieces to other devices, and one reduction at the head turns summands into sums (over some of the
partial axes it is a path of its own: what stays partial has no constraint to be written in). The
cheapest sequence is a shortest path over the layouts, found for all pairs at once and remembered
per size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    permute_s,
    reduce_scatter_s,
)
from hetpass.cost.layouts import Signature, layouts, signature, ways
from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.ir.devices import Link
from hetpass.ir.operation_graph import Layout, Mesh, Value

Kind = Literal["slice", "all_gather", "all_to_all", "permute", "all_reduce", "reduce_scatter"]

_Collective = Callable[[float, int, Link | None], float]

_PER_STEP_S = 1e-13
"""Breaks ties between paths that cost the same: fewer steps."""


@dataclass(frozen=True)
class Step:
    """One constraint.

    Attributes:
      kind: of collective; "slice" is none.
      axes: along which devices talk.
      after: the layout that it leads to.
      result_bytes: that one device has afterwards, as compiled programs are counted.
      seconds: that it takes.
    """

    kind: Kind
    axes: tuple[str, ...]
    after: Layout
    result_bytes: float
    seconds: float


@dataclass(frozen=True)
class Path:
    """Steps in order, and the seconds of all; infinite where there is no way."""

    seconds: float
    steps: tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class ReshardTable:
    """All reshards of arrays of one size on one mesh.

    Attributes:
      index: of each layout in `seconds`.
      seconds: [from, to].
    """

    index: dict[Layout, int]
    seconds: NDArray[np.float64]
    _next: NDArray[np.int64]
    _steps: dict[tuple[int, int], Step]

    def path(self, source: Layout, target: Layout) -> Path:
        """The cheapest way from one layout to another."""
        at, end = self.index[source], self.index[target]
        if not np.isfinite(self.seconds[at, end]):
            return Path(float("inf"), ())
        steps = []
        while at != end:
            step = self._steps[at, int(self._next[at, end])]
            steps.append(step)
            at = self.index[step.after]
        return Path(sum(step.seconds for step in steps), tuple(steps))


def reshard_path(value: Value, source: Layout, target: Layout, mesh: LinkedMesh) -> Path:
    """The cheapest sequence of steps that takes a value from one layout to another.

    Raises:
      KeyError: one of them is no even layout of the value on this mesh.
    """
    return reshard_table(value.shape, value.item_bytes, mesh).path(source, target)


def arrival_s(value: Value, mesh: LinkedMesh) -> dict[Layout, float]:
    """Seconds to bring a value that comes from elsewhere into each layout.

    Every byte comes in once: the devices hold as small pieces as can be, and gather from there.
    """
    table = reshard_table(value.shape, value.item_bytes, mesh)
    parts = {layout: ways(layout, mesh.axes) for layout in table.index if not layout.partial}
    pieces = [table.index[layout] for layout, n in parts.items() if n == max(parts.values())]
    nearest = table.seconds[pieces].min(axis=0)
    return {layout: float(nearest[table.index[layout]]) for layout in parts}


def reshard_table(shape: tuple[int, ...], item_bytes: float, mesh: LinkedMesh) -> ReshardTable:
    """All pairs of layouts of an array; partial ones too, as where a path begins or passes."""
    size_bytes = item_bytes * float(np.prod(shape, dtype=np.float64))
    return _table(signature(shape, mesh.axes), size_bytes, mesh)


@lru_cache(maxsize=4096)
def _table(divisible: Signature, size_bytes: float, mesh: LinkedMesh) -> ReshardTable:
    index, moves = _moves(divisible, mesh.axes, mesh.reduce_scatter)
    count = len(index)
    cost = np.full((count, count), np.inf)
    following = np.tile(np.arange(count), (count, 1))
    np.fill_diagonal(cost, 0.0)
    steps: dict[tuple[int, int], Step] = {}
    for at, end, move in moves:
        steps[at, end] = _priced(move, size_bytes, mesh)
        if not move.after.partial:
            cost[at, end] = steps[at, end].seconds + _PER_STEP_S
    for via in range(count):  # Floyd 1962, Warshall 1962
        through = cost[:, via, None] + cost[None, via, :]
        better = through < cost
        cost = np.where(better, through, cost)
        following = np.where(better, following[:, via, None], following)
    for at, end, move in moves:
        if move.after.partial:
            cost[at, end] = steps[at, end].seconds + _PER_STEP_S
    cost.setflags(write=False)
    return ReshardTable(index, cost, following, steps)


@dataclass(frozen=True)
class _Move:
    """A step without a size: bytes on one device before and after, as parts of the array."""

    kind: Kind
    axes: tuple[str, ...]
    after: Layout
    before_parts: int
    after_parts: int


def _priced(move: _Move, size_bytes: float, mesh: LinkedMesh) -> Step:
    before, after = size_bytes / move.before_parts, size_bytes / move.after_parts
    if move.kind == "slice":
        return Step("slice", move.axes, move.after, after, 0.0)
    devices, link = mesh.ways(move.axes), mesh.link(move.axes)
    if move.kind == "all_gather":
        seconds = all_gather_s(after, devices, link)
    elif move.kind == "all_to_all":
        seconds = all_to_all_s(before * devices, devices, link)
    elif move.kind == "permute":
        seconds = permute_s(before, link)
    else:
        reduction = all_reduce_s if move.kind == "all_reduce" else reduce_scatter_s
        flat = reduction(before, devices, link)
        seconds = min(flat, _by_axis_s(before, move.axes, mesh, reduction))
    return Step(move.kind, move.axes, move.after, after, seconds)


def _by_axis_s(
    size_bytes: float, axes: tuple[str, ...], mesh: LinkedMesh, reduction: _Collective
) -> float:
    """A reduction over several axes, one after the other, so that slow ones see small pieces."""
    seconds, left = 0.0, size_bytes
    for axis in sorted(axes, key=lambda axis: -mesh.link((axis,)).bandwidth):
        seconds += reduction(left, mesh.ways((axis,)), mesh.link((axis,)))
        left /= mesh.ways((axis,))
    return seconds


@lru_cache(maxsize=1024)
def _moves(
    divisible: Signature, mesh: Mesh, reduce_scatter: bool
) -> tuple[dict[Layout, int], tuple[tuple[int, int, _Move], ...]]:
    """Every step between layouts of arrays that can be divided so."""
    shape = _smallest(divisible, mesh)
    known = layouts(shape, mesh, ordered=False, partial=True)
    index = {layout: k for k, layout in enumerate(known)}
    found = []
    for at, layout in enumerate(known):
        steps = _reductions(layout, mesh, reduce_scatter) if layout.partial else _cuts(layout, mesh)
        for kind, axes, after in steps:
            if after in index:
                move = _Move(kind, axes, after, ways(layout, mesh), ways(after, mesh))
                found.append((at, index[after], move))
    for one, other in _same_pieces(known, mesh):
        axes = _differing(known[one], known[other])
        parts = ways(known[one], mesh)
        found.append((one, other, _Move("permute", axes, known[other], parts, parts)))
    return index, tuple(found)


def _smallest(divisible: Signature, mesh: Mesh) -> tuple[int, ...]:
    """A shape that can be divided so: by which products of axes is all that layouts depend on."""
    sizes = [size for _, size in mesh]
    return tuple(
        math.lcm(
            *(
                math.prod(size for bit, size in enumerate(sizes) if mask >> bit & 1)
                for mask, fits in enumerate(masks)
                if fits
            )
        )
        for masks in divisible
    )


_Steps = Iterator[tuple[Kind, tuple[str, ...], Layout]]


def _cuts(layout: Layout, mesh: Mesh) -> _Steps:
    """Slices, gathers and all-to-alls of a layout without summands."""
    used = {axis for axes in layout.dims for axis in axes}
    for dim, axes in enumerate(layout.dims):
        for axis, _ in mesh:
            if axis not in used:
                yield "slice", (axis,), _with(layout, dim, (*axes, axis))
        if axes:
            without = _with(layout, dim, axes[:-1])
            yield "all_gather", axes[-1:], without
            for other, others in enumerate(layout.dims):
                if other != dim:
                    yield "all_to_all", axes[-1:], _with(without, other, (*others, axes[-1]))


def _reductions(layout: Layout, mesh: Mesh, reduce_scatter: bool) -> _Steps:
    """Sums over some or all partial axes at once, spread over a dimension or not."""
    names = [name for name, _ in mesh if name in layout.partial]
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            summed = Layout(layout.dims, layout.partial - set(axes))
            yield "all_reduce", axes, summed
            if reduce_scatter:
                for dim, cuts in enumerate(layout.dims):
                    yield "reduce_scatter", axes, _with(summed, dim, (*cuts, *axes))


def _same_pieces(known: Sequence[Layout], mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Pairs of layouts with pieces of the same shapes, on other devices."""
    alike: dict[tuple[int, ...], list[int]] = {}
    sizes = dict(mesh)
    for k, layout in enumerate(known):
        if not layout.partial:
            pieces = tuple(math.prod(sizes[axis] for axis in axes) for axes in layout.dims)
            alike.setdefault(pieces, []).append(k)
    for group in alike.values():
        yield from permutations(group, 2)


def _differing(one: Layout, other: Layout) -> tuple[str, ...]:
    """The axes on dimensions that are cut differently."""
    changed = {
        axis
        for axes, others in zip(one.dims, other.dims, strict=True)
        if axes != others
        for axis in (*axes, *others)
    }
    return tuple(sorted(changed))


def _with(layout: Layout, dim: int, axes: tuple[str, ...]) -> Layout:
    return Layout((*layout.dims[:dim], axes, *layout.dims[dim + 1 :]), layout.partial)
