"""Tables of stages from measured seconds and bytes of layers. No JAX.

What `cost.analytic` and `cost.range_bytes` derive from FLOPs and sizes, read from a profile:
seconds at the microbatch and tensor parallelism of a row, bytes of a device of that row.
"""

from __future__ import annotations

import math

import numpy as np

from hetpass.cost.analytic import LayerSeconds, Submesh, gradient_sync_s
from hetpass.cost.layer_costs import MemoryOverhead
from hetpass.cost.range_bytes import RangeBytes, over_ranges
from hetpass.ir.devices import DeviceGroup
from hetpass.ir.profile import ModelProfile


def profiled_seconds(
    profile: ModelProfile, group: DeviceGroup, submesh: Submesh, examples: float
) -> list[LayerSeconds]:
    """Every layer for microbatches of `examples`; infinite where nobody measured it."""
    ways = submesh.model
    times = profile.times(group.kind.name, ways, examples / submesh.data)
    sizes = profile.sizes.get(ways)
    if times is None or sizes is None:
        return [LayerSeconds(math.inf, math.inf, 0.0, 0.0)] * profile.num_layers
    return [
        LayerSeconds(
            time.forward_s,
            time.backward_s,
            gradient_sync_s(ways * size.parameter_bytes, group, submesh, ways),
            time.update_s,
        )
        for time, size in zip(times, sizes, strict=True)
    ]


def profiled_bytes(
    profile: ModelProfile,
    submesh: Submesh,
    examples: float,
    recompute: str,
    memory: MemoryOverhead | None = None,
) -> RangeBytes:
    """Bytes per device of every range of layers, as `range_bytes` gives them; infinite where the
    tensor parallelism was not measured. What the runtime holds is counted as fixed."""
    memory = memory or MemoryOverhead()
    share = examples / submesh.data
    sizes = profile.sizes.get(submesh.model)
    if sizes is None:
        nothing = over_ranges([math.inf] * profile.num_layers)
        return RangeBytes(nothing, nothing)
    parameters = [memory.parameter_copies * size.parameter_bytes for size in sizes]
    fixed = over_ranges(parameters) + memory.fixed_bytes
    held = over_ranges([memory.activations * share * size.held_bytes for size in sizes])
    if recompute == "none":
        return RangeBytes(fixed, held)
    inputs = np.array([0.0] + [share * size.output_bytes for size in sizes[:-1]])
    return RangeBytes(fixed + held, np.where(np.isfinite(held), inputs[:, None], np.inf))
