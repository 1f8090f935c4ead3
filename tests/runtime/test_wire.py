"""Arrays between driver and workers: as they were, from however many pieces."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetpass.errors import ExecutionError, PlanError
from hetpass.runtime.distributed.wire import Shards, decoded, encoded, joined, shards_of


def sent(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool"])
def test_arrays_arrive_as_they_were(dtype):
    array = jnp.arange(6).reshape(2, 3).astype(dtype)
    found = decoded(sent(encoded(array)))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, np.asarray(array))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_arrive_as_keys(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 2)
    for found in (decoded(sent(encoded(keys))), joined([sent(shards_of(keys))])):
        assert found.dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


def test_numbers_stay_numbers():
    assert decoded(sent(encoded(3.5))) == 3.5


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("a"), PartitionSpec(None, "a")])
def test_a_sharded_array_is_joined(spec):
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(value, NamedSharding(mesh, spec))
    shards = sent(shards_of(array))
    assert len(shards.parts) == (4 if len(spec) else 1)
    np.testing.assert_array_equal(joined([shards]), value)


def test_pieces_of_several_processes_are_joined():
    value = np.arange(8.0)
    pieces = [Shards((8,), ((((a, a + 4),), value[a : a + 4]),), None) for a in (0, 4)]
    np.testing.assert_array_equal(joined(pieces), value)


@pytest.mark.parametrize("sort", [ExecutionError, PlanError])
def test_errors_travel(sort):
    error = sort("HP-RUN-X", "what", where="there", details=("1",), ways_out=("go",))
    found = sent(error)
    assert type(found) is sort
    assert str(found) == str(error)
    assert (found.code, found.where, found.ways_out) == ("HP-RUN-X", "there", ("go",))
