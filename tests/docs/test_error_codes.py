"""docs/troubleshooting.md lists every code that the source raises, and no other."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
_CODE = re.compile(r"HP-[A-Z]+(?:-[A-Z0-9]+)+")


def raised() -> set[str]:
    """Codes that stand in the source, and those that readers put together."""
    shared = words_of(ROOT / "hetpass/ir/records.py")
    found = {f"HP-…-{word}" for word in shared}
    for path in (ROOT / "hetpass").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _CODE.fullmatch(node.value)
        }
        own = words_of(path) - shared
        if own and path.name != "records.py":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            area = importlib.import_module(name).READER.area
            found |= {f"{area}-{word}" for word in own}
    areas = {"HP-CLUSTER", "HP-PLAN", "HP-FACTS", "HP-PROFILE", "HP-NETWORK", "HP-TARGET"}
    return found - areas - {f"{area}-{word}" for area in areas for word in shared - {"TYPE"}}


def words_of(path: Path) -> set[str]:
    """The first arguments of calls of `refuse`."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "refuse"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }


def listed() -> set[str]:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    return {code for row in rows for code in re.findall(r"`(HP-[A-Z…]+-[A-Z0-9-]+)`", row)}


def test_every_code_is_listed():
    missing = sorted(raised() - listed())
    assert not missing, f"add to docs/troubleshooting.md: {missing}"


def test_no_code_is_listed_that_nothing_raises():
    stale = sorted(listed() - raised())
    assert not stale, f"take out of docs/troubleshooting.md: {stale}"
