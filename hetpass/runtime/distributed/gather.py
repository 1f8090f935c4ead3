"""What all workers saw of a step, by one clock, as one Timeline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hetpass.ir.schedule import TaskKind
from hetpass.ir.timeline import Span, SpanKind, Timeline
from hetpass.runtime.distributed.crew import Crew
from hetpass.runtime.distributed.worker import Event

_KINDS: Mapping[str, TaskKind] = {"forward": "F", "backward": "B", "weight": "W"}
_QUESTIONS = 9


def clock_offsets(crew: Crew, places: Sequence[int]) -> dict[int, float]:
    """Per place, its clock minus this process's, in seconds.

    The worker's answer is taken to be given halfway between question and answer; of several, the
    one that took the least time is believed (Cristian, Distributed Computing 3, 1989). On one
    machine all clocks are the same one, and the error is what is left of half a round trip.
    """
    offsets = {}
    for place in places:
        best_s, offset_s = float("inf"), 0.0
        for _ in range(_QUESTIONS):
            asked_s = time.perf_counter()
            (theirs_s,) = crew.wait([crew.ask(place, "clock")])
            answered_s = time.perf_counter()
            if answered_s - asked_s < best_s:
                best_s = answered_s - asked_s
                offset_s = theirs_s - (asked_s + answered_s) / 2
        offsets[place] = offset_s
    return offsets


def gathered(
    events: Sequence[Event],
    offsets: Mapping[int, float],
    lane_of: Sequence[int],
    lane_names: Sequence[str],
) -> Timeline:
    """One Timeline, from the first start. Stages with several processes: each fragment lasts from
    the first start to the last end of its processes.

    Args:
      offsets: per place, its clock minus ours.
      lane_of: per stage. lane_names: per lane.
    """
    found: dict[tuple[str, SpanKind, int, int, str], tuple[float, float]] = {}
    for event in events:
        start_s = event.start_s - offsets[event.began_at]
        end_s = max(start_s, event.end_s - offsets[event.place])
        if event.name:
            kind: SpanKind = _KINDS.get(event.name.split()[0], "update")
            track = lane_names[lane_of[event.stages[0]]]
        else:
            source, target = event.stages
            kind = "send-F" if target > source else "send-B"
            track = f"{source}→{target}"
        key = (track, kind, event.stages[0], event.microbatch, event.name or str(start_s))
        before = found.get(key, (start_s, end_s))
        found[key] = (min(before[0], start_s), max(before[1], end_s))
    zero_s = min((start_s for start_s, _ in found.values()), default=0.0)
    free_s = dict.fromkeys(lane_names, 0.0)
    spans = []
    for key, (began_s, ended_s) in sorted(found.items(), key=lambda item: item[1]):
        track, kind, stage, microbatch, _ = key
        start_s, end_s = began_s - zero_s, ended_s - zero_s
        if track in free_s:
            # By clocks that differ by microseconds, a lane's spans may seem to overlap.
            start_s = max(start_s, free_s[track])
            end_s = free_s[track] = max(start_s, end_s)
        spans.append(Span(track, kind, stage, microbatch, start_s, end_s))
    links = sorted({s.track for s in spans if s.kind in ("send-F", "send-B")})
    return Timeline(tuple(lane_names), tuple(links), tuple(spans))
