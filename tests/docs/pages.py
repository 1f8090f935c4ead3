"""The code blocks of the documentation, run in order.

A fence may be preceded by a comment that says what it is:

    <!-- file: mixed.toml -->   its text is a file of the folder that the page runs in
    <!-- refused -->            it must end in a refusal
    <!-- printed -->            it is what the block before it printed
    <!-- elsewhere: why -->     it is not run

Blocks of `python` share one namespace per page, in which `hp`, `jax`, `jnp` and `optax` are
imported, what the quickstart's `my_step.py` defines is there, `state` and `batch` are its example
arguments, and `cluster` is one of four fast and two slow devices; in `console` blocks lines that
start with "$ hetpass" are run. Other languages are only shown.

    python -m tests.docs.pages docs/how_it_works.md     writes what blocks print into the page
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
QUICKSTART = ROOT / "docs" / "quickstart.md"

_FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^>]*) -->\n)?^```(?P<language>[a-z{}]*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
      note: of the comment before it; "" without one.
      line: of the page that it begins at.
      span: of its text in the page.
    """

    language: str
    note: str
    text: str
    line: int
    span: tuple[int, int]


def blocks(page: Path) -> tuple[Block, ...]:
    """The blocks of a page, in order."""
    source = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(source):
        line = source.count("\n", 0, match.start("text"))
        note = (match["note"] or "").strip()
        found.append(Block(match["language"], note, match["text"], line, match.span("text")))
    return tuple(found)


class Failure(AssertionError):
    """A block that did not do what the page says."""


def run_page(page: Path) -> Iterator[tuple[Block, str]]:
    """Runs a page in the current folder; every block that is run with what it printed."""
    namespace = _namespace()
    for block in blocks(page):
        if block.note.startswith("elsewhere"):
            continue
        if block.note.startswith("file: "):
            Path(block.note.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
            continue
        runs = {"python": _run_python, "console": _run_console}.get(block.language)
        if runs is None:
            continue
        out = io.StringIO()
        refused = False
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                runs(block, namespace, f"{page.name}:{block.line}")
            except Refusal as refusal:
                refused = True
                out.write(f"{refusal}\n")
        if refused != (block.note == "refused"):
            raise Failure(f"{page.name}:{block.line}: refused is {refused}\n{out.getvalue()}")
        yield block, out.getvalue()


class Refusal(Exception):
    """What a block ended with."""


def _namespace() -> dict[str, Any]:
    """What every page may use, and the quickstart's files in the current folder."""
    import jax
    import jax.numpy as jnp
    import optax

    import hetpass as hp

    namespace: dict[str, Any] = {"hp": hp, "jax": jax, "jnp": jnp, "optax": optax}
    for block in blocks(QUICKSTART):
        if block.note.startswith("file: "):
            name = block.note.removeprefix("file: ")
            Path(name).write_text(block.text, encoding="utf-8")
            if name.endswith(".py"):
                exec(compile(block.text, name, "exec"), namespace)
    namespace["cluster"] = hp.Cluster.emulated({"fast": 4, "slow": 2})
    namespace["state"], namespace["batch"] = namespace["example_arguments"]()
    return namespace


def _run_python(block: Block, namespace: dict[str, Any], where: str) -> None:
    from hetpass.errors import HetpassError

    # Lines are counted as in the page, so that a traceback names them.
    code = compile("\n" * block.line + block.text, where.split(":")[0], "exec")
    try:
        exec(code, namespace)
    except HetpassError as refusal:
        raise Refusal(str(refusal)) from refusal


def _run_console(block: Block, namespace: dict[str, Any], where: str) -> None:
    from hetpass.tools.main import main

    del namespace
    for line in block.text.splitlines():
        if not line.startswith("$ hetpass"):
            continue
        words = shlex.split(line.removeprefix("$ hetpass"), comments=True)
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        if code:
            raise Refusal(f"{where}: {line} ended with {code}")


def expected_outputs(page: Path) -> dict[int, Block]:
    """Blocks of printed text, by the line of the block that prints it."""
    found = blocks(page)
    return {
        before.line: block
        for before, block in zip(found, found[1:], strict=False)
        if block.note == "printed"
    }


def refreshed(page: Path) -> str:
    """The page with every printed block as its block prints now."""
    expected = expected_outputs(page)
    source = page.read_text(encoding="utf-8")
    changes = []
    for block, printed in run_page(page):
        if block.line in expected:
            changes.append((expected[block.line].span, printed.rstrip() + "\n"))
    for (start, end), text in sorted(changes, reverse=True):
        source = source[:start] + text + source[end:]
    return source


@contextlib.contextmanager
def own_folder() -> Iterator[None]:
    """A folder of its own, with a cache of its own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["HETPASS_CACHE"] = str(Path(folder, "cache"))
        try:
            yield
        finally:
            os.chdir(before)
            del os.environ["HETPASS_CACHE"]


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        with own_folder():
            text = refreshed(path)
        path.write_text(text, encoding="utf-8")
