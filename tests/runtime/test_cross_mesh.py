"""Arrays between meshes of any two shapes, over TCP: equal bit for bit, each byte sent once."""

from __future__ import annotations

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetpass._jax import ShapedArray
from hetpass.backend.pieces import elements, mesh_boxes
from hetpass.backend.routes import Side, route
from hetpass.runtime.distributed.arrivals import Arrivals, incoming
from hetpass.runtime.distributed.part_runtime import outgoing, post_all
from hetpass.runtime.transport.message import ONCE, Message
from hetpass.runtime.transport.tcp import TcpTransport

MESHES = ((1,), (2,), (3,), (4,), (2, 2), (6,), (2, 3))
DTYPES = ("float32", "bfloat16", "int8", "bool", "uint32", "float16", "int4")


class Wire:
    """Two places joined by TCP, and the bytes that went over."""

    def __init__(self):
        self.bytes = 0
        self.ends = []
        self.arrivals = [Arrivals(place, lambda *_: None, lambda *_: None) for place in (0, 1)]
        for place in (0, 1):
            self.ends.append(TcpTransport(place, self.arrivals[place], b"token"))
        self.ends[0].connect({1: self.ends[1].address})
        self.calls = itertools.count(1)

    def move(self, array, names, source_axes, sharding, target_names, target_axes):
        shape, call = tuple(array.shape), next(self.calls)
        source = mesh_boxes(names, source_axes, shape)
        target = mesh_boxes(target_names, target_axes, shape)
        planned = route(Side(source, (0,) * len(source)), Side(target, (1,) * len(target)))
        coming = incoming(planned, ShapedArray(shape, array.dtype), sharding, False, 1)
        self.arrivals[1].expect(1, {0: coming}, 1)
        self.bytes = sum(elements(p.box) for p in planned.parcels)
        post_all(self.ends[0], outgoing(planned, 0), array, Message(1, call, 0, ONCE, 0))
        return self.arrivals[1].take((1, call, 0, ONCE))


@pytest.fixture(scope="module")
def wire():
    wire = Wire()
    yield wire
    for end in wire.ends:
        end.close()


def mesh_of(sizes):
    axes = dict(zip("ab", sizes, strict=False))
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple(axes)), axes


def specs(axes, ndim):
    """Every sharding: each axis on one dimension or none, in either order."""
    found = set()
    for places in itertools.product(range(-1, ndim), repeat=len(axes)):
        for order in itertools.permutations(range(len(axes))):
            cut = [[] for _ in range(ndim)]
            for k in order:
                if places[k] >= 0:
                    cut[places[k]].append(list(axes)[k])
            found.add(tuple(map(tuple, cut)))
    return sorted(found)


def values(shape, dtype):
    whole = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 7, shape)
    return jnp.asarray(whole).astype(dtype)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_pair_of_shardings(wire, sizes, ndim):
    source_mesh, source_axes = mesh_of(sizes)
    shape = ((24,), (12, 24))[ndim - 1]
    dtypes = itertools.cycle(DTYPES)
    for names in specs(source_axes, ndim):
        array = values(shape, next(dtypes))
        placed = jax.device_put(array, NamedSharding(source_mesh, PartitionSpec(*names)))
        for other in MESHES:
            target_mesh, target_axes = mesh_of(other)
            for target_names in specs(target_axes, ndim):
                sharding = NamedSharding(target_mesh, PartitionSpec(*target_names))
                found = wire.move(placed, names, source_axes, sharding, target_names, target_axes)
                assert found.sharding == sharding
                assert found.dtype == array.dtype
                np.testing.assert_array_equal(np.asarray(found), np.asarray(array))
                assert wire.bytes == array.size


def test_keys_move(wire):
    source_mesh, source_axes = mesh_of((2,))
    target_mesh, target_axes = mesh_of((3,))
    keys = jax.random.split(jax.random.key(0), 6)
    placed = jax.device_put(keys, NamedSharding(source_mesh, PartitionSpec("a")))
    sharding = NamedSharding(target_mesh, PartitionSpec("a"))
    found = wire.move(placed, [("a",)], source_axes, sharding, [("a",)], target_axes)
    assert found.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


@pytest.mark.parametrize("shape", [(), (0,), (4, 0)])
def test_scalars_and_empty_arrays_move(wire, shape):
    mesh, axes = mesh_of((2,))
    array = jax.device_put(jnp.ones(shape), NamedSharding(mesh, PartitionSpec()))
    sharding = NamedSharding(mesh_of((3,))[0], PartitionSpec())
    found = wire.move(array, [()] * len(shape), axes, sharding, [()] * len(shape), {"a": 3})
    assert found.shape == shape
    np.testing.assert_array_equal(np.asarray(found), np.asarray(array))


def test_a_parcel_for_several_places_is_passed_on():
    """One sender, three receivers in one group: everyone has the value, each part sent once."""
    shape, whole = (64, 64), ((0, 64), (0, 64))
    planned = route(Side((whole,), (0,)), Side((whole,) * 3, (1, 2, 3)))
    sharding = NamedSharding(mesh_of((1,))[0], PartitionSpec())
    ends, sent = {}, Counter()

    arrivals = {
        place: Arrivals(
            place,
            lambda to, message, value, me=place: ends[me].post(to, message, value, None),
            lambda *_: None,
        )
        for place in range(4)
    }
    for place in range(4):
        ends[place] = TcpTransport(place, arrivals[place], b"token")
    peers = {place: end.address for place, end in ends.items()}
    value = values(shape, "float32")
    for place in range(4):
        ends[place].connect(peers)
        if place:
            coming = incoming(planned, ShapedArray(shape, value.dtype), sharding, False, place)
            arrivals[place].expect(1, {0: coming}, 1)
    for post in outgoing(planned, 0):
        sent[post.to] += 1
    post_all(ends[0], outgoing(planned, 0), value, Message(1, 1, 0, ONCE, 0))
    for place in (1, 2, 3):
        found = arrivals[place].take((1, 1, 0, ONCE))
        np.testing.assert_array_equal(np.asarray(found), np.asarray(value))
    assert sent == {1: 1, 2: 1, 3: 1}
    for end in ends.values():
        end.close()
