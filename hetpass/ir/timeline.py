"""A Timeline: what every lane and link did, and when. No JAX.

A simulated and a measured run give the same type, so that the one can be laid over the other.

Where a lane's time goes, as shares of the whole run:

    busy      tasks (F, B, W) and updates
    exposed   the lane stands still although everything that its next task reads has been computed:
              values are on their way, or wait for a wire (in a measured run dispatch counts too)
    bubble    the rest: what the next task reads has not been computed, or nothing is left to do
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from hetpass.errors import ScheduleError
from hetpass.ir.quantities import counted, spelled

SpanKind = Literal["F", "B", "W", "update", "send-F", "send-B"]
"""F, B, W: tasks. update: gradient sync and optimizer, once per step. send-F: an activation from
`stage` to the stage after it; send-B: its gradient from `stage` to the stage before it."""

_TASKS = ("F", "B", "W")
_NO_MICROBATCH = -1


@dataclass(frozen=True)
class Span:
    """One thing that one track did.

    Attributes:
      track: the name of a lane or link of the timeline.
      kind: what it was.
      stage: whose task, or the stage that sent.
      microbatch: -1 for an update.
      start_s, end_s: seconds since any common zero.
    """

    track: str
    kind: SpanKind
    stage: int
    microbatch: int
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and self.start_s <= self.end_s < math.inf):
            raise _error(f"{self.label} runs from {self.start_s} s to {self.end_s} s")

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def label(self) -> str:
        """For people: "F2.5", "update 2"."""
        if self.microbatch == _NO_MICROBATCH:
            return f"{self.kind} {self.stage}"
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes held on one lane: `held_bytes[i]` from `times_s[i]` to the next time."""

    track: str
    times_s: tuple[float, ...]
    held_bytes: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        """The most held at any time."""
        return max(self.held_bytes, default=0.0)


