"""A table and a text as HTML, for notebooks. Whatever stands in a name is text, never markup."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], text: str = ""
) -> str:
    """HTML of a table under a title, and a text below it that can be unfolded."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    more = f"<details><summary>more</summary><pre>{escape(text)}</pre></details>" if text else ""
    return f"<p><b>{escape(title)}</b></p><table><tr>{cells}</tr>{lines}</table>{more}"
