"""What comes from other processes and lanes: checked, put together, and waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hetpass._jax import ShapedArray, device_order, key_impl_of
from hetpass.backend.pieces import Box, relative
from hetpass.backend.reshard import boxes
from hetpass.backend.routes import Parcel, Route
from hetpass.errors import ExecutionError
from hetpass.runtime.transport.message import ONCE, Message

Key = tuple[int, int, int, int]
"""program, call, transfer, microbatch (or ONCE)."""


@dataclass(frozen=True)
class Incoming:
    """A transfer as its target sees it, in one process.

    Attributes:
      shape, dtype: of the array on the wire: of PRNG keys the integers below them.
      sharding: of that array.
      key_impl: of PRNG keys; None for other arrays.
      parcels: that come to this process.
      per_microbatch: sent once per microbatch, not per step.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    key_impl: Any
    parcels: Mapping[int, Parcel]
    per_microbatch: bool

    def whole(self, box: Box) -> Box:
        """A box of keys as a box of the integers below them."""
        return (*box, *((0, n) for n in self.shape[len(box) :]))

    def assembled(self, values: Mapping[int, Any]) -> jax.Array:
        """The array on this process's devices, from all parcels."""
        found = boxes(self.sharding, self.shape)
        shards: dict[Box, Any] = {}
        arrays = []
        for device in device_order(self.sharding):
            box = found[device.id]
            if box not in shards:
                shards[box] = self._shard(box, values, device)
            arrays.append(jax.device_put(shards[box], device))
        array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)
        if self.key_impl is None:
            return array
        return jax.random.wrap_key_data(array, impl=self.key_impl)

    def _shard(self, box: Box, values: Mapping[int, Any], device: jax.Device) -> Any:
        """From numpy arrays on the host, from arrays of devices on `device`."""
        parts = {self.whole(self.parcels[number].box): value for number, value in values.items()}
        if box in parts:
            return parts[box]
        own = {
            relative(part, box): value
            for part, value in parts.items()
            if all(a <= c and d <= b for (a, b), (c, d) in zip(box, part, strict=True))
        }
        shape = [stop - start for start, stop in box]
        if any(isinstance(value, jax.Array) for value in own.values()):
            shard = jnp.zeros(shape, self.dtype, device=device)
            for part, value in own.items():
                there = jax.device_put(value, device)
                shard = _filled(shard, there, tuple(start for start, _ in part))
            return shard
        made = np.empty(shape, self.dtype)
        for part, value in own.items():
            made[tuple(slice(*span) for span in part)] = value
        return made


@partial(jax.jit, donate_argnums=0, static_argnums=2)
def _filled(shard: jax.Array, part: jax.Array, starts: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, part, starts)


def incoming(
    route: Route, aval: ShapedArray, sharding: NamedSharding, per_microbatch: bool, place: int
) -> Incoming:
    """What `place` receives of a transfer of arrays like `aval`."""
    shape, dtype, impl, under = tuple(aval.shape), aval.dtype, None, sharding
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        impl = key_impl_of(dtype)
        spec = (*sharding.spec, *(None,) * (len(data.shape) - len(sharding.spec)))
        under = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        shape, dtype = data.shape, data.dtype
    parcels = {p.number: p for p in route.parcels if place in p.receivers}
    return Incoming(shape, np.dtype(dtype), under, impl, parcels, per_microbatch)


@dataclass
class _Waiting:
    """One array on its way."""

    values: dict[int, Any]
    ready: threading.Event
    array: jax.Array | None = None


