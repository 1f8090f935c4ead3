"""Clocks that differ are aligned, and events of several processes become one Timeline."""

from __future__ import annotations

import pytest

from hetpass.runtime.distributed import gather
from hetpass.runtime.distributed.gather import clock_offsets, gathered
from hetpass.runtime.distributed.worker import Event


class SlowAnswers:
    """A crew whose workers' clocks are `ahead_s` of ours; answers take the given seconds there and
    back, and the time in between is our own fake clock."""

    def __init__(self, ahead_s, trips):
        self.now_s = 100.0
        self.ahead_s = ahead_s
        self.trips = {place: iter(found) for place, found in trips.items()}

    def ask(self, place, method):
        assert method == "clock"
        return place

    def wait(self, promises):
        (place,) = promises
        there_s, back_s = next(self.trips[place])
        self.now_s += there_s
        answer = self.now_s + self.ahead_s[place]
        self.now_s += back_s
        return [answer]


def test_the_fastest_answer_is_believed(monkeypatch):
    trips = [(0.5, 0.1)] * 4 + [(0.001, 0.003)] + [(0.2, 0.9)] * 4
    crew = SlowAnswers({0: 7.0, 3: -2.0}, {0: trips, 3: trips})
    monkeypatch.setattr(gather.time, "perf_counter", lambda: crew.now_s)
    found = clock_offsets(crew, [0, 3])
    # Wrong by half of what the trip back takes longer than the trip there.
    assert found[0] == pytest.approx(7.0 - 0.001, abs=1e-9)
    assert found[3] == pytest.approx(-2.0 - 0.001, abs=1e-9)


def run(name, stage, microbatch, start_s, end_s, place):
    return Event(name, (stage,), microbatch, start_s, end_s, place, place)


def test_spans_are_by_one_clock():
    offsets = {0: 10.0, 1: 20.0}
    events = [
        run("forward 0.0", 0, 0, 11.0, 12.0, 0),
        Event("", (0, 1), 0, 12.0, 22.5, 0, 1),
        run("forward 1.0", 1, 0, 22.5, 23.0, 1),
        run("backward 1.0", 1, 0, 23.0, 24.0, 1),
        Event("", (1, 0), 0, 24.0, 14.5, 1, 0),
        run("backward 0.0", 0, 0, 14.5, 15.0, 0),
        run("epilogue 0", 0, -1, 15.0, 15.5, 0),
    ]
    timeline = gathered(events, offsets, (0, 1), ("a", "b"))
    found = [(s.track, s.label, round(s.start_s, 9), round(s.end_s, 9)) for s in timeline.spans]
    assert found == [
        ("a", "F0.0", 0.0, 1.0),
        ("a", "B0.0", 3.5, 4.0),
        ("a", "update 0", 4.0, 4.5),
        ("b", "F1.0", 1.5, 2.0),
        ("b", "B1.0", 2.0, 3.0),
        ("0→1", "send-F0.0", 1.0, 1.5),
        ("1→0", "send-B1.0", 3.0, 3.5),
    ]


def test_the_processes_of_a_stage_make_one_span():
    events = [
        run("forward 0.0", 0, 0, 1.0, 2.0, 0),
        run("forward 0.0", 0, 0, 1.5, 2.5, 1),
        run("forward 0.1", 0, 1, 2.0, 3.0, 0),
        run("forward 0.1", 0, 1, 2.5, 3.5, 1),
    ]
    timeline = gathered(events, {0: 0.0, 1: 0.0}, (0,), ("a",))
    assert [(s.start_s, s.end_s) for s in timeline.spans] == [(0.0, 1.5), (1.5, 2.5)]
