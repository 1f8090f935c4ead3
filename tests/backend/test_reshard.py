"""Moves between meshes are bit equal, and leave the source alone."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hetpass._jax import ShapedArray, device_order, shard_arrays
from hetpass.backend.reshard import placement, plan_reshard
from hetpass.ir.kinds import Batched, Whole
from hetpass.ir.program import Slot

SHAPE = (12, 24)


def mesh_of(sizes, first):
    count = int(np.prod(sizes))
    grid = np.array(jax.devices()[first : first + count], dtype=object).reshape(sizes)
    return Mesh(grid, ("a", "b")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def shardings(first):
    """Every sharding of a matrix over meshes of 1, 2, 3, 4 and 2 x 2 devices."""
    found = []
    for sizes in [(1,), (2,), (3,), (4,), (2, 2)]:
        mesh = mesh_of(sizes, first)
        one = [(), ("a",), (None, "a")]
        two = [("b",), ("a", "b"), ("b", "a"), (("a", "b"),), (None, ("b", "a"))]
        for spec in one + (two if len(sizes) == 2 else []):
            found.append(NamedSharding(mesh, PartitionSpec(*spec)))
    return found


def move(array, target):
    return plan_reshard(array.sharding, target, array.shape, array.dtype.itemsize)(array)


@pytest.mark.parametrize("first", [4, 2, 0], ids=["disjoint", "overlapping", "same"])
def test_all_pairs_are_bit_equal(first):
    value = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    sources = [jax.device_put(value, sharding) for sharding in shardings(0)]
    for array, target in itertools.product(sources, shardings(first)):
        moved = move(array, target)
        assert moved.sharding.is_equivalent_to(target, 2)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])
    for array in sources:
        np.testing.assert_array_equal(array, value)


def test_vectors_scalars_and_empty_values():
    source, target = mesh_of((2,), 0), mesh_of((3,), 4)
    for shape, spec in [((6,), ("a",)), ((), ()), ((0, 3), (None, "a"))]:
        value = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
        first = jax.device_put(value, NamedSharding(source, PartitionSpec()))
        moved = move(first, NamedSharding(target, PartitionSpec(*spec)))
        np.testing.assert_array_equal(moved, value)


def test_equal_shardings_do_not_copy():
    sharding = NamedSharding(mesh_of((2,), 0), PartitionSpec("a"))
    array = jax.device_put(np.zeros(4), sharding)
    again = NamedSharding(mesh_of((2,), 0), PartitionSpec("a"))
    assert move(array, again) is array
    alone = jax.device_put(np.zeros(4), jax.devices()[0])
    on_mesh = NamedSharding(mesh_of((1,), 0), PartitionSpec())
    assert move(alone, on_mesh) is alone


def test_aliases_are_told():
    one = SingleDeviceSharding(jax.devices()[0])
    both = NamedSharding(mesh_of((2,), 0), PartitionSpec())
    assert plan_reshard(one, both, (4,), 4).aliases
    assert plan_reshard(one, both, (4,), 4).moved_bytes == 16
    halves = NamedSharding(mesh_of((2,), 0), PartitionSpec("a"))
    assert not plan_reshard(one, halves, (4,), 4).aliases
    other = NamedSharding(mesh_of((2,), 2), PartitionSpec())
    assert not plan_reshard(one, other, (4,), 4).aliases


def test_shards_come_in_the_order_of_devices():
    for sharding in shardings(2):
        array = jax.device_put(np.zeros(SHAPE, np.float32), sharding)
        found = tuple(next(iter(shard.devices())) for shard in shard_arrays(array))
        assert found == device_order(array.sharding)


def test_keys_move():
    keys = jax.random.split(jax.random.key(3), 6)
    target = NamedSharding(mesh_of((3,), 2), PartitionSpec("a"))
    moved = plan_reshard(keys.sharding, target, (6,), 0)(keys)
    assert moved.dtype == keys.dtype
    assert moved.sharding.is_equivalent_to(target, 1)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def stacked_slot(dim, outer, shape, dtype=np.float32):
    return Slot(0, 0, ShapedArray(shape, dtype), "step", Batched(dim, outer), True, "x")


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("dim", "outer"), [(0, 1), (1, 1), (1, 2)])
def test_stacked_inputs_are_cut_into_microbatches(on_device, dim, outer):
    value = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    part = (2, 16) if dim == 0 else (8, 4)
    target = NamedSharding(mesh_of((2,), 4), PartitionSpec())
    place = placement(value.shape, stacked_slot(dim, outer, part), 4, target)
    placed = place(jnp.asarray(value) if on_device else value)
    assert placed.sharding.is_equivalent_to(target, 3)
    if dim == 0:
        wanted = value.reshape(4, 2, 16)
    else:
        wanted = np.moveaxis(value.reshape(8, outer, 4, 4 // outer), 2, 0).reshape(4, 8, 4)
    np.testing.assert_array_equal(placed, wanted)


def test_stacked_keys():
    keys = jax.random.split(jax.random.key(0), 6)
    slot = stacked_slot(0, 1, (2,), keys.dtype)
    target = NamedSharding(mesh_of((2,), 4), PartitionSpec(None, "a"))
    placed = placement((6,), slot, 3, target)(keys)
    assert placed.shape == (3, 2)
    data = np.asarray(jax.random.key_data(keys)).reshape(3, 2, -1)
    np.testing.assert_array_equal(jax.random.key_data(placed), data)


def test_host_buffers_may_be_reused_at_once():
    slot = Slot(0, 0, ShapedArray((1024,), np.float32), "step", Whole(), False, "x")
    target = NamedSharding(mesh_of((1,), 0), PartitionSpec())
    place = placement((1024,), slot, 1, target)
    buffer = np.ones(1024, np.float32)
    placed = place(buffer)
    buffer[:] = 7
    np.testing.assert_array_equal(placed, np.ones(1024))


def test_arrays_in_place_are_used_as_they_are():
    slot = Slot(0, 0, ShapedArray((4,), np.float32), "step", Whole(), False, "x")
    target = NamedSharding(mesh_of((2,), 0), PartitionSpec("a"))
    array = jax.device_put(np.zeros(4, np.float32), target)
    assert placement((4,), slot, 1, target)(array) is array
