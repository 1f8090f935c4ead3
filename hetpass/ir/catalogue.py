"""The device catalogue: kinds by name, each with the source of its numbers. No JAX.

The data is `device_kinds.toml` beside this file. A cluster file may define further kinds, or
the same ones anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hetpass.ir.device_records import read_kind, read_link
from hetpass.ir.devices import READER, DeviceKind, Link
from hetpass.ir.frozen import Frozen
from hetpass.ir.records import at, nearest, shown


@dataclass(frozen=True)
class Catalogue:
    """Attributes:
    kinds: by name.
    jax_names: from what `device.device_kind` says to the name of a kind.
    network: between hosts, where nothing better is known.
    """

    kinds: Mapping[str, DeviceKind]
    jax_names: Mapping[str, str]
    network: Link


@cache
def catalogue() -> Catalogue:
    """The catalogue that comes with the package, read once."""
    path = Path(__file__).with_name("device_kinds.toml")
    data = READER.load(path)
    kinds: dict[str, DeviceKind] = {}
    jax_names: dict[str, str] = {}
    with at(f"{path.name}:"):
        for name, record in data["kinds"].items():
            with at(name):
                kinds[name] = read_kind(name, record, extra=("jax",))
                jax_names |= {alias: name for alias in record.get("jax", [])}
        network = read_link(data["network"])
    return Catalogue(Frozen(kinds), Frozen(jax_names), network)


def find_kind(name: str, own: Mapping[str, DeviceKind] | None = None) -> DeviceKind:
    """The kind called `name`: of `own` first, else of the catalogue.

    Raises:
      ClusterError: HP-CLUSTER-KIND, with the nearest names.
    """
    known = {**catalogue().kinds, **(own or {})}
    if name not in known:
        READER.refuse(
            "KIND",
            f"the device kind {shown(name)} is not known",
            ways_out=[*nearest(name, known), "define it under 'kinds' in the cluster file"],
        )
    return known[name]
