"""Ray itself: found or started, and what it is asked for per worker."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetpass.errors import ExecutionError
from hetpass.ir.cluster import DeviceGroup
from hetpass.ir.cluster_ray import accelerator_of_kind
from hetpass.runtime.distributed.worker import Seat
from hetpass.runtime.distributed.workers import WorkerOptions

_MALLOC = {
    # Large buffers come and go with every microbatch: without these, each is mapped and zeroed
    # anew, 40 to 110 ms for 64 MB.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 31),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
_GRACE_S = 0.5
"""What a worker is given to end by itself."""


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


def connected(options: WorkerOptions, num_workers: int) -> tuple[Any, bool]:
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


def actor_options(
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
