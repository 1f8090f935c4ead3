"""The sorts of files: how each is told, what reads it, which commands take it. No JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from hetpass.cost.network import MeasuredNetwork
from hetpass.errors import HetpassError, ToolError
from hetpass.ir.cluster import Cluster
from hetpass.ir.device_profile import DeviceProfile
from hetpass.ir.devices import READER
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Sort(Generic[T]):
    """A sort of file.

    Attributes:
      words: for people.
      told_by: keys, any of which tells it where the file does not name its format.
      read: makes a value of a file.
      taken_by: command lines that take such a FILE.
    """

    words: str
    told_by: tuple[str, ...]
    read: Callable[[Path], T]
    taken_by: tuple[str, ...]

    def load(self, path: str | Path) -> T:
        """The value of a file that is to be of this sort.

        Raises:
          ToolError: HP-TOOL-SORT, the file is of another sort.
          HetpassError: it cannot be read, or is not legal.
        """
        path = Path(path)
        try:
            return self.read(path)
        except HetpassError:
            other = _other_sort(path, self)
            if other is None:
                raise
        raise ToolError(
            "HP-TOOL-SORT",
            f"{path} holds {other.words}, not {self.words}",
            where=str(path),
            ways_out=[line.replace("FILE", str(path), 1) for line in other.taken_by],
        )


PLAN = Sort(
    "a plan",
    ("pipelines",),
    Plan.load,
    ("hetpass explain FILE; so do simulate, plot, trace, diff and whatif",),
)
FACTS = Sort(
    "facts of a program",
    ("batch_size", "layers"),
    ProgramFacts.load,
    ("hetpass explain PLAN --facts FILE", "hetpass validate FILE"),
)
PROFILE = Sort(
    "a profile",
    ("date", "machine"),
    DeviceProfile.load,
    ("hetpass plan STEP --cluster CLUSTER --profile FILE", "hetpass validate FILE"),
)
NETWORK = Sort(
    "a measured network",
    ("sizes_MB", "inside_node"),
    MeasuredNetwork.read,
    ("hetpass validate FILE",),
)
CLUSTER = Sort(
    "a cluster",
    ("groups", "kinds", "links", "default_link"),
    Cluster.from_file,
    ("hetpass cluster show FILE", "hetpass plan STEP --cluster FILE -o plan.json"),
)

SORTS: Mapping[str, Sort[Any]] = MappingProxyType(
    {"plan": PLAN, "facts": FACTS, "profile": PROFILE, "network": NETWORK, "cluster": CLUSTER}
)
"""By the word of their format, "hetpass-plan/1"; in the order in which keys are tried."""

_FORMAT = re.compile(r'"format"\s*:\s*"hetpass-([a-z]+)/')


def sort_of(path: Path) -> tuple[str, str]:
    """The name of a file's sort in `SORTS`, and what tells it.

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
        raise with_detail(error, f"files that are known: {known}") from None
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


def with_detail(error: HetpassError, detail: str) -> HetpassError:
    """The same refusal with one more line."""
    details = [*error.details, detail]
    return type(error)(
        error.code, error.what, where=error.where, details=details, ways_out=error.ways_out
    )


def _other_sort(path: Path, wanted: Sort[Any]) -> Sort[Any] | None:
    """What a file is, if that can be told and is not what is wanted."""
    if not path.is_file():
        return None
    try:
        name, _ = sort_of(path)
    except HetpassError:
        return None
    return SORTS[name] if SORTS[name] is not wanted else None


def _start(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(4096).decode("utf-8", "replace")
    except OSError:
        return ""
