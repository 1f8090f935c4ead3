"""Metis (Um et al., USENIX ATC 2024): profiles, clusters, ranked plans.

Profile: one JSON per device type, tensor parallelism and microbatch, forward and backward in one
number per layer. Cluster: a host file ("IP slots=4" or "IP 4" per line) and a JSON by IP with GB/s
(or bytes per second) and GB. Plans: lines

    rank, cost, (<DeviceType.T4: 't4'>, …), [8, 8], [(4, 2), (4, 2)], 8, [0, 4, 10]

of device sequence, devices per stage, (data, tensor) parallelism, microbatches, edges of layers.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetpass.ir.catalogue import catalogue
from hetpass.ir.cluster import Cluster, DeviceGroup, Link
from hetpass.ir.devices import DeviceKind
from hetpass.ir.facts import Amount, ProgramFacts, Seconds
from hetpass.ir.plan import Plan
from third_party.stages import ReadStage, as_plan, group_of_kind, refuse

_NAME = re.compile(r"DeviceType\.(?P<device>\w+?)_tp(?P<ways>\d+)_bs(?P<examples>\d+)\.json")
_DEVICE = re.compile(r"DeviceType\.(\w+)")
_BACKWARD_SHARE = 2 / 3
"""Of a layer's milliseconds, where forward and backward stand in one number."""

_LATENCY_S = 20e-6
"""Metis has no latencies; this is assumed."""


def read_profiles(folder: str | Path, batch_size: int) -> ProgramFacts:
    """Facts of the profiled model: seconds by device kind, fitted over microbatches at tp 1.

    Activation bytes are what the layer's memory grows by with the microbatch.

    Args:
      batch_size: B, of the step to be planned.

    Raises:
      PlanError: HP-PLAN-FOREIGN, there is no profile of tensor parallelism 1.
    """
    found: dict[str, dict[int, Any]] = {}
    ways = 1
    for path in sorted(Path(folder).glob("DeviceType.*.json")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        ways = max(ways, int(match["ways"]))
        if match["ways"] == "1":
            data = json.loads(path.read_text(encoding="utf-8"))
            found.setdefault(match["device"], {})[int(match["examples"])] = data
    if not found:
        raise refuse("there is no profile of tensor parallelism 1", str(folder))
    any_device = next(iter(found.values()))
    parameters = next(iter(any_device.values()))["model"]["parameters"][
        "parameters_per_layer_bytes"
    ]
    layers = []
    for index, size in enumerate(parameters):
        seconds = {kind_name(d): _seconds(by_size, index) for d, by_size in found.items()}
        memory = {
            b: d["execution_memory"]["layer_memory_total_mb"][index] * 1e6
            for b, d in any_device.items()
        }
        layers.append(
            {
                "kind": f"layer of {size} bytes",
                "parameter_bytes": float(size),
                "gradient_bytes": float(size),
                "state_bytes": 2.0 * size,
                "activation_bytes": _line(memory),
                "seconds": seconds,
                "most_tensor_parallel": ways,
            }
        )
    return ProgramFacts.synthetic(layers, batch_size)


def _seconds(by_size: dict[int, Any], index: int) -> Seconds:
    times = {
        b: d["execution_time"]["layer_compute_total_ms"][index] / 1e3 for b, d in by_size.items()
    }
    line = _line(times)
    parts = [
        Amount(line.per_microbatch * share, line.per_example * share)
        for share in (1 - _BACKWARD_SHARE, _BACKWARD_SHARE)
    ]
    return Seconds(*parts)


def _line(values: dict[int, float]) -> Amount:
    """Through the smallest and the largest microbatch."""
    low, high = min(values), max(values)
    if low == high:
        return Amount(0.0, values[low] / low)
    each = max(0.0, (values[high] - values[low]) / (high - low))
    return Amount(max(0.0, values[low] - each * low), each)


def kind_name(device: str) -> str:
    """A kind of our catalogue for Metis's name, the smallest where memory is not said."""
    names = [n for n in catalogue().kinds if n.lower().split("-")[0] == device.lower()]
    return min(names, key=lambda n: catalogue().kinds[n].memory_bytes) if names else device


def read_cluster(host_file: str | Path, cluster_file: str | Path) -> Cluster:
    """One group per device type; bandwidths below 1e6 are GB/s.

    Raises:
      PlanError: HP-PLAN-FOREIGN, a host is not in the cluster file.
    """
    machines = json.loads(Path(cluster_file).read_text(encoding="utf-8"))
    hosts: list[tuple[str, int]] = []
    for line in Path(host_file).read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"\s*(\S+)\s+(?:slots=)?(\d+)\s*", line)
        if match:
            hosts.append((match[1], int(match[2])))
    groups: dict[tuple[str, int], int] = Counter()
    about: dict[str, Any] = {}
    for name, slots in hosts:
        if name not in machines:
            raise refuse(f"the cluster file says nothing of {name!r}", str(cluster_file))
        kind = machines[name]["instance_type"]
        about[kind] = machines[name]
        groups[kind, slots] += 1
    made = []
    between = []
    for (kind, slots), count in groups.items():
        machine = about[kind]
        inside = Link(_LATENCY_S / 2, _bandwidth(machine["intra_bandwidth"]))
        across = Link(_LATENCY_S, _bandwidth(machine["inter_bandwidth"]))
        between.append(across)
        name = kind.lower() if sum(k == kind for k, _ in groups) == 1 else f"{kind.lower()}x{slots}"
        made.append(DeviceGroup(name, _kind(kind, machine["memory"]), count, slots, inside, across))
    return Cluster(tuple(made), default_link=min(between, key=lambda link: link.bandwidth))


