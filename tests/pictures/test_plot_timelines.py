"""Pictures of timelines: every track and task is in them, and names are only names."""

from __future__ import annotations

import pytest

from hetpass.ir.timeline import Timeline
from hetpass.pictures.plot_timelines import COLOURS, plot_timelines
from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.simulator import simulate

pytest.importorskip("matplotlib")


def timeline(name: str = "zb-h1", microbatches: int = 4, sent_s: float = 2e-4) -> Timeline:
    stage = StageCost(1e-3, 1e-3, 1e-3, activation_bytes=5e6, weight_bytes=5e6, update_s=1e-3)
    costs = PipelineCosts.equal(2, stage, LinkCost(sent_s, sent_s))
    schedule = make_schedule(name, num_stages=2, num_microbatches=microbatches, costs=costs)
    return simulate(schedule, costs)


def texts(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_every_task_is_drawn_with_its_microbatch():
    figure = plot_timelines({"one": timeline()})
    tracks, memory, *_ = figure.axes
    assert sorted(texts(tracks)) == sorted(str(m) for m in range(4) for _ in range(2 * 3))
    labels = [label.get_text() for label in tracks.get_yticklabels()]
    assert labels == ["lane 0", "lane 1", "link 0→1", "link 1→0"]
    assert tracks.get_title(loc="left").startswith("one: ")
    assert "ms" in memory.get_xlabel()
    assert memory.get_ylabel() == "memory, MiB"
    assert len(memory.get_lines()) == 2


def test_short_transfers_of_a_long_step_are_seen():
    played = timeline("1f1b", microbatches=128, sent_s=1e-9)
    tracks = plot_timelines({"long": played}).axes[0]
    boxes = [path.get_extents() for drawn in tracks.collections for path in drawn.get_paths()]
    assert len(boxes) == len(played.spans) + len(played.lanes)  # a lane's idle time is a box
    assert min(box.width for box in boxes) >= 0.00099 * tracks.get_xlim()[1]
    assert texts(tracks) == []


def test_timelines_share_the_axis_of_time():
    figure = plot_timelines({"a": timeline("1f1b"), "b": timeline("gpipe")})
    assert len({axis.get_xlim() for axis in figure.axes}) == 1
    assert len(figure.axes) == 4


def test_the_legend_names_what_is_there_and_idle():
    (legend,) = plot_timelines({"one": timeline("1f1b")}).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert "weight gradients" not in names
    assert names[-1] == "idle"
    assert len(names) == len(COLOURS)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_written_and_dollars_are_no_formulas(tmp_path, suffix):
    named = timeline().renamed({"lane 0": "0 · $\\bad{$ <b>"})
    path = tmp_path / f"timeline.{suffix}"
    plot_timelines({"a $x$": named}, path)
    assert path.stat().st_size > 5000
    if suffix == "svg":
        assert "<b>" not in path.read_text()


def test_a_timeline_without_spans_is_an_empty_picture():
    assert plot_timelines({"nothing": Timeline(("lane 0",), (), ())}).axes
