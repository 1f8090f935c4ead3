"""Schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Protocol

from hetpass.errors import ScheduleError
from hetpass.ir.schedule import Schedule
from hetpass.schedules.costs import PipelineCosts
from hetpass.schedules.one_f_one_b import ForwardOnly, GPipe, OneFOneB, h_1f1b_deltas


class Policy(Protocol):
    """A small frozen object that yields schedules."""

    @property
    def name(self) -> str:
        """As a plan names it."""

    def counts(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """Per stage, the stated bound of microbatches in flight."""

    def make(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The schedule of S stages and M microbatches."""


def make_schedule(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    has_backward: bool = True,
    in_flight: tuple[int, ...] | None = None,
    costs: PipelineCosts | None = None,
) -> Schedule:
    """The named schedule for S stages and M microbatches.

    Args:
      name: one of `schedule_names()`.
      has_backward: False: microbatches run forward only, whatever the name.
      in_flight: per stage, the most microbatches in flight (names of the 1F1B family only).
      costs: stage and link times; needed by "h-1f1b".

    Raises:
      ScheduleError: HP-SCHEDULE-UNKNOWN for a name that is not known, HP-SCHEDULE-SIZES,
        HP-SCHEDULE-INFLIGHT for counts that cannot run, HP-SCHEDULE-COST where costs are missing
        or of another number of stages.
    """
    if name not in _POLICIES:
        raise _unknown(name)
    _check(name, num_stages, num_microbatches, costs)
    policy: Policy
    if not has_backward:
        policy = ForwardOnly(name)
    elif in_flight is not None:
        policy = _with_counts(name, in_flight)
    else:
        policy = _POLICIES[name](costs)
    return policy.make(num_stages, num_microbatches)


def schedule_names() -> tuple[str, ...]:
    """The names that `make_schedule` knows."""
    return tuple(_POLICIES)


def _h_1f1b(costs: PipelineCosts | None) -> Policy:
    if costs is None:
        raise ScheduleError(
            "HP-SCHEDULE-COST",
            "this schedule is made for the times of stages and links, and none were given",
            where="h-1f1b",
            ways_out=("pass costs", 'use "1f1b" or "eager-1f1b"'),
        )
    return OneFOneB("h-1f1b", h_1f1b_deltas(costs))


_POLICIES: Mapping[str, Callable[[PipelineCosts | None], Policy]] = {
    "gpipe": lambda costs: GPipe(),
    "1f1b": lambda costs: OneFOneB(),
    "eager-1f1b": lambda costs: OneFOneB("eager-1f1b", 2),
    "h-1f1b": _h_1f1b,
}


def _with_counts(name: str, in_flight: tuple[int, ...]) -> Policy:
    if not name.endswith("1f1b"):
        raise ScheduleError(
            "HP-SCHEDULE-INFLIGHT",
            "in-flight counts can be chosen for the 1F1B family only",
            where=name,
            details=(f"counts {list(in_flight)}",),
            ways_out=('use "1f1b"', "leave the counts to the schedule"),
        )
    return OneFOneB(name, in_flight=in_flight)


def _check(name: str, num_stages: int, num_microbatches: int, costs: PipelineCosts | None) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            "HP-SCHEDULE-SIZES",
            "a schedule needs at least one stage and one microbatch",
            where=name,
            details=(f"stages {num_stages}, microbatches {num_microbatches}",),
            ways_out=("give both as 1 or more",),
        )
    if costs is not None and len(costs.stages) != num_stages:
        raise ScheduleError(
            "HP-SCHEDULE-COST",
            "the costs are of another pipeline",
            where=name,
            details=(f"{len(costs.stages)} stages in the costs, {num_stages} in the schedule",),
            ways_out=("give costs with one entry per stage",),
        )


def _unknown(name: str) -> ScheduleError:
    nearest = difflib.get_close_matches(name, _POLICIES, n=3, cutoff=0.3)
    return ScheduleError(
        "HP-SCHEDULE-UNKNOWN",
        f"there is no schedule named {name!r}",
        details=(f"nearest names: {', '.join(nearest)}",) if nearest else (),
        ways_out=(f"choose one of {', '.join(_POLICIES)}",),
    )