@dataclass(frozen=True)
class Shares:
    """Where a lane's time went; the three add up to 1."""

    busy: float
    exposed: float
    bubble: float

    @property
    def idle(self) -> float:
        """Exposed transfers and bubbles together."""
        return self.exposed + self.bubble


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of one step.

    Attributes:
      lanes: names of the compute tracks, in order of lanes.
      links: names of the transfer tracks.
      spans: by track, then by start; spans of one lane do not overlap.
      memory: curves of the lanes; may be empty in a measured run.

    Raises:
      ScheduleError: HP-SCHEDULE-TIMELINE for a span on no track, spans of a lane that overlap,
        or times that are not finite.
    """

    lanes: tuple[str, ...]
    links: tuple[str, ...]
    spans: tuple[Span, ...]
    memory: tuple[MemoryCurve, ...] = ()

    def __post_init__(self) -> None:
        tracks = {*self.lanes, *self.links}
        order = {name: index for index, name in enumerate((*self.lanes, *self.links))}
        for span in self.spans:
            if span.track not in tracks:
                raise _error(f"{span.label} is on {span.track!r}, which is no track")
        by_track = sorted(self.spans, key=lambda s: (order[s.track], s.start_s, s.end_s))
        object.__setattr__(self, "spans", tuple(by_track))
        tolerance_s = 1e-9 * max((abs(s.end_s) for s in self.spans), default=0.0)
        for lane in self.lanes:
            for before, after in pairwise(self.on(lane)):
                if after.start_s < before.end_s - tolerance_s:
                    raise _error(f"{before.label} and {after.label} overlap on {lane!r}")

    def renamed(self, names: Mapping[str, str]) -> Timeline:
        """The same with other names for some of its tracks."""
        return Timeline(
            tuple(names.get(lane, lane) for lane in self.lanes),
            tuple(names.get(link, link) for link in self.links),
            tuple(replace(s, track=names.get(s.track, s.track)) for s in self.spans),
            tuple(replace(c, track=names.get(c.track, c.track)) for c in self.memory),
        )

    def on(self, track: str) -> tuple[Span, ...]:
        """The spans of one track, by start."""
        return tuple(span for span in self.spans if span.track == track)

    @property
    def start_s(self) -> float:
        """The first start."""
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return max((span.end_s for span in self.spans), default=0.0) - self.start_s

    @property
    def longest_stage_s(self) -> float:
        """The largest, over stages, of last end minus first start of its tasks.

        What zero-bubble schedules are measured by: the step, where the optimizer of each stage
        may run as soon as that stage is done, and the next step fills the gap.
        """
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for span in self.spans:
            if span.kind in _TASKS:
                first[span.stage] = min(first.get(span.stage, math.inf), span.start_s)
                last[span.stage] = max(last.get(span.stage, -math.inf), span.end_s)
        return max((last[stage] - first[stage] for stage in first), default=0.0)

    def order(self) -> tuple[tuple[str, ...], ...]:
        """Per lane, the tasks in order of start, as text: to compare two runs."""
        return tuple(
            tuple(span.label for span in self.on(lane) if span.kind in _TASKS)
            for lane in self.lanes
        )

    def shares(self) -> tuple[Shares, ...]:
        """Per lane, where its time went."""
        ends = {
            (span.kind, span.stage, span.microbatch): span.end_s
            for span in self.spans
            if span.kind in _TASKS
        }
        return tuple(self._lane_shares(self.on(lane), ends) for lane in self.lanes)

    def total_shares(self) -> Shares:
        """The mean over lanes."""
        lanes = self.shares()
        count = len(lanes)
        return Shares(
            math.fsum(lane.busy for lane in lanes) / count,
            math.fsum(lane.exposed for lane in lanes) / count,
            math.fsum(lane.bubble for lane in lanes) / count,
        )

    def _lane_shares(
        self, spans: tuple[Span, ...], ends: Mapping[tuple[SpanKind, int, int], float]
    ) -> Shares:
        total_s = self.makespan_s
        if total_s == 0:
            return Shares(1.0, 0.0, 0.0)
        busy_s = math.fsum(span.duration_s for span in spans)
        exposed_s = 0.0
        free_s = self.start_s
        for span in spans:
            computed_s = max((ends.get(key, self.start_s) for key in _reads(span)), default=free_s)
            exposed_s += max(0.0, span.start_s - max(free_s, computed_s))
            free_s = span.end_s
        busy, exposed = busy_s / total_s, exposed_s / total_s
        return Shares(busy, exposed, max(0.0, 1.0 - busy - exposed))

    def chrome_trace(self) -> dict[str, Any]:
        """As Chrome and Perfetto read it (Trace Event Format); `save_trace` writes it.

        One process of lanes, one of links, a thread per track, a counter per memory curve;
        times in microseconds from the first start.
        """
        events = list(_names(1, "lanes", self.lanes)) + list(_names(2, "links", self.links))
        place = {name: (1, i) for i, name in enumerate(self.lanes)}
        place |= {name: (2, i) for i, name in enumerate(self.links)}
        for span in self.spans:
            pid, tid = place[span.track]
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "name": span.label,
                    "cat": span.kind,
                    "ts": (span.start_s - self.start_s) * 1e6,
                    "dur": span.duration_s * 1e6,
                    "args": {"stage": span.stage, "microbatch": span.microbatch},
                }
            )
        for curve in self.memory:
            events += [
                {
                    "ph": "C",
                    "pid": 1,
                    "name": f"memory of {curve.track}",
                    "ts": (time_s - self.start_s) * 1e6,
                    "args": {"bytes": held},
                }
                for time_s, held in zip(curve.times_s, curve.held_bytes, strict=True)
            ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | Path) -> None:
        """Writes `chrome_trace()` as JSON, for chrome://tracing and ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self.chrome_trace()), encoding="utf-8")

    def __str__(self) -> str:
        head = f"{spelled(self.makespan_s, 'time', 4)} from first start to last end"
        rows = [
            f"  {lane}: busy {s.busy:.1%}, exposed transfer {s.exposed:.1%}, bubble {s.bubble:.1%}"
            for lane, s in zip(self.lanes, self.shares(), strict=True)
        ]
        rows += [f"  {c.track}: holds up to {spelled(c.peak_bytes, 'bytes')}" for c in self.memory]
        return "\n".join([head, *rows])

    def __repr__(self) -> str:
        tracks = f"{counted(len(self.lanes), 'lane')}, {counted(len(self.links), 'link')}"
        spans = counted(len(self.spans), "span")
        return f"<Timeline: {tracks}, {spans} in {spelled(self.makespan_s, 'time')}>"


def _reads(span: Span) -> tuple[tuple[SpanKind, int, int], ...]:
    """The tasks that a task waits for, some of which may not exist."""
    stage, microbatch = span.stage, span.microbatch
    if span.kind == "F":
        return (("F", stage - 1, microbatch),)
    if span.kind == "B":
        return (("F", stage, microbatch), ("B", stage + 1, microbatch))
    if span.kind == "W":
        return (("B", stage, microbatch),)
    return ()


def _names(pid: int, process: str, tracks: tuple[str, ...]) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
    for tid, track in enumerate(tracks):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}}
        yield {
            "ph": "M",
            "pid": pid,
            "tid": tid,
            "name": "thread_sort_index",
            "args": {"sort_index": tid},
        }


def _error(detail: str) -> ScheduleError:
    return ScheduleError(
        "HP-SCHEDULE-TIMELINE",
        "these spans cannot be a run",
        details=(detail,),
        ways_out=("give every span a track and finite times; one lane runs one task at a time",),
    )
