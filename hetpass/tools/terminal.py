"""Printing: tables and progress, with rich where it is installed, as plain text where it is not.

Answers go to standard output, progress to standard error and only where a person looks at it: in a
pipe or a file nothing but the answer is written.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from hetpass.errors import HetpassError
from hetpass.tools.answer import Answer, Table

_TICK_S = 1.0
_CLEAR_LINE = "\r\x1b[2K"


@dataclass(frozen=True)
class Terminal:
    """Where a command writes.

    Attributes:
      as_json: print data, not text.
      out, err: streams.
      started_s: on the clock of `time.perf_counter`.
    """

    as_json: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: sys.stderr)
    started_s: float = field(default_factory=time.perf_counter)
    _shown: _Shown = field(default_factory=lambda: _Shown(), repr=False)

    def answer(self, answer: Answer) -> None:
        """Prints an answer."""
        if self.as_json:
            self._json(answer.data)
            return
        for number, part in enumerate(answer.parts):
            if number and (isinstance(part, Table) or isinstance(answer.parts[number - 1], Table)):
                print(file=self.out)
            if isinstance(part, Table):
                self._table(part)
            else:
                print(part, file=self.out)

    def refusal(self, refusal: HetpassError) -> None:
        """Prints an error: to standard error, or as data where data is wanted."""
        if self.as_json:
            self._json({"error": refusal_data(refusal)})
        else:
            print(refusal, file=self.err)

    def _json(self, data: Any) -> None:
        print(json.dumps(data, indent=1, allow_nan=False, default=str), file=self.out)

    def _table(self, table: Table) -> None:
        rich = _rich() if self.out.isatty() else None
        if rich is None:
            print("\n".join(plain_table(table)), file=self.out)
        else:
            _rich_table(rich, table, self.out)

    # -- progress -----------------------------------------------------------------------------

    @property
    def watched(self) -> bool:
        """Whether a person sees the progress."""
        return not self.as_json and self.err.isatty()

    def progress(self, text: str) -> None:
        """Says what is going on, on a line that the next one replaces."""
        if self.watched:
            with self._shown.lock:
                self._shown.text = text
                self._write_shown()

    def _write_shown(self) -> None:
        spent_s = time.perf_counter() - self.started_s
        self.err.write(f"{_CLEAR_LINE}{spent_s:6.1f} s  {self._shown.text}"[:200])
        self.err.flush()

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Shows `text`, or what `progress` says meanwhile, with seconds that go on; afterwards the
        line is clean."""
        if not self.watched:
            yield
            return
        self.progress(text)
        ended = threading.Event()
        ticking = threading.Thread(target=self._tick, args=(ended,), daemon=True)
        ticking.start()
        try:
            yield
        finally:
            ended.set()
            ticking.join()
            self.err.write(_CLEAR_LINE)
            self.err.flush()

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_S):
            with self._shown.lock:
                self._write_shown()


@dataclass
class _Shown:
    """The line of progress, and whose turn it is to write it."""

    text: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


def refusal_data(refusal: HetpassError) -> dict[str, Any]:
    """An error as data."""
    return {
        "code": refusal.code,
        "what": refusal.what,
        "where": refusal.where,
        "details": list(refusal.details),
        "ways_out": list(refusal.ways_out),
    }


def plain_table(table: Table) -> list[str]:
    """A table as lines of text."""
    rows: list[Sequence[str]] = [table.head, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.head))]
    right = [table.right_aligned(i) for i in range(len(table.head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        return ("  " + "  ".join(cells)).rstrip()

    lines = [table.title] if table.title else []
    return [*lines, *(line(row) for row in rows)]


def _rich() -> Any:
    try:
        import rich.console
        import rich.table
    except ImportError:
        return None
    return rich


def _rich_table(rich: Any, table: Table, out: TextIO) -> None:
    """A name may look like markup: every cell is printed as it stands."""
    from rich.text import Text

    title = Text(table.title) if table.title else None
    drawn = rich.table.Table(title=title, title_justify="left", box=None, pad_edge=True)
    for column, name in enumerate(table.head):
        drawn.add_column(Text(name), justify="right" if table.right_aligned(column) else "left")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    # A terminal wraps long lines more readably than rich squeezes columns.
    rows = (table.head, *table.rows)
    needed = sum(3 + max(len(row[i]) for row in rows) for i in range(len(table.head)))
    width = max(shutil.get_terminal_size().columns, needed)
    rich.console.Console(file=out, highlight=False, width=width).print(drawn)
