"""`hetpass profile`: measures the devices that are here, and the layers of a step on them.

The figures go into a dated JSON file that `hetpass plan --profile` takes.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetpass.errors import HetpassError
from hetpass.ir.device_profile import DeviceProfile
from hetpass.ir.quantities import spelled
from hetpass.tools.answer import Answer, Command, Table
from hetpass.tools.bundle import not_written
from hetpass.tools.steps import declare_step
from hetpass.tools.target import load_target
from hetpass.tools.terminal import Terminal


def profile(arguments: Namespace, terminal: Terminal) -> Answer:
    """Rates, memory and links of the devices; with a step, the seconds of its layers too."""
    import jax

    from hetpass.tools.measure_devices import QUICK, measure_devices
    from hetpass.tools.measure_layers import measure_layers

    found = measure_devices(jax.devices(), QUICK if arguments.quick else None, terminal.progress)
    if arguments.step:
        target = load_target(arguments)
        layers = measure_layers(target, arguments, terminal.progress)
        found = replace(found, layers=layers)
    out = Path(arguments.output or f"profile-{found.date}.json")
    try:
        found.save(out)
    except HetpassError as error:
        raise not_written(error) from None
    with terminal.working(""):
        pass
    parts: list[str | Table] = [_kinds(found), *_layers(found), f"wrote {out}"]
    return Answer(parts, {"path": str(out), **_data(found)})


def _kinds(found: DeviceProfile) -> Table:
    formats = sorted({d for kind in found.kinds.values() for d in kind.rates}, reverse=True)
    rows = tuple(
        (
            name,
            *(spelled(k.rates[d], "flops") if d in k.rates else "" for d in formats),
            spelled(k.memory_bandwidth, "bandwidth"),
            spelled(k.launch_s, "time"),
            str(k.link or ""),
        )
        for name, k in found.kinds.items()
    )
    head = ("kind", *formats, "memory", "launch", "link")
    return Table(head, rows, f"measured on {found.date}, {found.machine}")


def _layers(found: DeviceProfile) -> list[Table]:
    tables = []
    for program, devices in found.layers.items():
        rows = tuple(
            (
                layer,
                device,
                spelled(s.forward.per_microbatch, "time"),
                spelled(s.forward.per_example, "time"),
                spelled(s.backward.per_microbatch, "time"),
                spelled(s.backward.per_example, "time"),
            )
            for device, layers in devices.items()
            for layer, s in layers.items()
        )
        head = ("layer kind", "on", "F", "and per example", "B", "and per example")
        tables.append(Table(head, rows, f"layers of program {program}, per microbatch"))
    return tables


def _data(found: DeviceProfile) -> dict[str, Any]:
    import json

    return dict(json.loads(found.to_json()))


def _declare(parser: ArgumentParser) -> None:
    declare_step(parser, optional=True)
    parser.add_argument("-o", "--output", metavar="FILE", help="default: profile-DATE.json")
    parser.add_argument("--quick", action="store_true", help="small sizes: rough figures, fast")


COMMANDS = (Command("profile", "measure the devices that are here, and a step's layers",
                    _declare, profile),)  # fmt: skip
