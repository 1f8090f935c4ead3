"""Printing: tables, progress, data."""

from __future__ import annotations

import io
import time

import pytest

from hetpass.tools import terminal
from hetpass.tools.answer import Answer, Table
from hetpass.tools.terminal import Terminal, plain_table

TABLE = Table(("name", "s"), (("[bold]a[/bold]", "1"), ("b", "22")), "title")


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_plain_table_aligns_numbers_right():
    assert plain_table(TABLE) == [
        "title",
        "  name             s",
        "  [bold]a[/bold]   1",
        "  b               22",
    ]


@pytest.mark.parametrize(
    ("cells", "right"),
    [
        (("12", "-3.5", ""), True),
        (("16.3 s", "280 us"), True),
        (("1.25 GB/s", "7 µs"), True),
        (("83%", "97% ←"), True),
        (("896 KiB of 3.68 GiB", "10.2 GiB of 41.1 GiB"), True),
        (("1.4x", "2x"), True),
        (("0-3", "4-10"), False),
        (("2 x 4", "4"), False),
        (("0 · fast[2]",), False),
        (("2 A100-40",), False),
        (("300 GB/s, 5 us",), False),
        (("3-5 on slow[2](data=2)",), False),
        (("",), False),
    ],
)
def test_columns_of_numbers_are_told(cells, right):
    assert Table(("x",), tuple((cell,) for cell in cells)).right_aligned(0) == right


def test_a_table_has_whole_rows():
    with pytest.raises(ValueError, match="1 cells"):
        Table(("a", "b"), (("1",),))


@pytest.mark.parametrize("stream", [Screen, io.StringIO])
def test_markup_in_cells_is_text(stream):
    out = stream()
    Terminal(out=out).answer(Answer([TABLE]))
    assert "[bold]a[/bold]" in out.getvalue()


def test_progress_is_for_people_only():
    pipe, screen = io.StringIO(), Screen()
    for err, as_json in ((pipe, False), (screen, True)):
        with Terminal(as_json=as_json, err=err).working("tracing"):
            pass
        assert err.getvalue() == ""
    with Terminal(err=screen).working("tracing"):
        assert "tracing" in screen.getvalue()


def test_seconds_go_on_while_nothing_is_said(monkeypatch):
    monkeypatch.setattr(terminal, "_TICK_S", 0.01)
    screen = Screen()
    here = Terminal(err=screen)
    with here.working("planning"):
        here.progress("solving")
        while screen.getvalue().count("s  solving") < 3:
            time.sleep(0.01)
    said = screen.getvalue()
    assert said.endswith("\r\x1b[2K")
    time.sleep(0.05)
    assert screen.getvalue() == said


def test_json_holds_no_text():
    out = io.StringIO()
    Terminal(as_json=True, out=out).answer(Answer(["text"], {"a": 1}))
    assert out.getvalue() == '{\n "a": 1\n}\n'
