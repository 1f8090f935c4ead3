"""Schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from hetpass.errors import ScheduleError
from hetpass.ir.quantities import counted
from hetpass.ir.schedule import Schedule
from hetpass.schedules.costs import PipelineCosts
from hetpass.schedules.forward_only import ForwardOnly
from hetpass.schedules.interleaved import Interleaved, num_lanes, wound
from hetpass.schedules.one_f_one_b import GPipe, OneFOneB, h_1f1b_deltas
from hetpass.schedules.zero_bubble import ZeroBubble, ZeroBubbleV, v_shape

WEIGHT_SCHEDULES = frozenset({"zb-h1", "zb-h2", "zb-v"})
"""The names of schedules with W tasks: weight gradients are fragments of their own."""


class Policy(Protocol):
    """A small frozen object that yields schedules."""

    @property
    def name(self) -> str:
        """As a plan names it."""

    def counts(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """Per stage, the stated bound of microbatches in flight."""

    def make(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The schedule of S stages and M microbatches."""


@dataclass(frozen=True)
class _Wish:
    """What `make_schedule` was asked for, beyond the name."""

    costs: PipelineCosts | None
    stages_per_lane: int


def make_schedule(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    has_backward: bool = True,
    in_flight: tuple[int, ...] | None = None,
    costs: PipelineCosts | None = None,
    stages_per_lane: int = 2,
) -> Schedule:
    """The named schedule for S stages and M microbatches.

    Args:
      name: one of `schedule_names()`.
      has_backward: False: microbatches run forward only, whatever the name.
      in_flight: per stage, the most microbatches in flight (names of the 1F1B family only).
      costs: stage and link times. "h-1f1b" needs them; zero-bubble schedules are made for them,
        or for unit costs.
      stages_per_lane: V of "interleaved"; "zb-v" always has 2, the others 1.

    Raises:
      ScheduleError: HP-SCHEDULE-UNKNOWN for a name that is not known, HP-SCHEDULE-SIZES for
        numbers that cannot be, HP-SCHEDULE-INFLIGHT for counts that cannot run, HP-SCHEDULE-COST
        where costs are missing or of another number of stages.
    """
    _check(name, num_stages, num_microbatches, costs)
    chosen: Policy
    if has_backward:
        chosen = policy(name, costs=costs, stages_per_lane=stages_per_lane, in_flight=in_flight)
    elif name == "interleaved":
        chosen = ForwardOnly(name, wound(num_lanes(name, num_stages, stages_per_lane), num_stages))
    elif name == "zb-v":
        chosen = ForwardOnly(name, v_shape(num_stages))
    else:
        chosen = ForwardOnly(name)
    return chosen.make(num_stages, num_microbatches)


def policy(
    name: str,
    *,
    costs: PipelineCosts | None = None,
    stages_per_lane: int = 2,
    in_flight: tuple[int, ...] | None = None,
) -> Policy:
    """The object behind a name, with backward tasks; arguments and errors as in `make_schedule`."""
    if name not in _POLICIES:
        raise _unknown(name)
    if in_flight is not None:
        return _with_counts(name, in_flight)
    return _POLICIES[name](_Wish(costs, stages_per_lane))


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


_POLICIES: Mapping[str, Callable[[_Wish], Policy]] = MappingProxyType(
    {
        "gpipe": lambda wish: GPipe(),
        "1f1b": lambda wish: OneFOneB(),
        "eager-1f1b": lambda wish: OneFOneB("eager-1f1b", 2),
        "h-1f1b": lambda wish: _h_1f1b(wish.costs),
        "interleaved": lambda wish: Interleaved(stages_per_lane=wish.stages_per_lane),
        "zb-h1": lambda wish: ZeroBubble("zb-h1", 1, wish.costs),
        "zb-h2": lambda wish: ZeroBubble("zb-h2", 2, wish.costs),
        "zb-v": lambda wish: ZeroBubbleV(costs=wish.costs),
        "inference": lambda wish: ForwardOnly(),
    }
)


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
    if name not in _POLICIES:
        raise _unknown(name)
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
            details=(
                f"{counted(len(costs.stages), 'stage')} in the costs, {num_stages} in the schedule",
            ),
            ways_out=("give costs with one entry per stage",),
        )


def _unknown(name: str) -> ScheduleError:
    nearest = difflib.get_close_matches(name, _POLICIES, n=3, cutoff=0.3)
    return ScheduleError(
        "HP-SCHEDULE-UNKNOWN",
        f"there is no schedule named {name!r}",
        where="schedule",
        details=(f"nearest names: {', '.join(nearest)}",) if nearest else (),
        ways_out=(f"choose one of {', '.join(_POLICIES)}",),
    )
