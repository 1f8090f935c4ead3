"""Pictures for docs/schedules.md: the same step over a slow link by several schedules.

python -m benchmarks.schedule_pictures        writes docs/images/schedules_*.png
"""

from __future__ import annotations

from pathlib import Path

from hetpass.ir.timeline import Timeline
from hetpass.pictures.plot_timelines import plot_timelines
from hetpass.planner.adaptive import AdaptiveProblem, adaptive
from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.simulator import simulate

IMAGES = Path(__file__).parent.parent / "docs" / "images"
ACTIVATION_BYTES = 256e6


def slow_middle_link() -> dict[str, Timeline]:
    """Stages of 1, 1, 0.6 and 0.6 s (a third of it F); the link in the middle takes 0.8 s one way.

    "adaptive" may hold seven microbatches on every stage: H-1F1B holds six at most.
    """
    stages = tuple(
        StageCost(s / 3, 2 * s / 3, activation_bytes=ACTIVATION_BYTES) for s in (1, 1, 0.6, 0.6)
    )
    fast, slow = LinkCost(0.02, 0.02), LinkCost(0.8, 0.8)
    costs = PipelineCosts(stages, (fast, slow, fast))
    made = {
        title: make_schedule(name, num_stages=4, num_microbatches=12, costs=costs)
        for title, name in (("1F1B", "1f1b"), ("H-1F1B", "h-1f1b"))
    }
    limits = (7 * ACTIVATION_BYTES,) * 4
    made["adaptive"] = adaptive(AdaptiveProblem(costs, 12, limits_bytes=limits)).schedule
    return {title: simulate(schedule, costs) for title, schedule in made.items()}


def zero_bubbles() -> dict[str, Timeline]:
    """Four equal stages with F = B = W = 1 s; transfers are free."""
    stage = StageCost(
        1.0, 1.0, 1.0, activation_bytes=ACTIVATION_BYTES, weight_bytes=ACTIVATION_BYTES
    )
    costs = PipelineCosts.equal(4, stage)
    half = StageCost(
        0.5, 0.5, 0.5, activation_bytes=ACTIVATION_BYTES / 2, weight_bytes=ACTIVATION_BYTES / 2
    )
    halves = PipelineCosts.equal(8, half)
    runs = [(name, costs) for name in ("1f1b", "zb-h1", "zb-h2")]
    runs += [("zb-v", halves), ("interleaved", halves)]
    return {
        name: simulate(
            make_schedule(name, num_stages=len(c.stages), num_microbatches=8, costs=c), c
        )
        for name, c in runs
    }


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    plot_timelines(slow_middle_link(), IMAGES / "schedules_slow_link.png")
    lanes_only = {
        title: Timeline(t.lanes, (), tuple(s for s in t.spans if s.track in t.lanes), t.memory)
        for title, t in zero_bubbles().items()
    }
    plot_timelines(lanes_only, IMAGES / "schedules_zero_bubble.png")


if __name__ == "__main__":
    main()
