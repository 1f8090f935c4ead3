"""Commands on the plan cache: `cache ls`, `cache rm`."""

from __future__ import annotations

import datetime
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hetpass.errors import ToolError
from hetpass.ir.quantities import counted, spelled
from hetpass.tools.answer import Answer, Command, Table
from hetpass.tools.plan_cache import PlanCache
from hetpass.tools.switches import cache_folder
from hetpass.tools.terminal import Terminal


def ls(arguments: Namespace, terminal: Terminal) -> Answer:
    """The cached plans."""
    del arguments, terminal
    cache = PlanCache(cache_folder())
    found = []
    for key, path in cache.entries():
        stat = path.stat()
        when = datetime.datetime.fromtimestamp(stat.st_mtime).isoformat(" ", "minutes")
        found.append((key, _name(path), spelled(stat.st_size, "bytes"), when))
    where = f"{counted(len(found), 'plan')} in {cache.folder}"
    parts: list[str | Table] = [where]
    if found:
        parts.append(Table(("key", "step", "size", "made"), tuple(found)))
    keys = ("key", "step", "size", "made")
    entries = [dict(zip(keys, row, strict=True)) for row in found]
    return Answer(parts, {"folder": str(cache.folder), "entries": entries})


def _name(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return "(cannot be read)"


def rm(arguments: Namespace, terminal: Terminal) -> Answer:
    """Removes cached plans."""
    del terminal
    cache = PlanCache(cache_folder())
    keys = [key for key, _ in cache.entries()]
    chosen = keys if arguments.all else [k for k in keys if k.startswith(tuple(arguments.key))]
    if not arguments.all:
        for wanted in arguments.key:
            if not any(key.startswith(wanted) for key in keys):
                raise ToolError(
                    "HP-TOOL-CACHE",
                    f"no cached plan has a key that starts with {wanted!r}",
                    where=str(cache.folder),
                    ways_out=["hetpass cache ls shows the keys", "hetpass cache rm --all"],
                )
    if not (arguments.key or arguments.all):
        raise ToolError(
            "HP-TOOL-CACHE", "nothing was named that could be removed", where=str(cache.folder),
            ways_out=["hetpass cache rm KEY", "hetpass cache rm --all"],
        )  # fmt: skip
    removed = [key for key in chosen if cache.remove(key)]
    return Answer([f"removed {counted(len(removed), 'plan')}"], {"removed": removed})


def _declare_nothing(parser: ArgumentParser) -> None:
    del parser


def _declare_rm(parser: ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", nargs="*", help="or the start of one")
    parser.add_argument("--all", action="store_true")


COMMANDS = (
    Command("cache ls", "the cached plans", _declare_nothing, ls),
    Command("cache rm", "remove cached plans", _declare_rm, rm),
)
