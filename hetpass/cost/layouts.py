"""The layouts that an array can have on a mesh. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations, product
from math import prod

from hetpass.ir.operation_graph import Layout, Mesh

Signature = tuple[tuple[bool, ...], ...]


def ways(layout: Layout, mesh: Mesh) -> int:
    """Into how many pieces a layout cuts an array; partial axes cut nothing."""
    sizes = dict(mesh)
    return prod(sizes[axis] for axes in layout.dims for axis in axes)


def whole(rank: int) -> Layout:
    """Every device has all of it."""
    return Layout(((),) * rank)


def fits(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether a layout cuts an array of this shape evenly, using each axis once at most."""
    sizes = dict(mesh)
    used = [axis for axes in layout.dims for axis in axes] + list(layout.partial)
    return (
        len(layout.dims) == len(shape)
        and len(set(used)) == len(used)
        and all(axis in sizes for axis in used)
        and all(
            size % prod(sizes[axis] for axis in axes) == 0
            for size, axes in zip(shape, layout.dims, strict=True)
        )
    )


def layouts(
    shape: Sequence[int], mesh: Mesh, *, ordered: bool = True, partial: bool = False
) -> tuple[Layout, ...]:
    """All even layouts of an array, the whole one first.

    Args:
      ordered: several axes on one dimension only in the order of the mesh; else in every order.
      partial: axes may be partial, too.
    """
    return _layouts(signature(shape, mesh), mesh, ordered, partial)


def signature(shape: Sequence[int], mesh: Mesh) -> Signature:
    """By which products of axes each dimension can be divided: what decides on its layouts."""
    divisors = _divisors(mesh)
    return tuple(tuple(d == 1 or (size > 0 and size % d == 0) for d in divisors) for size in shape)


@lru_cache(maxsize=4096)
def _divisors(mesh: Mesh) -> tuple[int, ...]:
    """The products that axes can make, in a fixed order (by bits of the axes)."""
    return tuple(
        prod(size for bit, (_, size) in enumerate(mesh) if mask >> bit & 1)
        for mask in range(1 << len(mesh))
    )


@lru_cache(maxsize=4096)
def _layouts(divisible: Signature, mesh: Mesh, ordered: bool, partial: bool) -> tuple[Layout, ...]:
    rank = len(divisible)
    nowhere, summed = -1, rank
    choices = [nowhere, *range(rank), *([summed] if partial else [])]
    found = []
    for places in product(choices, repeat=len(mesh)):
        cuts = [[k for k, place in enumerate(places) if place == dim] for dim in range(rank)]
        if all(divisible[dim][sum(1 << k for k in cut)] for dim, cut in enumerate(cuts)):
            sums = frozenset(mesh[k][0] for k, place in enumerate(places) if place == summed)
            for orders in product(*(permutations(cut) if not ordered else [cut] for cut in cuts)):
                dims = tuple(tuple(mesh[k][0] for k in order) for order in orders)
                found.append(Layout(dims, sums))
    return tuple(found)
