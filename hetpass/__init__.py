"""hetpass: a JAX train step, written for one device, as a pipeline over unlike machines.

The public names are loaded when they are first used, so that reading a cluster file or a plan
imports no JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpass.api import (
        Compiled,
        Options,
        Planned,
        Traced,
        het_parallelize,
        stage_boundary,
    )
    from hetpass.comparison import verify
    from hetpass.errors import HetpassError
    from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
    from hetpass.ir.plan import Plan
    from hetpass.runtime.distributed.remote_array import fetch
    from hetpass.runtime.distributed.workers import WorkerOptions, Workers
    from hetpass.runtime.watchdog import Limits

__version__ = "0.1.0"

_HOMES = {
    "hetpass.api": (
        "Compiled",
        "Options",
        "Planned",
        "Traced",
        "het_parallelize",
        "stage_boundary",
    ),
    "hetpass.comparison": ("verify",),
    "hetpass.errors": ("HetpassError",),
    "hetpass.ir.cluster": ("Cluster", "DeviceGroup", "DeviceKind", "Link"),
    "hetpass.ir.plan": ("Plan",),
    "hetpass.runtime.distributed.remote_array": ("fetch",),
    "hetpass.runtime.distributed.workers": ("WorkerOptions", "Workers"),
    "hetpass.runtime.watchdog": ("Limits",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Cluster",
    "Compiled",
    "DeviceGroup",
    "DeviceKind",
    "HetpassError",
    "Limits",
    "Link",
    "Options",
    "Plan",
    "Planned",
    "Traced",
    "WorkerOptions",
    "Workers",
    "fetch",
    "het_parallelize",
    "stage_boundary",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hetpass' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
