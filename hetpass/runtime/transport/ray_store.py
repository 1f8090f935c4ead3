"""Parcels through Ray's object store: nothing to open but what Ray has opened already.

Slower than the other transports for small parcels (2.8 ms against 0.1 ms for a kilobyte on one
machine), for clusters where only Ray's own ports can be reached.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hetpass.backend.pieces import Box
from hetpass.runtime.transport.message import Message, Receiver

PARCELS = "parcels"
"""The concurrency group of the actors in which parcels are delivered, beside the running step."""


class RayTransport:
    """See the head of this module.

    Args:
      place: the number of this process. receiver: is handed what arrives.
    """

    def __init__(self, place: int, receiver: Receiver) -> None:
        self._place = place
        self._receiver = receiver
        self._peers: dict[int, Any] = {}
        self._queue: queue.SimpleQueue[tuple[int, Message, Any, Box | None] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, daemon=True, name="ray-store").start()

    @property
    def address(self) -> str:
        return ""

    def connect(self, peers: Mapping[int, Any]) -> None:
        """The actors of all places: their `deliver` is called."""
        self._peers.update(peers)

    def post(self, to: int, message: Message, value: Any, box: Box | None) -> None:
        self._queue.put((to, message, value, box))

    def delivered(self, message: Message, value: np.ndarray) -> None:
        """The actor's `deliver` was called."""
        try:
            shape, dtype = self._receiver.form(message)
            if value.shape != shape or value.dtype != dtype:
                raise ValueError(f"{message}: {value.dtype}{value.shape}, not {dtype}{shape}")
            # The store's memory cannot be written to, and JAX would take it over without a copy.
            self._receiver.deliver(message, np.array(value))
        except Exception as error:  # whatever it is, the step cannot go on
            self._receiver.fail(message.place, str(error))

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            to, message, value, box = item
            try:
                if isinstance(value, jax.Array):
                    value.block_until_ready()
                if not message.sent_s:
                    message = replace(message, sent_s=time.perf_counter())
                host = np.asarray(value)
                part = host if box is None else host[tuple(slice(a, b) for a, b in box)]
                if to == self._place:
                    self._receiver.deliver(message, np.array(part))
                else:
                    deliver = self._peers[to].deliver.options(concurrency_group=PARCELS)
                    deliver.remote(message, np.ascontiguousarray(part))
            except Exception as error:  # an array that could not be computed, a dead actor
                self._receiver.fail(to, str(error) or type(error).__name__)
            del item, value
