"""Arrays in the layouts of an assignment, and the constraints that take them there.

A value that is partial along mesh axes has one more leading dimension per such axis, in the order
of the mesh, cut along it: one summand per device. So partial values are ordinary arrays, and the
compiler reduces exactly where the sum over a leading dimension is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.cost.reshard import Step, reshard_table
from hetpass.ir.devices import Link
from hetpass.ir.operation_graph import Assignment, Layout

NOMINAL_LINK = Link(1e-6, 1e11)
"""For assignments that say nothing of links: all axes alike."""


@dataclass(frozen=True)
class LaidOut:
    """An array, and how it lies.

    Attributes:
      array: with a leading dimension per partial axis.
      layout: None: as the compiler likes; then nothing is partial.
    """

    array: Any
    layout: Layout | None = None


@dataclass(frozen=True)
class Emitted:
    """A collective that the program asks for.

    Attributes:
      kind, axes, result_bytes: as of a reshard's `Step`.
      count: how often it runs in one run of the program.
      reason: the value or operation that it is for.
    """

    kind: str
    axes: tuple[str, ...]
    result_bytes: float
    count: int
    reason: str


@dataclass
class MeshLayouts:
    """Constraints on one mesh; keeps a list of the collectives that they ask for.

    Attributes:
      linked: the mesh, and the links that reshards are routed by.
      times: how often what is being traced runs: more than once inside loops.
    """

    linked: LinkedMesh
    emitted: list[Emitted] = field(default_factory=list)
    times: int = 1

    @classmethod
    def of(cls, assignment: Assignment) -> MeshLayouts:
        links = tuple(Link(*link) for link in assignment.links)
        links = links or (NOMINAL_LINK,) * len(assignment.mesh)
        return cls(LinkedMesh(assignment.mesh, links, assignment.reduce_scatter))

    @property
    def mesh(self) -> AbstractMesh:
        names, sizes = zip(*self.linked.axes, strict=True)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The axes in the order of the mesh."""
        chosen = set(axes)
        return tuple(name for name, _ in self.linked.axes if name in chosen)

    def size(self, axis: str) -> int:
        return dict(self.linked.axes)[axis]

    def spec(self, layout: Layout) -> PartitionSpec:
        """Of the array of a value that lies so."""
        dims = (axes[0] if len(axes) == 1 else axes or None for axes in layout.dims)
        return PartitionSpec(*self.ordered(layout.partial), *dims)

    def constrain(self, array: Any, layout: Layout) -> Any:
        """The array, pinned."""
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return array  # PRNG keys are few bytes, and whole
        sharding = NamedSharding(self.mesh, self.spec(layout))
        return jax.lax.with_sharding_constraint(array, sharding)

    def steps(
        self, shape: tuple[int, ...], item_bytes: float, ends: tuple[Layout, Layout]
    ) -> tuple[Step, ...]:
        """From the one layout of a value to the other, the cheapest way.

        Raises:
          ValueError: there is none.
        """
        if ends[0] == ends[1]:
            return ()
        found = reshard_table(shape, item_bytes, self.linked).path(*ends)
        if not found.steps:
            raise ValueError(f"no way from {ends[0]} to {ends[1]} for {shape}")
        return found.steps

    def way(self, value: LaidOut, target: Layout) -> tuple[Layout, ...]:
        """The layouts on the cheapest way to one, that one last."""
        if value.layout is None or jnp.issubdtype(value.array.dtype, jax.dtypes.extended):
            return (target,)
        shape = tuple(value.array.shape[len(value.layout.partial) :])
        steps = self.steps(shape, float(value.array.dtype.itemsize), (value.layout, target))
        return tuple(step.after for step in steps)

    def reshard(self, value: LaidOut, target: Layout, reason: str) -> LaidOut:
        """One constraint per step of the cheapest way."""
        if value.layout is None:
            return LaidOut(self.constrain(value.array, target), target)
        if jnp.issubdtype(value.array.dtype, jax.dtypes.extended):
            return value
        shape = tuple(value.array.shape[len(value.layout.partial) :])
        item_bytes = float(value.array.dtype.itemsize)
        for step in self.steps(shape, item_bytes, (value.layout, target)):
            value = self.follow(value, step, reason)
        return value

    def follow(
        self, value: LaidOut, step: Step, reason: str, summed: frozenset[str] = frozenset()
    ) -> LaidOut:
        """One step.

        Args:
          summed: partial axes without a leading dimension: the operation that makes the value
            contracts over them, and the compiler sums as soon as the value is pinned.
        """
        assert value.layout is not None
        self._emit(step, reason)
        array, layout = value.array, value.layout
        if step.kind in ("all_reduce", "reduce_scatter"):
            array = self._sum(array, layout, set(step.axes) - summed, summed)
            layout = Layout(layout.dims, layout.partial - set(step.axes))
            array = self.constrain(array, Layout(layout.dims, layout.partial - summed))
        if step.after != layout:
            array = self.constrain(array, Layout(step.after.dims, step.after.partial - summed))
        return LaidOut(array, step.after)

    def _sum(self, array: Any, layout: Layout, axes: set[str], summed: frozenset[str]) -> Any:
        """Adds up the summands along axes, as one dimension: the partitioner makes a collective of
        its own for every dimension that is reduced."""
        leading = self.ordered(layout.partial - summed)
        dims = [k for k, axis in enumerate(leading) if axis in axes]
        if not dims:
            return array
        if len(dims) > 1:
            array = jnp.moveaxis(array, dims, range(len(dims)))
            array = array.reshape((-1, *array.shape[len(dims) :]))
            dims = [0]
        return array.sum(dims[0], dtype=array.dtype)

    def _emit(self, step: Step, reason: str) -> None:
        if step.kind != "slice":
            self.emitted.append(
                Emitted(step.kind, step.axes, step.result_bytes, self.times, reason)
            )

    def split(
        self, value: LaidOut, dims: Sequence[Sequence[tuple[int, tuple[str, ...]]]], axes: set[str]
    ) -> LaidOut:
        """The parts of a value along some axes, as leading dimensions, in the order of the mesh.

        Args:
          dims: per dimension its factors, major to minor: (size, the axes that cut it).
          axes: those whose parts are wanted; other axes go on cutting their dimension.
        """
        assert value.layout is not None
        shape: list[int] = []
        places: dict[str, int] = {}
        groups: list[list[int]] = []
        for factors in dims:
            group = []
            for size, cuts in factors:
                for axis in cuts:
                    size //= self.size(axis)
                    if axis in axes:
                        places[axis] = len(shape)
                    else:
                        group.append(len(shape))
                    shape.append(self.size(axis))
                group.append(len(shape))
                shape.append(size)
            groups.append(group)
        if not places:
            return value
        front = [places[axis] for axis in self.ordered(places)]
        order = [*front, *(k for group in groups for k in group)]
        array = value.array.reshape(shape).transpose(order)
        sizes = [_product(shape[k] for k in group) for group in groups]
        array = array.reshape([*(shape[k] for k in front), *sizes])
        kept = tuple(tuple(a for a in cut if a not in places) for cut in value.layout.dims)
        layout = Layout(kept, frozenset(places))
        return LaidOut(self.constrain(array, layout), layout)


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def over_parts(
    function: Callable[..., Sequence[Any]], parts: Sequence[Sequence[str]], axes: Sequence[str]
) -> Callable[..., Sequence[Any]]:
    """The function for every part along the axes; results have a leading dimension per axis.

    Args:
      parts: per operand, the axes of its leading dimensions, in order.
      axes: all of them, in the order of the mesh.
    """
    for axis in reversed(axes):
        in_axes = tuple(0 if axis in own else None for own in parts)
        function = jax.vmap(function, in_axes=in_axes)
    return function
