"""The process that a Worker lives in, as Ray's actor: how it starts, and what it answers."""

from __future__ import annotations

import importlib
import os
import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from hetpass.backend.emulate import Emulation
from hetpass.errors import ExecutionError, HetpassError
from hetpass.ir.quantities import counted
from hetpass.runtime.distributed.worker import Seat, Worker
from hetpass.runtime.transport.jax_transfer import JaxTransport
from hetpass.runtime.transport.message import Message, Receiver, Slowness, Transport
from hetpass.runtime.transport.ray_store import RayTransport
from hetpass.runtime.transport.tcp import TcpTransport
from hetpass.runtime.watchdog import Status

_CONFIG = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)
"""What the driver's JAX must have in common with the workers', for equal programs."""


def shared_settings() -> dict[str, Any]:
    """The driver's, for its workers."""
    return {name: getattr(jax.config, name) for name in _CONFIG if hasattr(jax.config, name)}


@dataclass(frozen=True)
class WorkerStart:
    """What a process is told when it starts."""

    seat: Seat
    token: bytes
    interface: str | None
    transport: str
    slowness: Mapping[int, Slowness]
    cores: tuple[int, ...]
    emulation: Emulation
    config: Mapping[str, Any]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Host:
    """Where a worker is: its address, a port that is free there, its process, Ray's node."""

    address: str
    port: int
    pid: int
    node: str


@dataclass(frozen=True)
class Failed:
    """What a worker answers when a method raised."""

    error: HetpassError


class WorkerProcess:
    """The actor: a Worker behind a method that calls its own, one after another. `status` and
    `deliver` are called beside that, by the concurrency groups of Ray."""

    def __init__(self) -> None:
        self._worker: Any = None

    def host(self) -> Host:
        """Where this process is."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        return Host(address, port, os.getpid(), ray.get_runtime_context().get_node_id())

    def start(self, start: WorkerStart, coordinator: str) -> str | Failed:
        """Makes the Worker; its transport's address."""
        try:
            self._worker = _started(start, coordinator)
            return self._worker.address()
        except Exception as error:
            return _failed(error)

    def ask(self, method: str, *args: Any) -> Any:
        """The worker's method, or Failed."""
        try:
            return getattr(self._worker, method)(*args)
        except Exception as error:
            return _failed(error)

    def deliver(self, message: Message, value: Any) -> None:
        """A parcel, where Ray carries them."""
        self._worker.transport.delivered(message, value)

    def status(self) -> Status | None:
        """What the worker is doing; None before it has been made."""
        return None if self._worker is None else self._worker.status()


def _failed(error: Exception) -> Failed:
    if isinstance(error, HetpassError):
        return Failed(error)
    lines = traceback.format_exception(error)
    return Failed(
        ExecutionError(
            "HP-RUN-FAILED",
            f"a process failed: {type(error).__name__}: {error}"[:500],
            details=[line.rstrip() for line in "".join(lines).splitlines()[-12:]],
        )
    )


def _started(start: WorkerStart, coordinator: str) -> Worker:
    """The Worker of this process.

    Args:
      coordinator: "host:port" of the first process of the group.

    Raises:
      ExecutionError: HP-RUN-DEVICES, the process has other devices than the cluster says.
    """
    seat = start.seat
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    for name, value in start.config.items():
        jax.config.update(name, value)
    for name in start.modules:
        importlib.import_module(name)
    if seat.hosts > 1:
        jax.distributed.initialize(
            coordinator, seat.hosts, seat.host, coordinator_bind_address=coordinator
        )
    devices = jax.devices()
    here = jax.local_devices()
    if len(here) != seat.num_devices or len(devices) != seat.num_devices * seat.hosts:
        raise ExecutionError(
            "HP-RUN-DEVICES",
            f"process {seat.place} of group {seat} has {counted(len(here), 'device')}",
            details=[
                f"the cluster says {seat.num_devices} on each of {counted(seat.hosts, 'host')}"
            ],
            ways_out=["correct devices_per_host and hosts of the group"],
        )

    def transport(place: int, receiver: Receiver) -> Transport:
        if start.transport == "ray":
            return RayTransport(place, receiver)
        interface = start.interface or _own_address()
        sort = JaxTransport if start.transport == "jax" else TcpTransport
        return sort(place, receiver, start.token, interface, start.slowness)

    return Worker(seat, {seat.group: devices}, transport, start.emulation)


def _own_address() -> str:
    import ray

    return ray.util.get_node_ip_address()
