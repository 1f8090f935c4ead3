"""The workers of a cluster, as the driver speaks with them.

A crew numbers its workers by place, asks them for things in order, and ends with the first failure:
nothing of it is left then. `RayCrew` has a process per worker; `ThreadCrew`, for tests and
debugging, has all workers in this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import jax

from hetpass.errors import ExecutionError, HetpassError
from hetpass.ir.cluster import Cluster
from hetpass.runtime.distributed.worker import Seat, Worker
from hetpass.runtime.transport.message import Slowness
from hetpass.runtime.transport.tcp import TcpTransport

_TOKEN = b"threads of one process"


class Crew(Protocol):
    """See the head of this module."""

    @property
    def seats(self) -> tuple[Seat, ...]: ...

    @property
    def closed(self) -> bool:
        """Whether its workers have ended."""
        ...

    def ask(self, place: int, method: str, *args: Any) -> Any:
        """Has a worker's method called, after all that it was asked before; returns a promise."""
        ...

    def wait(self, promises: Sequence[Any]) -> list[Any]:
        """What was promised.

        Raises:
          HetpassError: a worker failed, died or hangs; the whole crew has ended.
        """
        ...

    def runs(self, place: int, stages: Sequence[int]) -> None:
        """For the reports of failures: the worker has parts of these stages."""
        ...

    def close(self) -> None:
        """Ends all workers. Can be called again."""
        ...


def seats_of(cluster: Cluster) -> tuple[Seat, ...]:
    """One per host of each group, in the order of the groups."""
    places: dict[str, tuple[int, ...]] = {}
    first = 0
    for group in cluster.groups:
        hosts = range(first, first + group.hosts)
        places[group.name] = tuple(h for h in hosts for _ in range(group.devices_per_host))
        first += group.hosts
    seats: list[Seat] = []
    for group in cluster.groups:
        for host in range(group.hosts):
            devices = group.devices_per_host
            seats.append(Seat(len(seats), group.name, host, group.hosts, devices, places))
    return tuple(seats)


def have_ended() -> ExecutionError:
    """What is asked of a crew that has been closed is refused."""
    return ExecutionError(
        "HP-RUN-CLOSED",
        "the workers have ended",
        ways_out=["compile the step again: new workers start"],
    )


class ThreadCrew:
    """All workers in this process, a thread each; transfers go over TCP all the same.

    Args:
      cluster: every group on one host.
      devices: by group name.
      slowness: by (from, to) group, what is added to their link.
    """

    def __init__(
        self,
        cluster: Cluster,
        devices: Mapping[str, Sequence[jax.Device]],
        slowness: Mapping[tuple[str, str], Slowness] | None = None,
    ) -> None:
        self.seats = seats_of(cluster)
        self.closed = False
        self._workers = []
        for seat in self.seats:
            slow = {
                other.place: (slowness or {}).get((seat.group, other.group), Slowness())
                for other in self.seats
            }
            transport = partial(TcpTransport, token=_TOKEN, slowness=slow)
            self._workers.append(Worker(seat, {seat.group: devices[seat.group]}, transport))
        self._threads = [ThreadPoolExecutor(1, f"worker-{s.place}") for s in self.seats]
        addresses = {
            seat.place: w.address() for seat, w in zip(self.seats, self._workers, strict=True)
        }
        for worker in self._workers:
            worker.connect(addresses)

    def ask(self, place: int, method: str, *args: Any) -> Future[Any]:
        if self.closed:
            raise have_ended()
        return self._threads[place].submit(getattr(self._workers[place], method), *args)

    def wait(self, promises: Sequence[Future[Any]]) -> list[Any]:
        try:
            return [promise.result() for promise in promises]
        except HetpassError:
            self.close()
            raise

    def runs(self, place: int, stages: Sequence[int]) -> None:
        """Nobody watches threads."""

    def close(self) -> None:
        self.closed = True
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
