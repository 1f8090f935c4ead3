"""`hetpass doctor`: is this installation sound, and what devices does it see?"""

from __future__ import annotations

import platform
import sys
from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hetpass import __version__
from hetpass.ir.quantities import spelled
from hetpass.tools.answer import Answer, Command, Table
from hetpass.tools.terminal import Terminal

NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "networkx")
OPTIONAL = {
    "rich": "tables in colour",
    "matplotlib": "pictures",
    "ray": "several hosts",
    "orbax-checkpoint": "checkpoints",
}
_PYTHONS, _JAXES = ((3, 11), (3, 14)), ((0, 10, 2), (0, 13, 0))


def doctor(arguments: Namespace, terminal: Terminal) -> Answer:
    """Versions, devices, a self-test of every device against numpy, and the links between them."""
    found = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
    faults = _faults(found)
    rows = [("hetpass", __version__, ""), ("python", platform.python_version(), "")]
    rows += [(name, found[name] or "missing", "") for name in NEEDED]
    rows += [(name, found[name] or "not installed", why) for name, why in OPTIONAL.items()]
    parts: list[str | Table] = [Table(("package", "version", "for"), tuple(rows))]
    tested: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    if found["jax"] and found["numpy"]:
        tested, links = _devices(terminal, quick=arguments.quick)
        parts.append(_device_table(tested))
        if links:
            parts.append(_link_table(links))
        faults += [f"device {d['device']}: {d['fault']}" for d in tested if d["fault"]]
        faults += [f"link {x['between']}: arrives changed" for x in links if not x["intact"]]
    parts += [f"fault: {fault}" for fault in faults] or ["all is well"]
    data = {"hetpass": __version__, "python": platform.python_version(), "packages": found,
            "devices": tested, "links": links, "faults": faults}  # fmt: skip
    return Answer(parts, data, good=not faults)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _faults(found: dict[str, str | None]) -> list[str]:
    faults = [f"{name} is not installed: pip install hetpass" for name in NEEDED if not found[name]]
    if not _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        faults.append(f"Python {platform.python_version()} is not supported: 3.11 to 3.14 are")
    jax_version = found["jax"]
    if jax_version is not None:
        numbers = tuple(int(part) for part in jax_version.split(".")[:3] if part.isdigit())
        if not _JAXES[0] <= numbers < _JAXES[1]:
            faults.append(f"jax {jax_version} is not supported: 0.10.2 up to 0.12 are")
    return faults


def _devices(
    terminal: Terminal, *, quick: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    import jax

    from hetpass.ir.cluster_devices import kind_name
    from hetpass.tools.self_test import link_test, self_test

    devices = jax.devices()
    rows = []
    for device in devices:
        with terminal.working(f"testing {device}"):
            fault = self_test(device)
        rows.append({"device": str(device), "kind": kind_name(device),
                     "host": device.process_index, "fault": fault})  # fmt: skip
    pairs = list(zip(devices, devices[1:], strict=False))
    links = []
    for one, other in pairs[:1] if quick else pairs:
        with terminal.working(f"link {one} - {other}"):
            found = link_test(one, other)
        links.append({"between": f"{one} - {other}", "latency_s": found.link.latency_s,
                      "bandwidth": found.link.bandwidth, "intact": found.intact})  # fmt: skip
    return rows, links


def _device_table(rows: list[dict[str, Any]]) -> Table:
    cells = tuple(
        (row["device"], row["kind"], str(row["host"]), row["fault"] or "equal to numpy")
        for row in rows
    )
    return Table(("device", "kind", "host", "self-test"), cells)


def _link_table(links: list[dict[str, Any]]) -> Table:
    cells = tuple(
        (x["between"], spelled(x["latency_s"], "time"), spelled(x["bandwidth"], "bandwidth"),
         "" if x["intact"] else "arrives changed")
        for x in links
    )  # fmt: skip
    return Table(("link", "latency", "bandwidth", ""), cells)


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="one link instead of a chain of all")


COMMANDS = (Command("doctor", "versions, devices, self-tests", _declare, doctor),)
