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
