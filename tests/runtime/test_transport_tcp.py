"""Parcels over TCP arrive whole, are checked, and come from whoever knows the token."""

from __future__ import annotations

import queue
import socket
import time

import jax
import numpy as np
import pytest

from hetpass.errors import ExecutionError
from hetpass.runtime.transport.message import ONCE, Message, Slowness
from hetpass.runtime.transport.tcp import TcpTransport

FORMS = {0: ((3, 5), np.dtype("float32")), 1: ((), np.dtype("int8")), 2: ((0, 4), np.dtype("bool"))}


class Receiver:
    """Expects parcel n to look like FORMS[n]."""

    def __init__(self):
        self.found = queue.Queue()
        self.failed = queue.Queue()

    def form(self, message):
        if message.parcel not in FORMS:
            raise ExecutionError("HP-RUN-TRANSFER", "nobody waits for it")
        return FORMS[message.parcel]

    def deliver(self, message, value):
        self.found.put((message, value))

    def fail(self, place, reason):
        self.failed.put((place, reason))


@pytest.fixture
def pair():
    receivers = [Receiver(), Receiver()]
    ends = [TcpTransport(place, receivers[place], b"token") for place in (0, 1)]
    peers = dict(enumerate(end.address for end in ends))
    for end in ends:
        end.connect(peers)
    yield ends, receivers
    for end in ends:
        end.close()


def message(parcel, microbatch=ONCE):
    return Message(1, 2, 3, microbatch, parcel, 0.0, 0)


@pytest.mark.parametrize("parcel", FORMS)
@pytest.mark.parametrize("to", [0, 1])
def test_arrays_arrive(pair, parcel, to):
    ends, receivers = pair
    shape, dtype = FORMS[parcel]
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    ends[0].post(to, message(parcel, 7), jax.numpy.asarray(value), None)
    found, array = receivers[to].found.get(timeout=10)
    assert (found.program, found.call, found.transfer, found.microbatch) == (1, 2, 3, 7)
    assert found.sent_s > 0
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, value)


def test_a_part_arrives(pair):
    ends, receivers = pair
    value = np.arange(60, dtype=np.float32).reshape(6, 10)
    ends[0].post(1, message(0), value, ((1, 4), (2, 7)))
    _, array = receivers[1].found.get(timeout=10)
    np.testing.assert_array_equal(array, value[1:4, 2:7])


def test_order_is_kept(pair):
    ends, receivers = pair
    for number in range(50):
        ends[0].post(1, message(1, number), np.int8(number), None)
    found = [receivers[1].found.get(timeout=10) for _ in range(50)]
    assert [(m.microbatch, int(v)) for m, v in found] == [(n, n) for n in range(50)]


@pytest.mark.parametrize("parcel", [0, 9])
def test_what_nobody_expects_is_refused(pair, parcel):
    ends, receivers = pair
    ends[0].post(1, message(parcel), np.zeros(4, np.float32), None)
    place, _ = receivers[1].failed.get(timeout=10)
    assert place == 0
    assert receivers[1].found.empty()


def test_a_closed_end_is_told(pair):
    ends, receivers = pair
    ends[0].close()
    assert receivers[1].failed.get(timeout=10)[0] == 0


def test_nobody_without_the_token_is_let_in(pair):
    ends, receivers = pair
    stranger = TcpTransport(5, Receiver(), b"another token")
    with pytest.raises(ExecutionError, match="HP-RUN-PEER"):
        stranger.connect({1: ends[1].address})
    stranger.close()
    assert receivers[1].failed.empty()


def test_an_impostor_is_not_believed():
    """A server that does not know the token cannot answer for a place."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = TcpTransport(0, Receiver(), b"token")
        address = "{}:{}".format(*server.getsockname())
        import threading

        def serve():
            connection, _ = server.accept()
            connection.sendall(b"n" * 32)
            connection.recv(100)
            connection.sendall(b"x" * 32)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ExecutionError, match="does not know the token"):
            end.connect({1: address})
        thread.join()
        end.close()


def test_a_refused_connection_is_an_error():
    end = TcpTransport(0, Receiver(), b"token")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
    with pytest.raises(ExecutionError, match="HP-RUN-PEER"):
        end.connect({1: address})
    end.close()


def test_an_array_that_cannot_be_computed_is_told(pair):
    ends, receivers = pair
    array = jax.numpy.ones(3)
    array.delete()
    ends[0].post(1, message(0), array, None)
    assert receivers[0].failed.get(timeout=10)[0] == 1


def test_latency_is_added_and_messages_overlap():
    receivers = [Receiver(), Receiver()]
    slow = {1: Slowness(latency_s=0.2)}
    ends = [TcpTransport(0, receivers[0], b"t", slowness=slow), TcpTransport(1, receivers[1], b"t")]
    ends[0].connect({1: ends[1].address})
    begin = time.perf_counter()
    for number in range(10):
        ends[0].post(1, message(1, number), np.int8(number), None)
    times = []
    for _ in range(10):
        receivers[1].found.get(timeout=10)
        times.append(time.perf_counter() - begin)
    # Lower bounds only: the machine may be as slow as it likes.
    assert times[0] >= 0.2
    for end in ends:
        end.close()


def test_listens_where_it_is_told(pair):
    assert all(end.address.startswith("127.0.0.1:") for end in pair[0])