def _bandwidth(value: float) -> float:
    return value if value > 1e6 else value * 1e9


def _kind(device: str, memory_gb: float) -> DeviceKind:
    """Of the catalogue, with the memory that Metis was told."""
    known = catalogue().kinds.get(kind_name(device))
    if known is None:
        raise refuse(f"{device!r} is not in the device catalogue", "instance_type")
    return replace(known, memory_bytes=int(memory_gb * 2**30), source="Metis's cluster file")


def read_plans(text: str, cluster: Cluster) -> list[Plan]:
    """The ranked plans in what Metis prints, best first; those that we cannot say are left out.

    Raises:
      PlanError: HP-PLAN-FOREIGN, no line is a plan that we can say.
    """
    plans = []
    reasons = []
    for line in text.splitlines():
        match = re.match(r"\d+, [\d.]+, (\(.*?\)), (\[.*)$", line)
        if match is None:
            continue
        sequence = _DEVICE.findall(match[1])
        sizes, ways, count, edges = ast.literal_eval(f"({match[2]})")
        try:
            plans.append(_plan(sequence, sizes, ways, count, edges, cluster, line[:40]))
        except Exception as refusal:
            reasons.append(str(refusal))
    if not plans:
        raise refuse("no line is a plan that can be said here", "ranked plans", *reasons[:3])
    return plans


def _plan(
    sequence: list[str],
    sizes: list[int],
    ways: list[tuple[int, int]],
    count: int,
    edges: list[int],
    cluster: Cluster,
    where: str,
) -> Plan:
    left = {d: cluster.group(group_of_kind(cluster, d, where)).num_devices for d in sequence}
    stages = []
    order = list(sequence)
    for size, (data, model), end in zip(sizes, ways, edges[1:], strict=True):
        while order and left[order[0]] == 0:
            order.pop(0)
        if not order or left[order[0]] < size:
            raise refuse("a stage lies across unlike kinds", where)
        left[order[0]] -= size
        stages.append(ReadStage(end, group_of_kind(cluster, order[0], where), data, model))
    return as_plan(stages, cluster, count, where)
