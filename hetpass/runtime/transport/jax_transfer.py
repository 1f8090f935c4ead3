"""Parcels by JAX's transfer library: from device to device, without a copy on the hosts.

The library moves arrays of equal shards by number: the sender offers an array under a number, the
receiver pulls it. So every parcel is an array on one device; its number goes over a TCP connection
beside it, with the parcel's identity.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetpass.backend.pieces import Box
from hetpass.errors import ExecutionError
from hetpass.runtime.transport.message import Message, Receiver, Slowness
from hetpass.runtime.transport.tcp import TcpTransport

_NUMBER = np.dtype(np.int64)


class JaxTransport:
    """See the head of this module.

    Args:
      place: the number of this process. receiver: is handed what arrives, as `jax.Array`s.
      token: shared by all processes of the cluster.
      interface: the address to listen at; free ports are taken.
      slowness: by place that is sent to, for experiments; it delays the numbers.

    Raises:
      ExecutionError: HP-RUN-TRANSPORT, this JAX has no transfer library.
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
        self._device = jax.local_devices()[0]
        self._server = _server(self._device, interface)
        self._numbers = itertools.count(1)
        self._connections: dict[int, Any] = {}
        self._wanted: queue.SimpleQueue[tuple[Message, int] | None] = queue.SimpleQueue()
        self._beside = TcpTransport(
            place, _Numbers(self._wanted, receiver), token, interface, slowness
        )
        threading.Thread(target=self._pull_all, daemon=True, name="jax-transfer").start()

    @property
    def address(self) -> str:
        return f"{self._beside.address} {self._server.address()}"

    def connect(self, peers: Mapping[int, str]) -> None:
        self._beside.connect({place: address.split()[0] for place, address in peers.items()})
        for place, address in peers.items():
            if place != self._place and place not in self._connections:
                self._connections[place] = self._server.connect(address.split()[1])

    def post(self, to: int, message: Message, value: Any, box: Box | None) -> None:
        part = jax.device_put(value, self._device) if isinstance(value, np.ndarray) else value
        if box is not None:
            part = _slicer(box)(part)
        if to == self._place:
            self._receiver.deliver(replace(message, sent_s=time.perf_counter()), part)
            return
        number = next(self._numbers)
        self._server.await_pull(number, [part])
        # Numbers of one sender are told apart by who sends them: each has its own server.
        hop = replace(message, sent_s=message.sent_s or time.perf_counter(), via=self._place)
        self._beside.post(to, hop, np.asarray(number, _NUMBER), None)

    def close(self) -> None:
        self._wanted.put(None)
        self._beside.close()

    def _pull_all(self) -> None:
        while (item := self._wanted.get()) is not None:
            message, number = item
            try:
                shape, dtype = self._receiver.form(message)
                wanted = jax.ShapeDtypeStruct(
                    shape, dtype, sharding=SingleDeviceSharding(self._device)
                )
                (array,) = self._connections[message.via].pull(number, [wanted])
                array.block_until_ready()
                self._receiver.deliver(message, array)
            except Exception as error:  # whatever it is, the step cannot go on
                self._receiver.fail(message.via, str(error))


class _Numbers:
    """Receives the numbers of parcels."""

    def __init__(
        self, wanted: queue.SimpleQueue[tuple[Message, int] | None], receiver: Receiver
    ) -> None:
        self._wanted = wanted
        self._receiver = receiver

    def form(self, message: Message) -> tuple[tuple[int, ...], np.dtype]:
        self._receiver.form(message)  # refuses what nobody waits for
        return (), _NUMBER

    def deliver(self, message: Message, value: Any) -> None:
        self._wanted.put((message, int(value)))

    def fail(self, place: int, reason: str) -> None:
        self._receiver.fail(place, reason)


def _server(device: jax.Device, interface: str) -> Any:
    try:
        from jax.experimental import transfer
    except ImportError as error:
        raise ExecutionError(
            "HP-RUN-TRANSPORT",
            "this JAX has no transfer library",
            details=(str(error),),
            ways_out=('transport="tcp"',),
        ) from error
    # An empty list of addresses for the data crashes the sender.
    return transfer.start_transfer_server(device.client, f"{interface}:0", [f"{interface}:0"])


@lru_cache(maxsize=4096)
def _slicer(box: Box) -> Any:
    starts, stops = [a for a, _ in box], [b for _, b in box]
    return jax.jit(partial(jax.lax.slice, start_indices=starts, limit_indices=stops))
