"""A picture of timelines: lanes and links over time, and the memory of the lanes below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetpass.ir.timeline import Span, SpanKind, Timeline
from hetpass.pictures.matplotlib_figure import (
    BYTES,
    LANE_COLOURS,
    SECONDS,
    figure_of,
    plain,
    saved,
    unit_of,
)

COLOURS: Mapping[SpanKind, str] = MappingProxyType(
    {
        "F": "#4c78a8",
        "B": "#f2a35e",
        "W": "#6aa56a",
        "update": "#8c7aa9",
        "send-F": "#9fc1e3",
        "send-B": "#f8cfa5",
    }
)
_NAMES: Mapping[SpanKind, str] = MappingProxyType(
    {
        "F": "forward",
        "B": "backward",
        "W": "weight gradients",
        "update": "once per step",
        "send-F": "activation sent",
        "send-B": "gradient sent",
    }
)
_IDLE = "#ececec"
_LANE_IN, _LINK_IN, _MEMORY_IN, _FRAME_IN = 0.42, 0.2, 1.3, 0.55
_MIN_EDGE_SHARE = 0.0085
"""A task narrower than this share of the picture has no edge: white edges between narrow tasks look
like idle time."""

_DIGIT_SHARE = 0.006
"""Wider by this for every further digit: a task carries its number where that fits."""

_MIN_SHARE = 0.001
"""What is narrower is drawn this wide, a pixel and a half: a short transfer would vanish."""

_PALE = 0.72


def plot_timelines(
    timelines: Mapping[str, Timeline], path: str | Path | None = None, *, width_in: float = 11.0
) -> Any:
    """Draws timelines below each other on one time axis, so that lengths can be compared.

    Numbers in the boxes are microbatches. Where a lane has several stages, the tasks of its first
    stage are in full colour, the others pale.

    Args:
      timelines: by title.
      path: where to write the picture (.png, .svg, .pdf); None: nowhere.
      width_in: inches.

    Returns:
      The matplotlib figure.

    Raises:
      ExecutionError: HP-RUN-PLOT, matplotlib is not installed.
    """
    rows: list[tuple[str, Timeline, str, float]] = []
    for title, timeline in timelines.items():
        tracks = _LANE_IN * len(timeline.lanes) + _LINK_IN * len(timeline.links)
        rows.append((title, timeline, "tracks", tracks))
        if timeline.memory:
            rows.append((title, timeline, "memory", _MEMORY_IN))
    heights = [height for *_, height in rows]
    total_in = sum(heights) + _FRAME_IN * (len(rows) + 1)
    figure = figure_of(width_in, total_in)
    axes = figure.subplots(len(rows), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    end_s = max((t.makespan_s for t in timelines.values()), default=0.0)
    unit, scale = unit_of(end_s, SECONDS)
    most_bytes = max((c.peak_bytes for t in timelines.values() for c in t.memory), default=0.0)
    for axis, (title, timeline, what, _) in zip(axes, rows, strict=True):
        if what == "tracks":
            _draw_tracks(axis, timeline, scale, end_s)
            head = f"{title}: {timeline.makespan_s / scale:.4g} {unit}"
            axis.set_title(plain(head), loc="left", fontsize=10)
        else:
            _draw_memory(axis, timeline, scale, most_bytes)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[-1].set_xlabel(f"time, {unit}", fontsize=9)
    axes[-1].set_xlim(0, end_s / scale * 1.005 or 1)
    _legend(figure, timelines)
    return saved(figure, path)


def _draw_tracks(axis: Any, timeline: Timeline, scale: float, end_s: float) -> None:
    """Lanes as tall rows, links as low ones, first lane on top."""
    top, centres, labels = 0.0, [], []
    for track in (*timeline.lanes, *timeline.links):
        is_lane = track in timeline.lanes
        height = _LANE_IN if is_lane else _LINK_IN
        centre = top + height / 2
        if is_lane:
            start, length = 0.0, timeline.makespan_s / scale
            axis.broken_barh([(start, length)], (top + 0.04, height - 0.08), color=_IDLE, lw=0)
        first = min((span.stage for span in timeline.on(track)), default=0)
        for (kind, pale), spans in _alike(timeline.on(track), first if is_lane else None).items():
            axis.broken_barh(
                [_drawn(span, timeline.start_s, scale, end_s) for span in spans],
                (top + 0.04, height - 0.08),
                facecolor=COLOURS[kind],
                alpha=_PALE if pale else 1.0,
                edgecolor="white",
                linewidth=[0.5 * _is_wide(span, end_s) for span in spans],
            )
            for span in spans:
                digits = len(str(span.microbatch))
                if kind in ("F", "B", "W") and _is_wide(span, end_s, digits):
                    _number(axis, span, timeline.start_s, scale, centre)
        top += height
        centres.append(centre)
        labels.append(track if is_lane else f"link {track}")
    axis.set_yticks(centres, [plain(label) for label in labels])
    axis.set_ylim(top + 0.04, -0.04)


def _alike(spans: Sequence[Span], full: int | None) -> dict[tuple[SpanKind, bool], list[Span]]:
    """Spans by what they look like: pale are those of other stages than `full`, if there is one.

    Drawn one by one, the thousands of a long step would take a minute.
    """
    groups: dict[tuple[SpanKind, bool], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.kind, full not in (None, span.stage)), []).append(span)
    return groups


def _drawn(span: Span, zero_s: float, scale: float, end_s: float) -> tuple[float, float]:
    """Where a box starts, and how wide it is: never too thin to be seen."""
    return (span.start_s - zero_s) / scale, max(span.duration_s, _MIN_SHARE * end_s) / scale


def _is_wide(span: Span, end_s: float, digits: int = 1) -> bool:
    """Whether there is room for an edge, and for so many digits."""
    share = _MIN_EDGE_SHARE + (digits - 1) * _DIGIT_SHARE
    return span.duration_s > share * end_s


def _number(axis: Any, span: Span, zero_s: float, scale: float, centre: float) -> None:
    axis.text(
        (span.start_s + span.end_s - 2 * zero_s) / 2 / scale,
        centre,
        str(span.microbatch),
        ha="center",
        va="center",
        fontsize=7,
        color="white" if span.kind == "F" else "black",
    )


def _draw_memory(axis: Any, timeline: Timeline, scale: float, most_bytes: float) -> None:
    unit, bytes_scale = unit_of(most_bytes, BYTES)
    for index, curve in enumerate(timeline.memory):
        times = [(t - timeline.start_s) / scale for t in curve.times_s]
        held = [h / bytes_scale for h in curve.held_bytes]
        axis.step(
            [*times, timeline.makespan_s / scale],
            [*held, held[-1]],
            where="post",
            lw=1.3,
            label=plain(curve.track),
            color=LANE_COLOURS[index % len(LANE_COLOURS)],
        )
    axis.set_ylim(0, most_bytes / bytes_scale * 1.05 or 1)
    axis.set_ylabel(f"memory, {unit}", fontsize=8)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)


def _legend(figure: Any, timelines: Mapping[str, Timeline]) -> None:
    from matplotlib.patches import Patch

    seen = {span.kind for timeline in timelines.values() for span in timeline.spans}
    patches = [Patch(color=c, label=_NAMES[kind]) for kind, c in COLOURS.items() if kind in seen]
    patches.append(Patch(color=_IDLE, label="idle"))
    figure.legend(
        handles=patches, loc="outside upper right", ncols=len(patches), fontsize=8, frameon=False
    )
