"""The ways to run one operation on a mesh: axes for its factors, and its summands. No JAX.

Each mesh axis cuts one factor of the operation's rule, or none (then its devices repeat the work),
or comes as summands where the operation is linear. Results that are sums over an axis are
all-reduced, reduce-scattered onto a dimension, or stay partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from math import prod

from hetpass.cost.layouts import fits
from hetpass.cost.operation_choices import natural_layouts, wanted_layouts
from hetpass.ir.operation_graph import (
    Layout,
    Mesh,
    Operation,
    OperationChoice,
    ShardingRule,
    Value,
)


@dataclass(frozen=True)
class Strategy:
    """A choice, and what follows from it.

    Attributes:
      choice: as an Assignment has it.
      operands: what every operand must look like.
      natural: how every result comes out; `choice.results` is what is made of it.
    """

    choice: OperationChoice
    operands: tuple[Layout, ...]
    natural: tuple[Layout, ...]


@dataclass(frozen=True)
class Liberties:
    """What an operation may do with summands.

    Attributes:
      take: its operands may come partial.
      leave: its results may stay partial.
      scatter: its results may be reduce-scattered.
    """

    take: bool
    leave: bool
    scatter: bool


def strategies(
    operation: Operation, values: Sequence[Value], mesh: Mesh, liberties: Liberties
) -> tuple[Strategy, ...]:
    """All strategies, the one that repeats all work on every device first."""
    alike = Operation(  # what the strategies depend on, so that they are found once
        operation.name,
        operation.phase,
        tuple(range(len(operation.operands))),
        tuple(range(len(operation.operands), len(operation.operands) + len(operation.results))),
        operation.rule,
        linear=operation.linear,
        sums=operation.sums,
    )
    shapes = tuple(values[v].shape for v in (*operation.operands, *operation.results))
    return _strategies(alike, shapes, mesh, liberties)


@lru_cache(maxsize=8192)
def _strategies(
    operation: Operation, shapes: tuple[tuple[int, ...], ...], mesh: Mesh, liberties: Liberties
) -> tuple[Strategy, ...]:
    values = [Value(shape, 1) for shape in shapes]
    found = []
    for factors, partial in _cuts(operation, mesh, liberties):
        choice = OperationChoice(factors, (), partial)
        operands = wanted_layouts(operation, values, choice)
        natural = natural_layouts(operation, values, choice)
        numbers = (*operation.operands, *operation.results)
        if all(
            fits(layout, shapes[v], mesh)
            for v, layout in zip(numbers, (*operands, *natural), strict=True)
        ):
            for results in _pinned(natural, operation, mesh, liberties):
                if all(
                    fits(r, shapes[v], mesh)
                    for v, r in zip(operation.results, results, strict=True)
                ):
                    found.append(
                        Strategy(OperationChoice(factors, results, partial), operands, natural)
                    )
    return tuple(found)


def _cuts(
    operation: Operation, mesh: Mesh, liberties: Liberties
) -> Iterator[tuple[tuple[tuple[str, ...], ...], frozenset[str]]]:
    """Axes per factor, and the axes along which operands are summands."""
    rule = operation.rule
    if rule is None:
        yield (), frozenset()
        return
    nowhere, summands = -1, len(rule.sizes)
    free = [nowhere, *free_factors(rule)]
    if liberties.take and operation.linear:
        free.append(summands)
    for places in product(free, repeat=len(mesh)):
        factors = tuple(
            tuple(name for (name, _), place in zip(mesh, places, strict=True) if place == f)
            for f in range(len(rule.sizes))
        )
        partial = frozenset(
            name for (name, _), place in zip(mesh, places, strict=True) if place == summands
        )
        if divides(rule, factors, mesh):
            yield factors, partial


def free_factors(rule: ShardingRule) -> list[int]:
    """Factors that may be cut.

    Not those that need other devices' data, nor those that a result lacks without summing them.
    """
    return [
        f
        for f, size in enumerate(rule.sizes)
        if size > 1
        and f not in rule.whole
        and f not in rule.permutation
        and (f in rule.reduction or all(any(f in dim for dim in dims) for dims in rule.results))
    ]


def divides(rule: ShardingRule, factors: tuple[tuple[str, ...], ...], mesh: Mesh) -> bool:
    """Whether axes cut every factor evenly, and a minor one only where the major one is used up."""
    sizes = dict(mesh)
    cut = [prod(sizes[axis] for axis in axes) for axes in factors]
    if any(size % n for size, n in zip(rule.sizes, cut, strict=True)):
        return False
    return all(
        cut[minor] == 1 or cut[major] == rule.sizes[major]
        for dims in (*rule.operands, *rule.results)
        for dim in dims
        for k, minor in enumerate(dim)
        for major in dim[:k]
    )


def _pinned(
    natural: tuple[Layout, ...], operation: Operation, mesh: Mesh, liberties: Liberties
) -> Iterator[tuple[Layout, ...]]:
    """What the results may be made into."""
    partial = [name for name, _ in mesh if any(name in layout.partial for layout in natural)]
    additive = operation.sums or operation.linear
    for count in range(len(partial) + 1):
        for reduced in combinations(partial, count):
            kept = set(partial) - set(reduced)
            if kept and not (liberties.leave and additive):
                continue
            summed = tuple(Layout(layout.dims, layout.partial & kept) for layout in natural)
            yield summed
            if reduced and additive and liberties.scatter and len(natural) == 1:
                yield from (((scattered,)) for scattered in _scattered(summed[0], reduced))


def _scattered(layout: Layout, axes: tuple[str, ...]) -> Iterator[Layout]:
    for dim, cuts in enumerate(layout.dims):
        dims = (*layout.dims[:dim], (*cuts, *axes), *layout.dims[dim + 1 :])
        yield Layout(dims, layout.partial)
