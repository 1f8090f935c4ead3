"""Every code block of the documentation runs, and prints what the page says."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, blocks, expected_outputs, own_folder, run_page

_NUMBER = re.compile(r"[0-9][0-9.,e+-]*")
_RUNS = ("python", "console")
WITH_CODE = [page for page in PAGES if any(block.language in _RUNS for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_a_page_runs_and_prints_what_it_says(page: Path):
    expected = expected_outputs(page)
    with own_folder():
        printed = {block.line: text for block, text in run_page(page)}
    # Another JAX may trace a step to other primitives: pages are printed with this one.
    if version("jax").startswith("0.10."):
        for line, block in expected.items():
            assert shape(printed[line]) == shape(block.text), (
                f"{page.name}:{block.line} prints otherwise; if it should: "
                f"python -m tests.docs.pages {page}"
            )


def shape(text: str) -> list[str]:
    """Lines with their numbers left out: costs may change, what is printed may not."""
    return [re.sub(r"\s+", " ", _NUMBER.sub("#", line)).strip() for line in text.splitlines()]


def test_every_page_is_in_the_table_of_contents():
    index = (PAGES[1].parent / "index.md").read_text()
    for page in PAGES[1:]:
        if page.stem != "index":
            assert f"\n{page.stem}\n" in index, f"docs/index.md does not list {page.stem}"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
