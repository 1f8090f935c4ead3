"""Moving a value from one mesh and sharding to another, without blocking the driver.

`jax.device_put` of a whole array is asynchronous only if every target shard equals a source shard;
otherwise it waits for the producer and goes through host memory. Here the pieces are planned once
(`pieces.py`) and moved one by one: sliced on their device, put on the target device, joined there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from hetpass._jax import device_order, shard_arrays
from hetpass.backend.layout import batch_layout, split_batch
from hetpass.backend.pieces import Assembly, Box, assemblies, elements, relative
from hetpass.ir.program import Slot


def boxes(sharding: Sharding, shape: Sequence[int]) -> dict[int, Box]:
    """By device id, in the order of the sharding's devices."""
    indices = sharding.devices_indices_map(tuple(shape))
    result = {}
    for device in device_order(sharding):
        spans = (s.indices(n) for s, n in zip(indices[device], shape, strict=True))
        result[device.id] = tuple((start, stop) for start, stop, _ in spans)
    return result


@dataclass(frozen=True)
class Cut:
    """Part of a source shard, to be put on another device (or kept, on its own).

    Attributes:
      shard: position among the source's shards.
      slice: from a shard to the part; None for the whole shard.
      device: where the part goes; None if it is already there.
    """

    shard: int
    slice: Callable[[jax.Array], jax.Array] | None
    device: jax.Device | None


@dataclass(frozen=True)
class Shard:
    """One target shard: some cuts joined, or a copy of another target shard.

    Attributes:
      cuts: positions in `Reshard.cuts`.
      join: from the cuts' values to the shard; None for a single cut.
      copy_of: position among the target's shards.
      device: the target device.
    """

    cuts: tuple[int, ...]
    join: Callable[..., jax.Array] | None
    copy_of: int | None
    device: jax.Device


@dataclass(frozen=True)
class Reshard:
    """A planned move of arrays of one shape from `source` to `target`.

    Attributes:
      aliases: some target shard is the source's own buffer; deleting or donating either array
        destroys the other.
      moved_bytes: that change device, copies within the target included.
    """

    shape: tuple[int, ...]
    source: Sharding
    target: Sharding
    cuts: tuple[Cut, ...]
    shards: tuple[Shard, ...]
    aliases: bool
    moved_bytes: int

    def __call__(self, array: jax.Array) -> jax.Array:
        """The array on the target, asynchronously. The argument is not changed."""
        if not self.shards:  # equal shardings
            return array
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return _move_keys(array, self.target)
        held = shard_arrays(array)
        parts = [
            held[cut.shard] if cut.slice is None else cut.slice(held[cut.shard])
            for cut in self.cuts
        ]
        away = [i for i, cut in enumerate(self.cuts) if cut.device is not None]
        if away:
            put = jax.device_put([parts[i] for i in away], [self.cuts[i].device for i in away])
            for i, value in zip(away, put, strict=True):
                parts[i] = value
        made: list[Any] = [
            None
            if shard.copy_of is not None
            else parts[shard.cuts[0]]
            if shard.join is None
            else shard.join(*(parts[i] for i in shard.cuts))
            for shard in self.shards
        ]
        copied = [i for i, shard in enumerate(self.shards) if shard.copy_of is not None]
        if copied:
            originals = [made[self.shards[i].copy_of] for i in copied]  # type: ignore[index]
            put = jax.device_put(originals, [self.shards[i].device for i in copied])
            for i, value in zip(copied, put, strict=True):
                made[i] = value
        return jax.make_array_from_single_device_arrays(self.shape, self.target, made)


def _move_keys(array: jax.Array, target: Sharding) -> jax.Array:
    """Typed PRNG keys move as the integers below them, which have more dimensions."""
    data = jax.random.key_data(array)
    more = (None,) * (data.ndim - array.ndim)
    assert isinstance(target, NamedSharding)
    spec = (*target.spec, *(None,) * (array.ndim - len(target.spec)), *more)
    under = NamedSharding(target.mesh, PartitionSpec(*spec))
    moved = plan_reshard(data.sharding, under, data.shape, data.dtype.itemsize)(data)
    return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(array))


@lru_cache(maxsize=4096)
def plan_reshard(
    source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int
) -> Reshard:
    """The pieces of a move, planned. `itemsize` in bytes per element.

    Remembered per argument: the plan of a state's first placement is used by every later call.
    """
    if source == target or source.is_equivalent_to(target, len(shape)):
        return Reshard(shape, source, target, (), (), True, 0)
    held, wanted = boxes(source, shape), boxes(target, shape)
    order = {device: position for position, device in enumerate(held)}
    devices = {device.id: device for device in device_order(target)}
    steps = {step.device: step for step in assemblies(held, wanted)}
    places = {device: position for position, device in enumerate(wanted)}
    cuts: list[Cut] = []
    shards = []
    for device in wanted:
        step = steps[device]
        first = len(cuts)
        for piece in step.pieces:
            box = relative(piece.box, held[piece.source])
            whole = piece.box == held[piece.source]
            away = None if piece.source == device else devices[device]
            cuts.append(Cut(order[piece.source], None if whole else _slicer(box), away))
        numbers = tuple(range(first, len(cuts)))
        join = _joiner(step) if len(numbers) > 1 else None
        copy_of = None if step.copy_of is None else places[step.copy_of]
        shards.append(Shard(numbers, join, copy_of, devices[device]))
    aliases = any(s.join is None and s.cuts and _untouched(cuts[s.cuts[0]]) for s in shards)
    moved = sum(elements(p.box) for s in steps.values() for p in s.pieces if p.source != s.device)
    moved += sum(elements(s.box) for s in steps.values() if s.copy_of is not None)
    return Reshard(shape, source, target, tuple(cuts), tuple(shards), aliases, moved * itemsize)


