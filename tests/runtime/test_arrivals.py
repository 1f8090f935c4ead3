"""What arrives is checked: nothing twice, nothing late, nothing that nobody waits for."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetpass._jax import ShapedArray
from hetpass.backend.pieces import mesh_boxes
from hetpass.backend.routes import Side, route
from hetpass.errors import ExecutionError
from hetpass.runtime.distributed.arrivals import Arrivals, incoming
from hetpass.runtime.transport.message import ONCE, Message

ROWS = mesh_boxes([("a",)], {"a": 2}, (4, 4))
VALUE = np.arange(16, dtype=np.float32).reshape(4, 4)


@pytest.fixture
def arrivals():
    """Waits at place 1 for transfer 5 of program 1: two rows per microbatch, of two."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "a"))
    columns = mesh_boxes([(), ("a",)], {"a": 2}, (4, 4))
    planned = route(Side(ROWS, (0, 0)), Side(columns, (1, 1)))
    found = Arrivals(1, lambda *_: None, lambda *_: None)
    coming = incoming(planned, ShapedArray((4, 4), np.dtype("float32")), sharding, True, 1)
    found.expect(1, {5: coming}, 2)
    return found, planned


def deliver(arrivals, planned, microbatch=0, call=1, only=None):
    for parcel in planned.parcels:
        if only is None or parcel.number in only:
            part = VALUE[tuple(slice(*span) for span in parcel.box)]
            arrivals.deliver(Message(1, call, 5, microbatch, parcel.number), part)


def test_parcels_make_the_array(arrivals):
    arrivals, planned = arrivals
    deliver(arrivals, planned, microbatch=1)
    deliver(arrivals, planned, microbatch=0)
    for microbatch in (0, 1):
        np.testing.assert_array_equal(arrivals.take((1, 1, 5, microbatch)), VALUE)


def test_taking_waits_for_the_last_parcel(arrivals):
    arrivals, planned = arrivals
    found = []
    thread = threading.Thread(target=lambda: found.append(arrivals.take((1, 1, 5, 0))))
    thread.start()
    deliver(arrivals, planned, only={0, 1, 2})
    assert thread.is_alive()
    deliver(arrivals, planned, only={3})
    thread.join(10)
    np.testing.assert_array_equal(found[0], VALUE)


@pytest.mark.parametrize(
    "message",
    [
        Message(2, 1, 5, 0, 0),
        Message(1, 1, 4, 0, 0),
        Message(1, 1, 5, 2, 0),
        Message(1, 1, 5, ONCE, 0),
        Message(1, 1, 5, 0, 9),
        Message(1, 0, 5, 0, 0),
    ],
    ids=["program", "transfer", "microbatch", "once", "parcel", "call"],
)
def test_what_nobody_waits_for_is_refused(arrivals, message):
    with pytest.raises(ExecutionError, match="HP-RUN-TRANSFER"):
        arrivals[0].form(message)


def test_nothing_comes_twice(arrivals):
    arrivals, planned = arrivals
    deliver(arrivals, planned, only={0})
    with pytest.raises(ExecutionError, match="it came twice"):
        deliver(arrivals, planned, only={0})


def test_nothing_comes_for_a_call_that_has_ended(arrivals):
    arrivals, planned = arrivals
    arrivals.ended(1, 3)
    with pytest.raises(ExecutionError, match="that call has ended"):
        deliver(arrivals, planned, call=3)
    deliver(arrivals, planned, call=4)


def test_a_lost_connection_wakes_who_waits(arrivals):
    arrivals, _ = arrivals
    found = []

    def take():
        try:
            arrivals.take((1, 1, 5, 0))
        except ExecutionError as error:
            found.append(error.code)

    thread = threading.Thread(target=take)
    thread.start()
    arrivals.fail(0, "reset")
    thread.join(10)
    assert found == ["HP-RUN-PEER"]
    with pytest.raises(ExecutionError, match="reset"):
        arrivals.take((1, 1, 5, 1))
