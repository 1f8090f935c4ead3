"""One unit for memory, everywhere that people read: GiB. (Bandwidths are in GB/s, as sold.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetpass.pictures.matplotlib_figure import BYTES, unit_of
from tests.docs.pages import PAGES, ROOT

_DECIMAL = re.compile(r"(?<![/\w])[GT]B\b(?!/s|ps)|\d [GT]B\b(?!/s|ps)")


def _decimal_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [f"{path.name}:{n}: {line}" for n, line in enumerate(lines, 1) if _DECIMAL.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_say_gib(page: Path) -> None:
    assert _decimal_lines(page) == []


@pytest.mark.parametrize("room", ["pictures", "tools", "planner", "backend", "analysis", "runtime"])
def test_messages_say_gib(room: str) -> None:
    found = [
        line
        for path in sorted((ROOT / "hetpass" / room).rglob("*.py"))
        for line in _decimal_lines(path)
        if '"' in line
    ]
    assert found == []


def test_pictures_say_gib() -> None:
    assert unit_of(16 * 2**30, BYTES) == ("GiB", 2**30)
    assert unit_of(3 * 2**20, BYTES)[0] == "MiB"
