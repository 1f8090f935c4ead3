"""What XLA asks of a GPU that is not here, written from published specifications.

XLA compiles for a GPU without one from a small text (its `GpuTargetConfigProto`). The numbers are
in `gpu_targets.toml` beside this file, with their sources, and in the catalogue of device kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetpass.errors import ClusterError
from hetpass.ir.devices import DeviceKind
from hetpass.ir.records import Reader, nearest

READER = Reader(ClusterError, "HP-TARGET")

_KIB, _MIB = 1024, 1024**2
_FIELDS = ("capability", "cores", "lanes", "clock", "l2", "shared", "threads")


@cache
def gpu_targets() -> Mapping[str, Mapping[str, Any]]:
    """By device kind, the figures of the file."""
    data = READER.load(Path(__file__).with_name("gpu_targets.toml"), (".toml",))
    return MappingProxyType(READER.values(data, lambda row: READER.record(row, required=_FIELDS)))


def gpu_target(kind: DeviceKind) -> str:
    """The text for one kind.

    Raises:
      ClusterError: HP-TARGET-KIND, nobody wrote down what XLA asks of this kind.
    """
    figures = gpu_targets().get(kind.name)
    if figures is None:
        READER.refuse(
            "KIND",
            f"the kind {kind.name!r} cannot be compiled for without a device",
            ways_out=nearest(kind.name, gpu_targets()),
        )
    major, minor = figures["capability"]
    per_core, per_block = figures["shared"]
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIB,
        "shared_memory_per_core": per_core * _KIB,
        "threads_per_core_limit": figures["threads"],
        "core_count": figures["cores"],
        "fpus_per_core": figures["lanes"],
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(kind.memory_bandwidth),
        "l2_cache_size": int(figures["l2"] * _MIB),
        "clock_rate_ghz": figures["clock"],
        "device_memory_size": kind.memory_bytes,
        "shared_memory_per_block_optin": per_block * _KIB,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    lines = [f"  {name}: {value}" for name, value in device.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 8 }",
            f'device_description_str: "{kind.name}"',
            "",
        ]
    )
