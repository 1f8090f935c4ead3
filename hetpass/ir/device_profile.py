"""DeviceProfile: what was measured of devices, links and a program's layers. No JAX.

`hetpass profile` writes it:

    {"format": "hetpass-profile/1", "date": "2026-11-30", "machine": "x86_64, 2 cores",
     "versions": {"jax": "0.10.2"},
     "kinds": {"cpu": {"rates": {"float32": 4.1e10}, "memory_bandwidth": 9e9, "launch_s": 2e-5,
                       "link": {"latency": 1e-5, "bandwidth": 5e9}}},
     "layers": {"3f…": {"cpu": {"attention": {"forward": [0.001, 0.0004],
                                              "backward": [0.002, 0.0009]}}}}}

`layers` is by the program's fingerprint, device kind and layer kind: seconds per microbatch, and
per example in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetpass.errors import FactsError
from hetpass.ir.device_records import link_data, read_link
from hetpass.ir.devices import Link
from hetpass.ir.facts import Amount, Seconds
from hetpass.ir.frozen import Frozen
from hetpass.ir.quantities import counted
from hetpass.ir.records import Reader, at, shown

READER = Reader(FactsError, "HP-PROFILE")

FORMAT = "hetpass-profile/1"

LayerSeconds = Mapping[str, Mapping[str, Seconds]]
"""By device kind, then by layer kind."""


@dataclass(frozen=True)
class KindProfile:
    """One device kind, as measured on one device.

    Attributes:
      rates: FLOP/s of large matrix products, by number format.
      memory_bandwidth: bytes per second, read and written.
      launch_s: seconds of a call that does nothing.
      link: between two devices of the kind; None where there was only one.
    """

    rates: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    launch_s: float
    link: Link | None = None

    def __post_init__(self) -> None:
        with at("rates"):
            rates = READER.values(self.rates, _positive)
        with at("memory_bandwidth"):
            _positive(self.memory_bandwidth)
        with at("launch_s"):
            if READER.number(self.launch_s) < 0:
                READER.refuse("VALUE", f"zero or more is needed, not {self.launch_s}")
        object.__setattr__(self, "rates", Frozen(rates))


@dataclass(frozen=True)
class DeviceProfile:
    """What was measured, where and when.

    Attributes:
      date: of the measurement, "2026-11-30".
      machine: in words.
      versions: of the libraries that ran, by name.
      kinds: by name of the device kind.
      layers: by fingerprint of a program.

    Raises:
      FactsError: HP-PROFILE-…, with the path of the value that is wrong.
    """

    date: str
    machine: str
    versions: Mapping[str, str] = field(hash=False)
    kinds: Mapping[str, KindProfile] = field(hash=False)
    layers: Mapping[str, LayerSeconds] = field(default_factory=dict, hash=False)

    def to_json(self) -> str:
        """JSON text; equal profiles give equal bytes."""
        data = {
            "format": FORMAT,
            "date": self.date,
            "machine": self.machine,
            "versions": dict(self.versions),
            "kinds": {name: _kind_data(kind) for name, kind in self.kinds.items()},
            "layers": {
                program: {
                    device: {name: _seconds_data(s) for name, s in layers.items()}
                    for device, layers in by_device.items()
                }
                for program, by_device in self.layers.items()
            },
        }
        return json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the profile as a JSON file."""
        READER.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> DeviceProfile:
        """Reads a profile from a `.json` file. Nothing in it is ever executed."""
        data = READER.load(path, (".json",))
        with at(f"{path}:"):
            return cls.from_data(data)

    @classmethod
    def from_data(cls, data: Any) -> DeviceProfile:
        """The profile in plain data."""
        record = READER.record(
            data, required=("format", "date", "machine", "versions", "kinds"), optional=("layers",)
        )
        if record["format"] != FORMAT:
            READER.refuse(
                "FORMAT",
                f"the format {shown(record['format'])} is not read here",
                "format",
                ways_out=[f"this version reads {FORMAT!r}: hetpass profile -o FILE"],
            )
        with at("versions"):
            versions = READER.values(record["versions"], READER.text)
        with at("kinds"):
            kinds = READER.values(record["kinds"], _read_kind)
        with at("layers"):
            layers = READER.values(
                record.get("layers", {}),
                lambda devices: READER.values(
                    devices, lambda rows: READER.values(rows, _read_seconds)
                ),
            )
        return cls(
            READER.text(record["date"]), READER.text(record["machine"]), versions, kinds, layers
        )

    def __str__(self) -> str:
        lines = [f"profile of {self.date}, {self.machine}"]
        for name, kind in self.kinds.items():
            rates = ", ".join(f"{d} {r / 1e9:.4g} GFLOP/s" for d, r in kind.rates.items())
            lines.append(
                f"  {name}: {rates}; memory {kind.memory_bandwidth / 1e9:.3g} GB/s; "
                f"launch {kind.launch_s * 1e6:.3g} us"
                + (f"; link {kind.link}" if kind.link else "")
            )
        lines += [
            f"  layers of program {program}: {counted(len(layers), 'kind')} on {device}"
            for program, devices in self.layers.items()
            for device, layers in devices.items()
        ]
        return "\n".join(lines)


def _positive(value: Any) -> float:
    number = READER.number(value)
    if number <= 0:
        READER.refuse("VALUE", f"a number above zero is needed, not {shown(value)}")
    return number


def _kind_data(kind: KindProfile) -> dict[str, Any]:
    data: dict[str, Any] = {
        "rates": dict(kind.rates),
        "memory_bandwidth": kind.memory_bandwidth,
        "launch_s": kind.launch_s,
    }
    return data | ({"link": link_data(kind.link)} if kind.link else {})


def _read_kind(value: Any) -> KindProfile:
    record = READER.record(
        value, required=("rates", "memory_bandwidth", "launch_s"), optional=("link",)
    )
    link = read_link(record["link"]) if "link" in record else None
    return KindProfile(record["rates"], record["memory_bandwidth"], record["launch_s"], link)


def _seconds_data(seconds: Seconds) -> dict[str, list[float]]:
    return {
        name: [amount.per_microbatch, amount.per_example]
        for name, amount in (("forward", seconds.forward), ("backward", seconds.backward))
    }


def _read_seconds(value: Any) -> Seconds:
    record = READER.record(value, required=("forward", "backward"))
    amounts = []
    for name in ("forward", "backward"):
        with at(name):
            numbers = READER.items(record[name], READER.number)
            if len(numbers) != 2:
                READER.refuse("VALUE", "seconds per microbatch and per example are needed")
            amounts.append(Amount(*numbers))
    return Seconds(*amounts)
