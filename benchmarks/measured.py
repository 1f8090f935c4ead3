"""The measured figures of benchmarks/data/measured as values of hetpass. No JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetpass.cost.network import MeasuredNetwork
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.ir.profile import LayerSize, LayerTime, ModelProfile

DATA = Path(__file__).parent / "data" / "measured"


@dataclass(frozen=True)
class Machine:
    """A device kind of the figures.

    Attributes:
      catalogue: the kind's name in our catalogue.
      memory_bytes: of a device, as the figures' source has it.
      per_host: devices.
    """

    catalogue: str
    memory_bytes: int
    per_host: int


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "A100-40": Machine("A100-40", 42338615296, 4),
        "A100-80": Machine("A100-80", 85899345920, 4),
        "V100-16": Machine("V100-16", 17179869184, 4),
        "GH-96": Machine("GH200-96", 102625181696, 4),
        "Titan-RTX": Machine("Titan-RTX", 25769803776, 8),
        "RTX-2080": Machine("RTX-2080-Ti", 11811160064, 8),  # 11 GB: the Ti
        "RTX-3090": Machine("RTX-3090", 25769803776, 8),
    }
)


def kind(name: str) -> DeviceKind:
    """A device kind under the name that the figures give it."""
    machine = MACHINES[name]
    return replace(find_kind(machine.catalogue), name=name, memory_bytes=machine.memory_bytes)


def network() -> MeasuredNetwork:
    """Measured bandwidths."""
    return MeasuredNetwork.read(DATA / "network.json")


@cache
def profile(model: str) -> ModelProfile:
    """A model's profile, without measurements that larger microbatches contradict, and with updates
    by layer."""
    return with_updates(ModelProfile.read(DATA, model).settled())


def with_updates(found: ModelProfile) -> ModelProfile:
    """The profile with seconds of updates that are shared out by parameters.

    The figures hold one number for all layers, a head of 20 KB and an embedding of 536 MB alike. It
    is a fourth of what an embedding, two blocks and a head take together: read so, OPT-350 and
    GPT-Neo take the same seconds for a byte on every kind that has both (A100-40: 22.6 and 22.5
    ms/GB, GH-96: 10.4 and 9.9, without tensor parallelism); read as a layer's own, they do not
    (58 and 21, 27 and 9).
    """

    def shared(layers: tuple[LayerTime, ...], sizes: Sequence[LayerSize]) -> tuple[LayerTime, ...]:
        held = [size.parameter_bytes for size in sizes]
        rate = (4 * layers[0].update_s) / (held[0] + held[1] + held[2] + held[-1])
        return tuple(
            replace(time, update_s=rate * mine) for time, mine in zip(layers, held, strict=True)
        )

    seconds = {
        device: {
            (examples, ways): shared(layers, found.sizes[ways])
            for (examples, ways), layers in times.items()
            if ways in found.sizes
        }
        for device, times in found.seconds.items()
    }
    return replace(found, seconds=seconds)


def cluster(hosts: Mapping[str, int]) -> Cluster:
    """One group per device kind, of so many hosts; links stand for the measured peaks."""
    measured = network()
    size = 64e6

    def rate(one: DeviceGroup, other: DeviceGroup) -> Link:
        return Link(0.0, measured.ring_rate(one, other, size, one.devices_per_host))

    groups = []
    for name, count in hosts.items():
        per_host = MACHINES[name].per_host
        alone = DeviceGroup(name, kind(name), 1, per_host)
        inside = Link(0.0, measured.inside_rate(alone, per_host, size))
        groups.append(DeviceGroup(name, kind(name), count, per_host, inside, rate(alone, alone)))
    links = {(a.name, b.name): rate(a, b) for i, a in enumerate(groups) for b in groups[i + 1 :]}
    return Cluster(tuple(groups), links)


@dataclass(frozen=True)
class Step:
    """A training step that was measured.

    Attributes:
      name: of the row.
      model: whose profile tells its layers.
      plan, cluster, batch_size: what ran: every data-parallel replica is a pipeline.
      step_s, sync_s: seconds measured, whole and of gradient synchronisation.
      peak_bytes: on the fullest device.
    """

    name: str
    model: str
    plan: Plan
    cluster: Cluster
    batch_size: int
    step_s: float
    sync_s: float
    peak_bytes: float

    @property
    def site(self) -> str:
        """Where it ran: "clariden" or "mit"."""
        return next(part for part in self.name.split("_") if part in ("clariden", "mit"))


def steps() -> tuple[Step, ...]:
    """Every measured step."""
    rows = json.loads((DATA / "plans.json").read_text(encoding="utf-8"))
    return tuple(_step(row) for row in rows)


def _step(row: Mapping[str, Any]) -> Step:
    used: dict[str, int] = {}
    columns = len(row["stages"][0]["replicas"])
    pipelines = []
    for column in range(columns):
        parts = []
        for stage in row["stages"]:
            first, end = stage["layers"]
            name = stage["replicas"][column]["device"]
            ways = stage["replicas"][column]["tensor_parallel"]
            start = used.get(name, 0) * MACHINES[name].per_host  # a host for each replica
            used[name] = used.get(name, 0) + 1
            mesh = (("data", 1), ("model", ways))
            replica = Replica(name, tuple(range(start, start + ways)), mesh)
            parts.append(StagePlan(first, end - 1, (replica,)))
        microbatches = row["global_batch"] // row["microbatch"] // columns
        pipelines.append(Pipeline(tuple(parts), microbatches))
    return Step(
        row["id"],
        row["model"],
        Plan(tuple(pipelines)),
        cluster(used),
        row["global_batch"],
        row["seconds_per_step"],
        row["gradient_sync_seconds"],
        row["peak_bytes"],
    )