def _untouched(cut: Cut) -> bool:
    return cut.slice is None and cut.device is None


@lru_cache(maxsize=4096)
def _slicer(box: Box) -> Callable[[jax.Array], jax.Array]:
    starts, stops = [a for a, _ in box], [b for _, b in box]
    return jax.jit(partial(jax.lax.slice, start_indices=starts, limit_indices=stops))


def _joiner(step: Assembly) -> Callable[..., jax.Array]:
    return _grid_joiner(tuple(piece.box for piece in step.pieces))


@lru_cache(maxsize=4096)
def _grid_joiner(grid: tuple[Box, ...]) -> Callable[..., jax.Array]:
    return jax.jit(lambda *parts: join_grid(grid, parts))


def join_grid(grid: Sequence[Box], parts: Sequence[Any]) -> Any:
    """The parts of a row-major grid of boxes, concatenated dimension by dimension."""

    def join(numbers: list[int], dim: int) -> Any:
        if len(numbers) == 1:
            return parts[numbers[0]]
        rows: dict[tuple[int, int], list[int]] = {}
        for number in numbers:
            rows.setdefault(grid[number][dim], []).append(number)
        joined = [join(row, dim + 1) for row in rows.values()]
        return joined[0] if len(joined) == 1 else jax.lax.concatenate(joined, dim)

    return join(list(range(len(grid))), 0)


# ---------------------------------------------------------------------------------------------
# Inputs of the step


@dataclass(frozen=True)
class Placement:
    """How an input becomes a slot's stored array.

    Attributes:
      shape, dtype: of the input.
      cut: (dim, outer, M) of a stacked slot, None otherwise.
      target: the slot's sharding.
    """

    shape: tuple[int, ...]
    dtype: Any
    cut: tuple[int, int, int] | None
    target: NamedSharding

    def __call__(self, value: Any) -> jax.Array:
        """The stored array. An array that is already in place is returned itself.

        A host array is copied first: `device_put` may alias it, and callers reuse their buffers
        while the step still runs.
        """
        if not isinstance(value, jax.Array):
            host = np.array(value, dtype=self.dtype)
            if self.cut is not None:
                host = np.ascontiguousarray(split_batch(host, *self.cut))
            return put(host, self.target)
        if not self.target.is_fully_addressable:
            return self._over_processes(value)
        value = _row_by_row(_on_auto_axes(value))
        if self.cut is not None:
            value = _splitter(self.cut)(value)
        elif value.sharding is self.target or value.sharding == self.target:
            return value
        itemsize = getattr(value.dtype, "itemsize", 0)
        return plan_reshard(value.sharding, self.target, value.shape, itemsize)(value)

    def _over_processes(self, value: jax.Array) -> jax.Array:
        """Onto a mesh of several processes: from each one's copy, or from an array on the mesh."""
        if value.sharding == self.target and self.cut is None:
            return value
        if not value.is_fully_addressable:
            return jax.jit(_identity, out_shardings=self.target)(value)
        if self.cut is not None:
            value = _splitter(self.cut)(value)
        if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return put(np.asarray(value), self.target)
        data = np.asarray(jax.random.key_data(value))
        more = (None,) * (data.ndim - len(self.target.spec))
        under = NamedSharding(self.target.mesh, PartitionSpec(*self.target.spec, *more))
        return jax.random.wrap_key_data(put(data, under), impl=jax.random.key_impl(value))


def _on_auto_axes(value: jax.Array) -> jax.Array:
    """With every axis of its mesh Auto; mostly the array itself.

    On Explicit axes sharding is part of a value's type, and every operation would have to say it.
    """
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return value
    mesh = sharding.mesh
    if all(sort == AxisType.Auto for sort in mesh.axis_types):
        return value
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return jax.device_put(value, NamedSharding(auto, sharding.spec))


def _row_by_row(value: jax.Array) -> jax.Array:
    """With its last dimension innermost, as executables read arrays; mostly the array itself.

    Callers may hold arrays that are laid out otherwise: results of a `jit` with layouts of its own.
    """
    rows = tuple(range(value.ndim))
    layout = getattr(getattr(value, "format", None), "layout", None)  # keys have none
    if layout is None or layout.major_to_minor == rows:
        return value
    return jax.device_put(value, Format(Layout(rows), value.sharding))


def _identity(value: jax.Array) -> jax.Array:
    return value


def put(host: np.ndarray, target: NamedSharding) -> jax.Array:
    """The array on the target's devices; every process of a mesh gives the same array.

    (`device_put` onto other processes' devices would first compare the arrays of all processes.)
    """
    if target.is_fully_addressable:
        return jax.device_put(host, target)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


@lru_cache(maxsize=256)
def _splitter(cut: tuple[int, int, int]) -> Callable[[jax.Array], jax.Array]:
    dim, outer, parts = cut
    return jax.jit(lambda value: split_batch(value, dim, outer, parts))


def placement(
    shape: Sequence[int], slot: Slot, num_microbatches: int, target: NamedSharding
) -> Placement:
    """How an input of that shape is placed into the slot."""
    cut = None
    if slot.stacked:
        layout = batch_layout(slot.kind)
        if layout is None:
            raise ValueError(f"slot {slot.name!r} is stacked but has no batch dimension")
        cut = (*layout, num_microbatches)
    return Placement(tuple(shape), slot.aval.dtype, cut, target)
