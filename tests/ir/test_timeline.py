import json

import pytest

from hetpass.errors import ScheduleError
from hetpass.ir.timeline import MemoryCurve, Span, Timeline


def _timeline():
    return Timeline(
        lanes=("lane 0", "lane 1"),
        links=("0→1",),
        spans=(
            Span("lane 1", "F", 1, 0, 12.0, 13.0),
            Span("0→1", "send-F", 0, 0, 11.0, 12.0),
            Span("lane 0", "F", 0, 0, 10.0, 11.0),
        ),
        memory=(MemoryCurve("lane 0", (10.0, 11.0), (4.0, 0.0)),),
    )


def test_spans_are_sorted_and_time_counts_from_the_first_start():
    timeline = _timeline()
    assert [span.label for span in timeline.spans] == ["F0.0", "F1.0", "send-F0.0"]
    assert timeline.makespan_s == 3.0
    assert timeline.longest_stage_s == 1.0
    assert timeline.order() == (("F0.0",), ("F1.0",))


def test_shares_of_a_measured_run_without_links():
    spans = tuple(span for span in _timeline().spans if span.kind == "F")
    first, second = Timeline(("lane 0", "lane 1"), (), spans).shares()
    assert (first.exposed, second.exposed) == pytest.approx((0.0, 1 / 3))
    assert first.busy + first.idle == pytest.approx(1.0)


def test_chrome_trace_is_json_with_a_track_each():
    trace = json.loads(json.dumps(_timeline().chrome_trace()))
    events = trace["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["lane 0", "lane 1", "0→1"]
    boxes = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert boxes["F1.0"] == (2e6, 1e6)
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"] == [4.0, 0.0]


@pytest.mark.parametrize(
    "spans",
    [
        (Span("lane 7", "F", 0, 0, 0.0, 1.0),),
        (Span("lane 0", "F", 0, 0, 0.0, 2.0), Span("lane 0", "F", 0, 1, 1.0, 3.0)),
    ],
)
def test_spans_that_cannot_be_are_refused(spans):
    with pytest.raises(ScheduleError) as caught:
        Timeline(("lane 0",), (), spans)
    assert caught.value.code == "HP-SCHEDULE-TIMELINE"


def test_a_span_does_not_end_before_it_starts():
    with pytest.raises(ScheduleError):
        Span("lane 0", "F", 0, 0, 2.0, 1.0)
