"""Between device groups and the nodes of a Ray cluster, as `ray.nodes()` lists them. No JAX, and
no Ray: a node is a mapping with "Alive" and "Resources"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hetpass.ir.catalogue import catalogue
from hetpass.ir.cluster_devices import found_group
from hetpass.ir.devices import READER, DeviceGroup
from hetpass.ir.records import nearest

_PREFIX = "accelerator_type:"

KIND_OF_ACCELERATOR: Mapping[str, str] = MappingProxyType(
    {
        "A100": "A100-40",
        "A100-40G": "A100-40",
        "A100-80G": "A100-80",
        "H100": "H100-80",
        "H200": "H200",
        "L4": "L4",
        "L40S": "L40S",
        "P100": "P100-16",
        "T4": "T4",
        "V100": "V100-16",
        "TPU-V4": "TPU-v4",
        "TPU-V5P": "TPU-v5p",
        "TPU-V6E": "TPU-v6e",
    }
)
"""Names of `ray.util.accelerators` and the catalogue's for them; where Ray's says nothing of the
memory, the smaller one."""


def groups_of_nodes(nodes: Sequence[Mapping[str, Any]]) -> tuple[DeviceGroup, ...]:
    """A group per accelerator and number of accelerators of a node, in the order of the nodes.

    Nodes without accelerators are left out, unless no node has any: each is then a host with one
    CPU device.

    Raises:
      ClusterError: HP-CLUSTER-DEVICES, no node is alive; HP-CLUSTER-KIND, an accelerator that the
        catalogue does not hold.
    """
    alive = [node["Resources"] for node in nodes if node.get("Alive")]
    if not alive:
        READER.refuse("DEVICES", "no node of the Ray cluster is alive", "nodes")
    found = [accelerators_of(resources) for resources in alive]
    hosts = Counter(entry for entry in found if entry is not None) or Counter({("", 1): len(alive)})
    groups = []
    taken: Counter[str] = Counter()
    for (accelerator, count), num_hosts in hosts.items():
        name = accelerator or "cpu"
        kind = KIND_OF_ACCELERATOR.get(accelerator, accelerator) if accelerator else "cpu"
        if kind not in catalogue().kinds:
            READER.refuse(
                "KIND",
                f"the catalogue does not hold Ray's accelerator {accelerator!r}",
                "nodes",
                ways_out=[
                    "describe the cluster in a file, with this kind under 'kinds'",
                    *nearest(accelerator, KIND_OF_ACCELERATOR),
                ],
            )
        taken[name] += 1
        unique = name if taken[name] == 1 else f"{name}-{taken[name]}"
        groups.append(found_group(unique, kind, num_hosts, count))
    return tuple(groups)


def accelerators_of(resources: Mapping[str, float]) -> tuple[str, int] | None:
    """A node's accelerator and how many of them it has; None without any."""
    names = sorted(name[len(_PREFIX) :] for name in resources if name.startswith(_PREFIX))
    count = int(resources.get("GPU", 0) or resources.get("TPU", 0))
    if not names or count == 0:
        return None
    exact = [name for name in names if "-" in name]  # "A100-40G" says more than "A100"
    return (exact or names)[0], count


def accelerator_of_kind(kind: str, nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Ray's name for a device kind, among the accelerators that the nodes have."""
    for node in nodes:
        found = accelerators_of(node["Resources"]) if node.get("Alive") else None
        if found is not None and kind in (found[0], KIND_OF_ACCELERATOR.get(found[0])):
            return found[0]
    return None
