"""Two or three groups of one device or a few, and equal layers with known seconds."""

from __future__ import annotations

from hetpass.cost.analytic import PEAK
from hetpass.cost.tables import TableOptions
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.facts import ProgramFacts

FREE = Link(0.0, 1e18)
EXACT = TableOptions(assumed=PEAK, recompute=("none",))
BATCH = 8


def kind(name, memory=1e9, dtypes=("float32",)):
    return DeviceKind(name, dict.fromkeys(dtypes, 1.0), memory, 1e18)


def cluster(sizes=None, memory=None, link=FREE, links=None):
    """Groups by name and number of devices; each kind is called like its group."""
    sizes = sizes or {"fast": 1, "slow": 1}
    memory = memory or {}
    groups = tuple(
        DeviceGroup(name, kind(name, memory.get(name, 1e9)), 1, count, FREE)
        for name, count in sizes.items()
    )
    return Cluster(groups, links or {}, link)


def equal_layers(count=6, seconds=None, **bytes_):
    """Layers whose forward and backward take these seconds together, for one example."""
    seconds = seconds or {"fast": 0.5, "slow": 1.0}
    record = {"seconds": {name: (0.4 * s, 0.6 * s) for name, s in seconds.items()}, **bytes_}
    return ProgramFacts.synthetic(count * [record], BATCH)


def stages_text(plan):
    return " | ".join(
        f"{s.replicas[0].group}[{len(s.replicas[0].devices)}]: {s.first_layer}-{s.last_layer}"
        for s in plan.pipelines[0].stages
    )
