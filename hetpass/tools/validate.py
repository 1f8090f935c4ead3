"""`hetpass validate`: what sort of file this is, and whether it is a legal one. No JAX."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetpass.cost.network import MeasuredNetwork
from hetpass.errors import HetpassError, ToolError
from hetpass.ir.cluster import Cluster
from hetpass.ir.device_profile import DeviceProfile
from hetpass.ir.devices import READER
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import counted
from hetpass.tools.answer import Answer, Command
from hetpass.tools.bundle import declare_origin, read_bundle
from hetpass.tools.terminal import Terminal


@dataclass(frozen=True)
class Sort:
    """A sort of file.

    Attributes:
      words: for people.
      told_by: keys, any of which tells it where the file does not name its format.
      read: a file of this sort; what it holds, in words, and as data.
    """

    words: str
    told_by: tuple[str, ...]
    read: Callable[[Path, Namespace], tuple[str, Mapping[str, Any]]]


def _cluster(path: Path, arguments: Namespace) -> tuple[str, Mapping[str, Any]]:
    del arguments
    cluster = Cluster.from_file(path)
    return str(cluster), {"devices": cluster.num_devices}


def _plan(path: Path, arguments: Namespace) -> tuple[str, Mapping[str, Any]]:
    plan = Plan.load(path)
    if arguments.facts and arguments.cluster:
        read_bundle(arguments, str(path))
    elif arguments.cluster:
        plan.check(Cluster.from_file(arguments.cluster), plan.num_layers)
    return str(plan), {"stages": plan.num_stages}


def _facts(path: Path, arguments: Namespace) -> tuple[str, Mapping[str, Any]]:
    del arguments
    facts = ProgramFacts.load(path)
    return str(facts), {"layers": facts.num_layers}


def _profile(path: Path, arguments: Namespace) -> tuple[str, Mapping[str, Any]]:
    del arguments
    profile = DeviceProfile.load(path)
    return str(profile), {"device_kinds": len(profile.kinds)}


def _network(path: Path, arguments: Namespace) -> tuple[str, Mapping[str, Any]]:
    del arguments
    network = MeasuredNetwork.read(path)
    inside, between = len(network.inside), len(network.between)
    text = f"bandwidths by size: {counted(inside, 'curve')} inside of hosts, {between} between"
    return text, {"inside": inside, "between": between}


SORTS: Mapping[str, Sort] = MappingProxyType(
    {
        "plan": Sort("a plan", ("pipelines",), _plan),
        "facts": Sort("facts of a program", ("batch_size", "layers"), _facts),
        "profile": Sort("a profile", ("date", "machine"), _profile),
        "network": Sort("a measured network", ("sizes_MB", "inside_node"), _network),
        "cluster": Sort("a cluster", ("groups", "kinds", "links", "default_link"), _cluster),
    }
)
"""By the word of their format, "hetpass-plan/1"; in the order in which keys are tried."""

_FORMAT = re.compile(r'"format"\s*:\s*"hetpass-([a-z]+)/')


def validate(arguments: Namespace, terminal: Terminal) -> Answer:
    """Tells what sort of file it is, reads it, and says what is wrong with it."""
    del terminal
    path = Path(arguments.file)
    name, because = _told(path)
    sort = SORTS[name]
    try:
        text, data = sort.read(path, arguments)
    except HetpassError as error:
        raise _with(error, f"the file was read as {sort.words}: {because}") from None
    return Answer(
        [f"{path}: {sort.words}, and legal", text], {"path": str(path), "kind": name, **data}
    )


def _with(error: HetpassError, detail: str) -> HetpassError:
    """The same refusal with one more line."""
    details = [*error.details, detail]
    return type(error)(
        error.code, error.what, where=error.where, details=details, ways_out=error.ways_out
    )


def _told(path: Path) -> tuple[str, str]:
    """The sort of a file, and what tells it.

    Raises:
      HetpassError: it cannot be read, or is of no sort that is known.
    """
    named = _FORMAT.search(_start(path)) if path.suffix.lower() == ".json" else None
    if named is not None and named[1] in SORTS:
        return named[1], f"its format is hetpass-{named[1]}"
    if path.suffix.lower() == ".toml":
        return "cluster", "it is TOML"
    try:
        data = READER.load(path)
    except HetpassError as error:
        known = ", ".join(sort.words for sort in SORTS.values())
        raise _with(error, f"files that are known: {known}") from None
    keys = list(data) if isinstance(data, dict) else []
    for name, sort in SORTS.items():
        own = [key for key in sort.told_by if key in keys]
        if own:
            return name, f"it has the key {own[0]!r}"
    raise ToolError(
        "HP-TOOL-SORT",
        "this is no file of hetpass",
        where=str(path),
        details=[f"its keys are {', '.join(map(repr, keys[:8]))}" if keys else "it has no keys"],
        ways_out=[
            f"{sort.words}: a file with {' or '.join(map(repr, sort.told_by[:2]))}"
            for sort in SORTS.values()
        ],
    )


def _start(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(4096).decode("utf-8", "replace")
    except OSError:
        return ""


def _declare(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a cluster (.toml, .json); a plan, facts, a profile or a network (.json)",
    )
    declare_origin(parser)


COMMANDS = (
    Command(
        "validate",
        "check a file: a cluster, a plan, facts, a profile or a network",
        _declare,
        validate,
    ),
)
