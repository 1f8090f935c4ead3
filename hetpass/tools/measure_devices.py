"""Micro-benchmarks of the devices that are here: rates, memory, launches, links.

Every figure is the best of several runs: the machine may do other work, and a device is never
faster than it is.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetpass.ir.catalogue import catalogue
from hetpass.ir.cluster_devices import kind_name
from hetpass.ir.device_profile import DeviceProfile, KindProfile
from hetpass.ir.devices import Link
from hetpass.ir.quantities import counted

_ROUNDS = 5


@dataclass(frozen=True)
class Effort:
    """How large the benchmarks are.

    Attributes:
      matrix: edge of the square matrices, by whether the device is a processor.
      memory_bytes: of the array that memory is measured with.
      message_bytes: of the two messages that a link is measured with.
    """

    matrix: int
    memory_bytes: int
    message_bytes: tuple[int, int]


PROCESSOR = Effort(1024, 1 << 26, (1 << 10, 1 << 24))
ACCELERATOR = Effort(8192, 1 << 29, (1 << 10, 1 << 28))
QUICK = Effort(128, 1 << 20, (1 << 8, 1 << 18))


def best_s(function: Callable[[], Any], rounds: int = _ROUNDS) -> float:
    """The least seconds of a call that is waited for; the first one, which compiles, apart."""
    jax.block_until_ready(function())
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure_devices(
    devices: Sequence[Any],
    effort: Effort | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> DeviceProfile:
    """A profile of every kind among `devices`, each measured on its first device.

    Args:
      effort: None: `PROCESSOR` or `ACCELERATOR`, by kind.
      say: told what is being measured.
    """
    by_kind: dict[str, list[Any]] = {}
    for device in devices:
        by_kind.setdefault(kind_name(device), []).append(device)
    kinds = {}
    for name, members in by_kind.items():
        chosen = effort or (PROCESSOR if members[0].platform == "cpu" else ACCELERATOR)
        kinds[name] = _kind(name, members, chosen, say)
    return DeviceProfile(today(), machine(), versions(), kinds)


def _kind(
    name: str, members: Sequence[Any], effort: Effort, say: Callable[[str], None]
) -> KindProfile:
    known = catalogue().kinds.get(name)
    formats = ("float32", "bfloat16", "float16")
    wanted = [d for d in formats if known is None or d in known.peak_flops]
    rates = {}
    for dtype in wanted:
        say(f"{name}: {dtype} matrix products")
        rates[dtype] = _matrix_rate(members[0], dtype, effort.matrix)
    say(f"{name}: memory")
    bandwidth = _memory_bandwidth(members[0], effort.memory_bytes)
    launch_s = best_s(_nothing(members[0]), 4 * _ROUNDS)
    link = None
    if len(members) > 1:
        say(f"{name}: link")
        link = measure_link(members[0], members[1], effort.message_bytes)
    return KindProfile(rates, bandwidth, launch_s, link)


def _on(device: Any, make: Callable[[], Any]) -> Any:
    with jax.default_device(device):
        return jax.block_until_ready(make())


def _matrix_rate(device: Any, dtype: str, edge: int) -> float:
    a = _on(device, lambda: jnp.ones((edge, edge), dtype))
    product = jax.jit(lambda a: a @ a)
    return 2.0 * edge**3 / best_s(lambda: product(a))


def _memory_bandwidth(device: Any, size_bytes: int) -> float:
    """Of reading an array and writing it in place: a new one would be paid for page by page."""
    x = _on(device, lambda: jnp.ones(size_bytes // 4, jnp.float32))
    scaled = jax.jit(lambda x: x * 0.999, donate_argnums=0)
    seconds = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        x = jax.block_until_ready(scaled(x))
        seconds.append(time.perf_counter() - began)
    return 2.0 * size_bytes / min(seconds[1:])


def _nothing(device: Any) -> Callable[[], Any]:
    x = _on(device, lambda: jnp.zeros((), jnp.float32))
    same = jax.jit(lambda x: x + 1)
    return lambda: same(x)


def measure_link(source: Any, target: Any, message_bytes: tuple[int, int]) -> Link:
    """Latency and bandwidth from the seconds of a small and a large message."""
    small, large = message_bytes
    times = []
    for size in (small, large):
        x = jax.block_until_ready(jax.device_put(np.ones(size // 4, np.float32), source))
        times.append(best_s(lambda x=x: jax.device_put(x, target)))  # type: ignore[misc]
    bandwidth = (large - small) / max(times[1] - times[0], 1e-9)
    return Link(times[0], bandwidth)


def today() -> str:
    """The date, as profiles carry it."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def machine() -> str:
    """The machine in words, without its name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {counted(cores or 1, 'core')}"


def versions() -> dict[str, str]:
    """Of what ran."""
    from importlib.metadata import version

    return {
        "python": platform.python_version(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
    }
