"""GPipe and the family of 1F1B: one stage per lane, told apart by their in-flight counts.

With N_i microbatches in flight on stage i, the stage runs N_i - 1 warm-up forwards, then one
forward and one backward in turn, then the backwards that are left. The last stage needs N = 1, and
a stage needs at least as many as the stage after it, or both wait for ever.

    gpipe        N_i = M: all forwards, then all backwards     (Huang et al., NeurIPS 2019)
    1f1b         N_i = N_{i+1} + 1                             (Narayanan et al., SC 2021)
    eager-1f1b   N_i = N_{i+1} + 2                             (Zhuang et al., MLSys 2023)
    h-1f1b       N_i = N_{i+1} + δ_i, with δ = 1 for a fast link and 1 + ⌈2 c / t⌉ for a slow one
                 (c one way, t the slowest stage)              (HARP, EuroSys 2026)

All counts are capped at M.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetpass.errors import ScheduleError
from hetpass.ir.quantities import counted
from hetpass.ir.schedule import Lane, Schedule, Task, TaskKind
from hetpass.schedules.costs import PipelineCosts

FAST_LINK_SHARE = 0.1
"""A link is fast for H-1F1B if one transfer takes less than this share of the slowest stage."""


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards."""

    name: str = "gpipe"

    def counts(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """Microbatches in flight per stage."""
        return (num_microbatches,) * num_stages

    def make(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The schedule of S stages, one per lane, and M microbatches."""
        lanes = tuple(
            Lane((s,), _tasks("F", s, num_microbatches) + _tasks("B", s, num_microbatches))
            for s in range(num_stages)
        )
        counts = self.counts(num_stages, num_microbatches)
        return Schedule(self.name, num_stages, num_microbatches, lanes, counts)


@dataclass(frozen=True)
class OneFOneB:
    """Warm-up forwards, then one forward and one backward in turn.

    Attributes:
      deltas: entry i is N_i - N_{i+1}; one number means the same everywhere.
      in_flight: N_i per stage, instead of `deltas`.
    """

    name: str = "1f1b"
    deltas: int | tuple[int, ...] = 1
    in_flight: tuple[int, ...] | None = None

    def counts(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """Microbatches in flight per stage.

        Raises:
          ScheduleError: HP-SCHEDULE-INFLIGHT where the counts cannot run.
        """
        if self.in_flight is not None:
            return legal_counts(self.in_flight, num_stages, num_microbatches)
        deltas = self.deltas
        if isinstance(deltas, int):
            deltas = (deltas,) * (num_stages - 1)
        counts = [1]
        for delta in reversed(deltas):
            counts.append(counts[-1] + delta)
        return legal_counts(counts[::-1], num_stages, num_microbatches)

    def make(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The schedule of S stages, one per lane, and M microbatches."""
        counts = self.counts(num_stages, num_microbatches)
        lanes = tuple(
            Lane((s,), one_f_one_b_tasks(s, num_microbatches, count))
            for s, count in enumerate(counts)
        )
        return Schedule(self.name, num_stages, num_microbatches, lanes, counts)


def h_1f1b_deltas(costs: PipelineCosts) -> tuple[int, ...]:
    """Per link, how many microbatches more the stage before it holds, by HARP's rule."""
    slowest = costs.slowest_s
    return tuple(
        1
        if link.one_way_s < FAST_LINK_SHARE * slowest or slowest == 0
        else 1 + math.ceil(2 * link.one_way_s / slowest)
        for link in costs.links
    )


def one_f_one_b_tasks(stage: int, num_microbatches: int, count: int) -> tuple[Task, ...]:
    """One stage's tasks with at most `count` microbatches in flight."""
    tasks = [Task("F", stage, m) for m in range(count - 1)]
    for microbatch in range(num_microbatches):
        if microbatch + count - 1 < num_microbatches:
            tasks.append(Task("F", stage, microbatch + count - 1))
        tasks.append(Task("B", stage, microbatch))
    return tuple(tasks)


def legal_counts(counts: Sequence[int], num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The counts capped at M.

    Raises:
      ScheduleError: HP-SCHEDULE-INFLIGHT unless there is one count per stage, each at least 1 and
        at least that of the stage after it.
    """
    capped = tuple(min(count, num_microbatches) for count in counts)
    rising = any(a < b for a, b in itertools.pairwise(capped))
    if len(capped) != num_stages or min(capped) < 1 or rising:
        raise ScheduleError(
            "HP-SCHEDULE-INFLIGHT",
            "these in-flight counts cannot run",
            details=(
                f"counts {list(counts)} for {counted(num_stages, 'stage')}; a stage that holds "
                "fewer "
                "microbatches than the stage after it would wait for ever",
            ),
            ways_out=("give one count per stage, at least 1, never rising along the stages",),
        )
    return capped


def _tasks(kind: TaskKind, stage: int, num_microbatches: int) -> tuple[Task, ...]:
    return tuple(Task(kind, stage, m) for m in range(num_microbatches))