class Arrivals:
    """Where a process waits for arrays. A `Receiver` of its transport.

    Args:
      place: the number of this process.
      pass_on: sends a parcel to another place of the group.
      observe: is told of every array that is complete: (transfer key, place of the first sender,
        sent_s by its clock, arrived_s by ours).
    """

    def __init__(
        self,
        place: int,
        pass_on: Callable[[int, Message, Any], None],
        observe: Callable[[Key, int, float, float], None],
    ) -> None:
        self._place = place
        self._pass_on = pass_on
        self._observe = observe
        self._lock = threading.Lock()
        self._expected: dict[int, tuple[Mapping[int, Incoming], int]] = {}
        self._waiting: dict[Key, _Waiting] = {}
        self._done: dict[int, int] = {}
        self._failure: ExecutionError | None = None

    def expect(
        self, program: int, transfers: Mapping[int, Incoming], num_microbatches: int
    ) -> None:
        """From now on parcels of these transfers may come."""
        self._expected[program] = (transfers, num_microbatches)

    # -- from the transport -------------------------------------------------------------------

    def form(self, message: Message) -> tuple[tuple[int, ...], np.dtype]:
        transfer, parcel = self._checked(message)
        shape = tuple(stop - start for start, stop in transfer.whole(parcel.box))
        return shape, transfer.dtype

    def deliver(self, message: Message, value: Any) -> None:
        transfer, parcel = self._checked(message)
        if parcel.receivers[0] == self._place:
            for other in parcel.receivers[1:]:
                self._pass_on(other, message, value)
        key = (message.program, message.call, message.transfer, message.microbatch)
        with self._lock:
            waiting = self._entry(key)
            if message.parcel in waiting.values:
                raise _refused(message, "it came twice")
            waiting.values[message.parcel] = value
            complete = len(waiting.values) == len(transfer.parcels)
        if complete:
            waiting.array = transfer.assembled(waiting.values)
            waiting.values = {}
            self._observe(key, message.place, message.sent_s, time.perf_counter())
            waiting.ready.set()

    def fail(self, place: int, reason: str) -> None:
        self.stop(
            ExecutionError(
                "HP-RUN-PEER",
                f"the connection with process {place} is lost",
                details=(reason,),
            )
        )

    def _checked(self, message: Message) -> tuple[Incoming, Parcel]:
        transfers, count = self._expected.get(message.program, ({}, 0))
        transfer = transfers.get(message.transfer)
        if transfer is None:
            raise _refused(message, "there is no such transfer to this process")
        numbers = range(count) if transfer.per_microbatch else (ONCE,)
        if message.microbatch not in numbers:
            raise _refused(message, f"microbatches are {list(numbers)[:3]}…")
        if message.call <= self._done.get(message.program, 0):
            raise _refused(message, "that call has ended")
        if message.parcel not in transfer.parcels:
            raise _refused(message, f"its parcels are {sorted(transfer.parcels)[:8]}")
        return transfer, transfer.parcels[message.parcel]

    def _entry(self, key: Key) -> _Waiting:
        return self._waiting.setdefault(key, _Waiting({}, threading.Event()))

    # -- from the lanes -----------------------------------------------------------------------

    def hand(self, key: Key, array: jax.Array) -> None:
        """An array from another lane of this process."""
        with self._lock:
            waiting = self._entry(key)
        waiting.array = array
        waiting.ready.set()

    def take(self, key: Key) -> jax.Array:
        """Waits for an array, and forgets it.

        Raises:
          ExecutionError: HP-RUN-PEER or HP-RUN-TRANSFER, it will not come.
        """
        with self._lock:
            waiting = self._entry(key)
        if self._failure is None:
            waiting.ready.wait()
        with self._lock:
            del self._waiting[key]
        if waiting.array is None:
            assert self._failure is not None
            raise self._failure
        return waiting.array

    def ended(self, program: int, call: int) -> None:
        """Nothing more can come for this call."""
        self._done[program] = call

    def stop(self, failure: ExecutionError) -> None:
        """Everyone who waits is told."""
        with self._lock:
            if self._failure is None:
                self._failure = failure
            waiting: Sequence[_Waiting] = list(self._waiting.values())
        for entry in waiting:
            entry.ready.set()


def _refused(message: Message, why: str) -> ExecutionError:
    return ExecutionError(
        "HP-RUN-TRANSFER",
        "a parcel arrived that nobody waits for",
        where=str(message),
        details=(why,),
    )
