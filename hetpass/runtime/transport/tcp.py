"""Parcels over plain TCP: one connection per ordered pair of places, opened by the sender.

Both ends prove that they know the cluster's token (a challenge and a keyed hash; the token itself
is never sent). A frame is a header of fixed size and the bytes of the parcel.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hetpass.backend.pieces import Box
from hetpass.errors import ExecutionError
from hetpass.runtime.transport.message import Message, Receiver, Slowness

_HEADER = struct.Struct("!4sIQIiIdIIQ")
_MAGIC = b"hps1"
_NONCE_BYTES = 32
_HELLO = struct.Struct(f"!I{hashlib.sha256().digest_size}s")
_HANDSHAKE_S = 10.0
_ALIGNMENT_BYTES = 64
"""XLA takes a host buffer over without a copy if it is aligned to this."""
_SMALL_BYTES = 1 << 16


class TcpTransport:
    """See the head of this module.

    Args:
      place: the number of this process.
      receiver: is handed what arrives.
      token: shared by all processes of the cluster.
      interface: the address to listen at; a free port is taken.
      slowness: by place that is sent to, for experiments.
    """

    def __init__(
        self,
        place: int,
        receiver: Receiver,
        token: bytes,
        interface: str = "127.0.0.1",
        slowness: Mapping[int, Slowness] | None = None,
    ) -> None:
        self._place = place
        self._receiver = receiver
        self._token = token
        self._slowness = dict(slowness or {})
        self._server = socket.create_server((interface, 0))
        self._closing = threading.Event()
        self._lines: dict[int, _Line] = {}
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True, name="tcp-accept").start()

    @property
    def address(self) -> str:
        host, port = self._server.getsockname()[:2]
        return f"{host}:{port}"

    def connect(self, peers: Mapping[int, str]) -> None:
        for place, address in peers.items():
            if place not in self._lines:
                slowness = self._slowness.get(place, Slowness())
                connection = None if place == self._place else self._connected(place, address)
                self._lines[place] = _Line(place, connection, self._receiver, slowness)

    def post(self, to: int, message: Message, value: Any, box: Box | None) -> None:
        self._lines[to].post(message, value, box)

    def close(self) -> None:
        self._closing.set()
        for line in self._lines.values():
            line.close()
        for connection in (self._server, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    # -- opening ------------------------------------------------------------------------------

    def _connected(self, place: int, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=_HANDSHAKE_S)
        except OSError as error:
            raise _unreachable(place, address, str(error)) from error
        try:
            self._introduce(connection, place)
        except (OSError, EOFError, PermissionError) as error:
            connection.close()
            raise _unreachable(place, address, str(error) or "it hung up") from error
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.append(connection)
        return connection

    def _introduce(self, connection: socket.socket, place: int) -> None:
        """Proves that we know the token, and has the other end prove it."""
        nonce = _received(connection, _NONCE_BYTES)
        connection.sendall(_HELLO.pack(self._place, self._proof(nonce, self._place)))
        answer = _received(connection, hashlib.sha256().digest_size)
        if not hmac.compare_digest(bytes(answer), self._proof(nonce, place)):
            raise PermissionError("it does not know the token")

    def _proof(self, nonce: bytes | bytearray, place: int) -> bytes:
        return hmac.digest(self._token, bytes(nonce) + place.to_bytes(4, "big"), "sha256")

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            place = self._met(connection)
            if place is None:
                return
            self._open.append(connection)
            if not self._closing.is_set():  # else `close` may not have seen this one
                self._read(connection, place)

    def _met(self, connection: socket.socket) -> int | None:
        """The place of who has connected; None if it does not know the token."""
        try:
            connection.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(nonce)
            place, proof = _HELLO.unpack(_received(connection, _HELLO.size))
            if not hmac.compare_digest(proof, self._proof(nonce, place)):
                return None
            connection.sendall(self._proof(nonce, self._place))
            connection.settimeout(None)
        except (OSError, EOFError):
            return None
        return int(place)

    # -- reading ------------------------------------------------------------------------------

    def _read(self, connection: socket.socket, place: int) -> None:
        try:
            while True:
                header = _received(connection, _HEADER.size)
                magic, *identity, num_bytes = _HEADER.unpack(header)
                message = Message(*identity)
                if magic != _MAGIC:
                    raise ValueError("what arrived is no parcel")
                shape, dtype = self._receiver.form(message)
                expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                if num_bytes != expected:
                    raise ValueError(f"{message}: {num_bytes} bytes, {expected} are expected")
                value = _aligned(expected)
                _receive_into(connection, value.data)
                self._receiver.deliver(message, value.view(dtype).reshape(shape))
        except (OSError, EOFError) as error:
            if not self._closing.is_set():
                self._receiver.fail(place, str(error) or "the connection was closed")
        except Exception as error:  # whatever it is, the step cannot go on
            self._receiver.fail(place, str(error))


class _Line:
    """The way to one place: a queue, and a thread that waits for arrays and sends them."""

    def __init__(
        self,
        place: int,
        connection: socket.socket | None,
        receiver: Receiver,
        slowness: Slowness,
    ) -> None:
        self._place = place
        self._connection = connection
        self._receiver = receiver
        self._slowness = slowness
        self._queue: queue.SimpleQueue[tuple[Message, Any, Box | None] | None] = queue.SimpleQueue()
        self._wire: queue.SimpleQueue[tuple[float, bytes, Any] | None] = queue.SimpleQueue()
        self._free_s = 0.0
        threading.Thread(target=self._run, daemon=True, name=f"tcp-to-{place}").start()
        if slowness.latency_s:
            threading.Thread(target=self._late, daemon=True, name=f"tcp-wire-{place}").start()

    def post(self, message: Message, value: Any, box: Box | None) -> None:
        self._queue.put((message, value, box))

    def close(self) -> None:
        self._queue.put(None)
        self._wire.put(None)

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._carry(*item)
                del item
        except OSError as error:
            self._receiver.fail(self._place, str(error))
        except Exception as error:  # of the computation that was to make the array
            why = f"what was to be sent could not be computed: {error or type(error).__name__}"
            self._receiver.fail(self._place, why)

    def _carry(self, message: Message, value: Any, box: Box | None) -> None:
        if isinstance(value, jax.Array):
            value.block_until_ready()
        if not message.sent_s:
            message = replace(message, sent_s=time.perf_counter())
        host = np.asarray(value)
        part = host if box is None else host[tuple(slice(a, b) for a, b in box)]
        if self._connection is None:
            self._receiver.deliver(message, np.array(part))
            return
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        header = _HEADER.pack(
            _MAGIC,
            message.program,
            message.call,
            message.transfer,
            message.microbatch,
            message.parcel,
            message.sent_s,
            message.place,
            message.via,
            data.nbytes,
        )
        self._pace(data.nbytes)
        if self._slowness.latency_s:
            self._wire.put((time.perf_counter() + self._slowness.latency_s, header, data))
        else:
            self._send(header, data)

    def _pace(self, num_bytes: int) -> None:
        if self._slowness.bytes_per_s is not None:
            begin_s = max(self._free_s, time.perf_counter())
            self._free_s = begin_s + num_bytes / self._slowness.bytes_per_s
            _sleep_until(self._free_s)

    def _late(self) -> None:
        try:
            while (item := self._wire.get()) is not None:
                due_s, header, data = item
                _sleep_until(due_s)
                self._send(header, data)
        except OSError as error:
            self._receiver.fail(self._place, str(error))

    def _send(self, header: bytes, data: np.ndarray) -> None:
        assert self._connection is not None
        if data.nbytes <= _SMALL_BYTES:
            self._connection.sendall(header + data.tobytes())
            return
        self._connection.sendall(header)
        self._connection.sendall(data.data)


def _sleep_until(time_s: float) -> None:
    left_s = time_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


def _received(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    _receive_into(connection, memoryview(data))
    return data


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError("the connection was closed")
        view = view[count:]


def _aligned(num_bytes: int) -> np.ndarray:
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + num_bytes]


def _unreachable(place: int, address: str, reason: str) -> ExecutionError:
    return ExecutionError(
        "HP-RUN-PEER",
        f"process {place} cannot be reached at {address}",
        details=(reason,),
        ways_out=("let the processes reach each other's ports on the interface they listen at",),
    )
