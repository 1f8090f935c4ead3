"""One Ray actor per worker: Ray places and watches the processes, and carries small messages.

Nothing is left when a crew ends, whether by `close`, by a failure, by Ctrl-C or by the end of the
driver: actors are killed, and a Ray that was started here is shut down with everything in it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from hetpass.backend.emulate import Emulation
from hetpass.errors import ExecutionError, HetpassError
from hetpass.ir.cluster import Cluster, DeviceGroup
from hetpass.ir.cluster_ray import accelerator_of_kind
from hetpass.runtime.distributed.crew import have_ended, seats_of
from hetpass.runtime.distributed.worker import Seat
from hetpass.runtime.distributed.workers import WorkerOptions
from hetpass.runtime.transport.message import Message, Slowness
from hetpass.runtime.transport.ray_store import PARCELS
from hetpass.runtime.watchdog import Status, Watch

_CONFIG = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)
"""What the driver's JAX must have in common with the workers', for equal programs."""

_MALLOC = {
    # Large buffers come and go with every microbatch: without these, each is mapped and zeroed
    # anew, 40 to 110 ms for 64 MB.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 31),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
_TELLING = ("compile", "create", "run")
"""Methods whose failures stand behind other failures; their answers are small."""

WATCH = "watch"
"""The concurrency group that asks how a worker is."""

_CAUSE_S = 3.0
"""How long a lost connection may be explained by a process that died."""
_GRACE_S = 0.5
"""What a worker is given to end by itself."""
_START_S = 180.0


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
        from hetpass.runtime.distributed.start_worker import start_worker

        try:
            self._worker = start_worker(start, coordinator)
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
        self._ray, self._own_ray = _connected(options, len(self.seats))
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
            asked = _actor_options(ray, group, seat, options)
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
                {name: getattr(jax.config, name) for name in _CONFIG if hasattr(jax.config, name)},
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


def end_process(pid: int) -> None:
    """Ends a worker of this machine that is still there after a moment."""
    until_s = time.monotonic() + _GRACE_S
    command = Path(f"/proc/{pid}/cmdline")
    with contextlib.suppress(OSError):
        while b"WorkerProcess" in command.read_bytes():
            if time.monotonic() > until_s:
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.01)


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """A Ray that is imported and started here listens at 127.0.0.1 alone."""
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # for this alone: the name tells where it is usual
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _connected(options: WorkerOptions, num_workers: int) -> tuple[Any, bool]:
    """Ray, and whether it was started here."""
    alone = options.address is None and options.interface is None
    with _loopback_only() if alone else contextlib.nullcontext():
        try:
            import ray
        except ImportError as error:
            raise ExecutionError(
                "HP-RUN-RAY",
                "Ray is not installed",
                ways_out=["pip install 'hetpass[ray]'", 'runtime="local"'],
            ) from error
        return ray, _connect(ray, options, num_workers)


def _connect(ray: Any, options: WorkerOptions, num_workers: int) -> bool:
    """Whether a Ray was started here."""
    if ray.is_initialized():
        return False
    common = {"logging_level": "warning", "log_to_driver": False, "configure_logging": False}
    if options.address is not None:
        ray.init(address=options.address, **common)
        return False
    with warnings.catch_warnings():
        # Ray's first process is forked and becomes another program at once: nothing of JAX runs.
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        ray.init(  # which makes a token, and asks for it at every connection
            num_cpus=num_workers,
            include_dashboard=False,
            _node_ip_address=options.interface or "127.0.0.1",
            **common,
        )
    return True


def _actor_options(
    ray: Any, group: DeviceGroup, seat: Seat, options: WorkerOptions
) -> dict[str, Any]:
    """Where Ray is to put a worker, and its environment."""
    variables = {
        **_MALLOC,
        **options.environment.get("", {}),
        **options.environment.get(group.name, {}),
    }
    asked: dict[str, Any] = {
        "num_cpus": 1,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": variables},
    }
    if group.kind.name.startswith("cpu"):
        flags = variables.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
        count = f"--xla_force_host_platform_device_count={seat.num_devices}"
        variables["XLA_FLAGS"] = f"{flags} {count}".strip()
        variables["JAX_PLATFORMS"] = "cpu"
    else:
        accelerator = accelerator_of_kind(group.kind.name, ray.nodes())
        if accelerator is None:
            raise ExecutionError(
                "HP-RUN-RAY",
                f"no node of the Ray cluster has accelerators of the kind {group.kind.name!r}",
                where=f"group {group.name!r}",
                ways_out=["hp.Cluster.from_ray(): the groups as Ray sees them"],
            )
        asked["accelerator_type"] = accelerator
        if accelerator.startswith("TPU"):
            asked["resources"] = {"TPU": seat.num_devices}
        else:
            asked["num_gpus"] = seat.num_devices
    return asked
