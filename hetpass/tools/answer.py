"""What a command answers: parts for people, data for programs."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpass.tools.terminal import Terminal


_NUMBER = re.compile(r"[+-]?[0-9.]+%?(?: ?[^\W\d_][^\s\d]*)?(?: of [0-9.]+ [A-Za-z]+)?(?: ←)?")
"""12; 96.5%; "-3 ms"; "10.2 GiB of 41 GiB"; "97% ←". Not "0-3", "2 x 4", "0 · fast"."""


@dataclass(frozen=True)
class Table:
    """Rows under a head. Cells are text; numbers are right-aligned where a column has no others.

    Attributes:
      head: the names of the columns.
      rows: as many cells each as the head.
      title: above the table; may be empty.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"{len(row)} cells in a row of {len(self.head)} columns: {row}")

    def right_aligned(self, column: int) -> bool:
        """Whether every filled cell of a column is a number, maybe with a unit or a mark."""
        cells = [row[column] for row in self.rows if row[column]]
        return bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes:
      parts: for people, in order: texts and tables.
      data: the same for programs: what `--json` prints.
      good: False where the answer is no (a check failed, two plans differ): the exit code is 1.
    """

    parts: Sequence[str | Table]
    data: Mapping[str, Any] = field(default_factory=dict)
    good: bool = True


@dataclass(frozen=True)
class Command:
    """One command of `hetpass`.

    Attributes:
      name: as it is typed: "plan", "cluster show".
      help: one line.
      declare: adds its arguments to a parser.
      run: does it.
    """

    name: str
    help: str
    declare: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Terminal], Answer]
