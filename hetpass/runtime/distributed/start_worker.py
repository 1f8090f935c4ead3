"""Makes the Worker of this process: its devices, its transport, its settings."""

from __future__ import annotations

import importlib
import os
from typing import Any

import jax

from hetpass.errors import ExecutionError
from hetpass.runtime.distributed.worker import Worker
from hetpass.runtime.transport.jax_transfer import JaxTransport
from hetpass.runtime.transport.message import Receiver, Transport
from hetpass.runtime.transport.ray_store import RayTransport
from hetpass.runtime.transport.tcp import TcpTransport


def start_worker(start: Any, coordinator: str) -> Worker:
    """See the head of this module.

    Args:
      start: a `WorkerStart`. coordinator: "host:port" of the first process of the group.

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
        jax.distributed.initialize(coordinator, seat.hosts, seat.host)
    devices = jax.devices()
    here = jax.local_devices()
    if len(here) != seat.num_devices or len(devices) != seat.num_devices * seat.hosts:
        raise ExecutionError(
            "HP-RUN-DEVICES",
            f"process {seat.place} of group {seat} has {len(here)} devices",
            details=[f"the cluster says {seat.num_devices} on each of {seat.hosts} hosts"],
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
