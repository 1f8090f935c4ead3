"""`hetpass validate`: what sort of file this is, and whether it is a legal one. No JAX."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetpass.cost.network import MeasuredNetwork
from hetpass.errors import HetpassError
from hetpass.ir.cluster import Cluster
from hetpass.ir.device_profile import DeviceProfile
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import counted
from hetpass.tools.answer import Answer, Command
from hetpass.tools.bundle import declare_origin, read_bundle
from hetpass.tools.sorts import CLUSTER, SORTS, sort_of, with_detail
from hetpass.tools.terminal import Terminal


def _cluster(path: Path, arguments: Namespace) -> tuple[str, Mapping[str, Any]]:
    del arguments
    cluster = Cluster.from_file(path)
    return str(cluster), {"devices": cluster.num_devices}


def _plan(path: Path, arguments: Namespace) -> tuple[str, Mapping[str, Any]]:
    plan = Plan.load(path)
    if arguments.facts and arguments.cluster:
        read_bundle(arguments, str(path))
    elif arguments.cluster:
        plan.check(CLUSTER.load(arguments.cluster), plan.num_layers)
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


_READ: Mapping[str, Callable[[Path, Namespace], tuple[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "plan": _plan,
        "facts": _facts,
        "profile": _profile,
        "network": _network,
        "cluster": _cluster,
    }
)
"""By the names of `SORTS`: what a file holds, in words, and as data."""


def validate(arguments: Namespace, terminal: Terminal) -> Answer:
    """Tells what sort of file it is, reads it, and says what is wrong with it."""
    del terminal
    path = Path(arguments.file)
    name, because = sort_of(path)
    words = SORTS[name].words
    try:
        text, data = _READ[name](path, arguments)
    except HetpassError as error:
        raise with_detail(error, f"the file was read as {words}: {because}") from None
    return Answer([f"{path}: {words}, and legal", text], {"path": str(path), "kind": name, **data})


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
