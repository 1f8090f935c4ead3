"""One Ray actor per worker: Ray places and watches the processes, and carries small messages.

Nothing is left when a crew ends, whether by `close`, by a failure, by Ctrl-C or by the end of the
driver: actors are killed, and a Ray that was started here is shut down with everything in it.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from hetpass.backend.emulate import Emulation
from hetpass.errors import ExecutionError, HetpassError
from hetpass.ir.cluster import Cluster
from hetpass.runtime.distributed.crew import have_ended, seats_of
from hetpass.runtime.distributed.ray_engine import actor_options, connected, end_process
from hetpass.runtime.distributed.worker_process import (
    Failed,
    Host,
    WorkerProcess,
    WorkerStart,
    shared_settings,
)
from hetpass.runtime.distributed.workers import WorkerOptions
from hetpass.runtime.transport.ray_store import PARCELS
from hetpass.runtime.watchdog import Watch

_TELLING = ("compile", "create", "run")
"""Methods whose failures stand behind other failures; their answers are small."""

WATCH = "watch"
"""The concurrency group that asks how a worker is."""

_CAUSE_S = 3.0
"""How long a lost connection may be explained by a process that died."""
_START_S = 180.0


class RayCrew:
    """See the head of this module.

    Args:
      cluster: a process per host of each group; groups of kind "cpu…" get virtual CPU devices,
        others whole accelerators (Ray's `accelerator_type`).
      options: how they are started.

    Raises:
      ExecutionError: HP-RUN-RAY, Ray is not installed, or has no place for the workers.
    """

    def __init__(self, cluster: Cluster, options: WorkerOptions) -> None:
        self.seats = seats_of(cluster)
        self._options = options
        self._ray, self._own_ray = connected(options, len(self.seats))
        self._actors: list[Any] = []
        self._hosts: list[Host] = []
        self._asked: deque[Any] = deque(maxlen=64)
        self._failure: HetpassError | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._watch = Watch([str(seat) for seat in self.seats], options.limits, time.monotonic())
        self._at_exit = _close_at_exit(self)
        try:
            self._start(cluster)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watching, daemon=True, name="watchdog").start()

    @property
    def closed(self) -> bool:
        return self._ended.is_set()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each worker."""
        return tuple(host.pid for host in self._hosts)

    # -- starting -----------------------------------------------------------------------------

    def _start(self, cluster: Cluster) -> None:
        ray, options = self._ray, self._options
        for seat in self.seats:
            group = cluster.group(seat.group)
            actor = ray.remote(concurrency_groups={WATCH: 1, PARCELS: 1})(WorkerProcess)
            asked = actor_options(ray, group, seat, options)
            self._actors.append(actor.options(**asked).remote())
        self._hosts = self._got([actor.host.remote() for actor in self._actors], "start")
        token = secrets.token_bytes(32)
        here = "127.0.0.1" if self._own_ray else None
        starts = [
            WorkerStart(
                seat,
                token,
                options.interface or here,
                options.transport,
                {
                    other.place: options.slowness[seat.group, other.group]
                    for other in self.seats
                    if (seat.group, other.group) in options.slowness
                },
                tuple(options.cores.get(seat.group, ())),
                options.emulation.get(seat.group, Emulation()),
                shared_settings(),
                # Imported before the watch begins: while a library is loaded nothing is answered.
                tuple(sorted(name for name in sys.modules if name.startswith("hetpass."))),
            )
            for seat in self.seats
        ]
        promises = []
        for start, actor in zip(starts, self._actors, strict=True):
            first = self._hosts[start.seat.place - start.seat.host]
            promises.append(actor.start.remote(start, f"{here or first.address}:{first.port}"))
        addresses = self._got(promises, "import JAX and hetpass")
        peers: dict[int, Any] = dict(enumerate(addresses))
        if options.transport == "ray":
            peers = dict(enumerate(self._actors))
        self._got([actor.ask.remote("connect", peers) for actor in self._actors], "connect")

    def _got(self, promises: Sequence[Any], doing: str) -> list[Any]:
        """Answers while the crew is not watched yet."""
        try:
            answers = self._ray.get(list(promises), timeout=_START_S)
        except self._ray.exceptions.RayError as error:
            raise ExecutionError(
                "HP-RUN-RAY",
                f"the workers could not {doing}",
                details=[str(error)[:800]],
                ways_out=[
                    "compare the cluster's groups with `ray status`: every host needs a CPU, and "
                    "its accelerators free",
                ],
            ) from error
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
        return answers

    # -- speaking -----------------------------------------------------------------------------

    def ask(self, place: int, method: str, *args: Any) -> Any:
        self._raise_failure()
        promise = self._actors[place].ask.remote(method, *args)
        if method in _TELLING:
            self._asked.append(promise)
        return promise

    def wait(self, promises: Sequence[Any]) -> list[Any]:
        waiting = list(promises)
        try:
            while waiting:
                self._raise_failure()
                done, waiting = self._ray.wait(
                    waiting, num_returns=len(waiting), timeout=self._options.limits.poll_s
                )
                self._look_at(done)
            return self._ray.get(list(promises))
        except self._ray.exceptions.RayError as error:
            raise self._ending(error) from None
        except KeyboardInterrupt:
            self.close()
            raise

    def _look_at(self, done: Sequence[Any]) -> None:
        for answer in self._ray.get(list(done)):
            if isinstance(answer, Failed):
                raise self._ending(answer.error)

    def _ending(self, error: Exception) -> HetpassError:
        """The crew ends; the reason that stands behind the error."""
        until_s = time.monotonic() + _CAUSE_S
        while self._failure is None and _is_consequence(error) and time.monotonic() < until_s:
            error = self._first_cause() or error
            time.sleep(0.05)
        if self._failure is not None:
            self.close()
            return self._failure
        if not isinstance(error, HetpassError):
            error = ExecutionError("HP-RUN-LOST", "a process has died", details=[str(error)[:400]])
        if isinstance(error, ExecutionError):
            error = self._watch.explained(error)
        self._fail(error)
        return error

    def _first_cause(self) -> HetpassError | None:
        """What went wrong in another worker, if anything did."""
        done, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for promise in done:
            with contextlib.suppress(self._ray.exceptions.RayError):
                answer = self._ray.get(promise)
                if isinstance(answer, Failed) and not _is_consequence(answer.error):
                    return answer.error
        return None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.close()
            raise self._failure
        if self.closed:
            raise have_ended()

    def runs(self, place: int, stages: Sequence[int]) -> None:
        self._watch.runs(place, stages)

    # -- watching -----------------------------------------------------------------------------

    def _watching(self) -> None:
        ray, limits = self._ray, self._options.limits
        asked: dict[Any, int] = {}
        try:
            while not self._ended.is_set():
                for place in set(range(len(self._actors))) - set(asked.values()):
                    status = self._actors[place].status.options(concurrency_group=WATCH)
                    asked[status.remote()] = place
                done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=limits.poll_s)
                for promise in done:
                    self._hear(asked.pop(promise), promise)
                verdict = self._watch.verdict(time.monotonic())
                if verdict is not None:
                    self._fail(verdict)
                    return
                self._ended.wait(limits.poll_s)
        except Exception:
            if not self._ended.is_set() and ray.is_initialized():
                raise

    def _hear(self, place: int, promise: Any) -> None:
        try:
            status = self._ray.get(promise)
        except self._ray.exceptions.RayError as error:
            self._watch.died(place, _first_line(error))
            return
        if status is not None:
            self._watch.heard(status, time.monotonic())

    def _fail(self, error: HetpassError) -> None:
        with self._lock:
            if self._failure is None and not self.closed:
                self._failure = error
        self._kill()

    # -- ending -------------------------------------------------------------------------------

    def _kill(self) -> None:
        """Ends the actors, and by a signal those that do not listen any more."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor, no_restart=True)
        here = self._ray.get_runtime_context().get_node_id()
        for host in self._hosts:
            if host.node == here:
                end_process(host.pid)
            else:
                place = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
                ending = self._ray.remote(end_process).options(
                    num_cpus=0, scheduling_strategy=place(host.node, soft=True)
                )
                with contextlib.suppress(Exception):
                    self._ray.wait([ending.remote(host.pid)], timeout=_CAUSE_S)

    def close(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self._at_exit)
        if self._ray.is_initialized():
            self._kill()
            if self._own_ray:
                self._ray.shutdown()


def _close_at_exit(crew: RayCrew) -> Any:
    known = weakref.ref(crew)

    def close() -> None:
        crew = known()
        if crew is not None:
            crew.close()

    atexit.register(close)
    return close


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1] + [line for line in lines[1:] if "exit" in line or "signal" in line])[
        :300
    ]


def _is_consequence(error: Exception) -> bool:
    """Whether something else may have gone wrong before."""
    codes = ("HP-RUN-PEER", "HP-RUN-STOPPED", "HP-RUN-GONE", "HP-RUN-FAILED")
    return not isinstance(error, HetpassError) or error.code in codes
