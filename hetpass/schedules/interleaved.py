"""Interleaved 1F1B: several layer ranges per lane, HetAuto's virtual stages.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC 2021). With p lanes and V stages per lane, stage s = v p + lane: the pipeline
winds around the lanes V times. Microbatches go in groups of p: a lane runs its first stage for the
whole group, then its second stage, and so on; backwards take the stages in reverse. Lane i runs
2 (p - 1 - i) + (V - 1) p warm-up forwards, then one forward and one backward in turn. The bubble
is that of 1F1B divided by V, paid for with V times the transfers and more microbatches in flight.

A last group of fewer than p microbatches (M not a multiple of p) is legal: warm-ups grow by as
many forwards as keep the lanes from waiting for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from hetpass.errors import ScheduleError
from hetpass.ir.quantities import counted
from hetpass.ir.schedule import Lane, Schedule, Task, TaskKind, peaks


@dataclass(frozen=True)
class Interleaved:
    """V stages per lane, stage s on lane s mod p.

    Attributes:
      stages_per_lane: V.
    """

    name: str = "interleaved"
    stages_per_lane: int = 2

    def counts(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """Microbatches in flight per stage."""
        return self.make(num_stages, num_microbatches).in_flight

    def make(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The schedule of S stages on S / V lanes, and M microbatches.

        Raises:
          ScheduleError: HP-SCHEDULE-SIZES unless V divides S.
        """
        lanes_count = num_lanes(self.name, num_stages, self.stages_per_lane)
        extra_max = num_microbatches * self.stages_per_lane
        for extra in count():
            lanes = tuple(
                self._lane(lane, lanes_count, num_microbatches, extra)
                for lane in range(lanes_count)
            )
            in_flight = peaks(lanes, num_stages, last="B")
            try:
                return Schedule(self.name, num_stages, num_microbatches, lanes, in_flight)
            except ScheduleError:
                if extra == extra_max:  # all forwards first: always runs
                    raise
        raise AssertionError("unreachable")

    def _lane(self, lane: int, lanes: int, microbatches: int, extra: int) -> Lane:
        stages = tuple(v * lanes + lane for v in range(self.stages_per_lane))
        forwards = _grouped("F", stages, lanes, microbatches)
        backwards = _grouped("B", stages[::-1], lanes, microbatches)
        warm_up = 2 * (lanes - 1 - lane) + (self.stages_per_lane - 1) * lanes + extra
        tasks = forwards[:warm_up]
        for index, backward in enumerate(backwards):
            tasks += forwards[warm_up + index : warm_up + index + 1]
            tasks.append(backward)
        return Lane(stages, tuple(tasks))


def num_lanes(name: str, num_stages: int, stages_per_lane: int) -> int:
    """S / V.

    Raises:
      ScheduleError: HP-SCHEDULE-SIZES unless V divides S.
    """
    if stages_per_lane < 1 or num_stages % stages_per_lane:
        raise ScheduleError(
            "HP-SCHEDULE-SIZES",
            "every lane must have the same number of stages",
            where=name,
            details=(f"{counted(num_stages, 'stage')}, {stages_per_lane} per lane",),
            ways_out=("choose a number of stages that is a multiple of the stages per lane",),
        )
    return num_stages // stages_per_lane


def wound(lanes: int, num_stages: int) -> tuple[int, ...]:
    """Per stage, its lane: stages wind around the lanes."""
    return tuple(stage % lanes for stage in range(num_stages))


def _grouped(kind: TaskKind, stages: tuple[int, ...], group: int, microbatches: int) -> list[Task]:
    """Groups of microbatches, each through all stages in turn."""
    return [
        Task(kind, stage, microbatch)
        for start in range(0, microbatches, group)
        for stage in stages
        for microbatch in range(start, min(start + group, microbatches))
    ]
