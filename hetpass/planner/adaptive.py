"""The adaptive schedule: chosen by search on the simulator, for these times, links and memory.

Thresholds on a link's time (H-1F1B, eager-1F1B) leave time on the table next to the threshold, and
say nothing about unequal stages or memory. Here every candidate is played, and the fastest that
fits is taken:

  1. every named schedule for the same lanes, so that none of them is ever faster;
  2. 1F1B orders by descent over the in-flight counts, stage by stage;
  3. list schedules under the memory limit, by several rankings and in-flight counts;
  4. from the best of these, single tasks moved along the critical path.

The number of plays is bounded, not the time, so that the answer is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from random import Random

from hetpass.errors import ScheduleError
from hetpass.ir.quantities import spelled
from hetpass.ir.schedule import Schedule, peaks
from hetpass.planner.adaptive_moves import Lanes, exchanged, moved
from hetpass.schedules.costs import PipelineCosts
from hetpass.schedules.greedy import Ranks, Room, list_orders
from hetpass.schedules.interleaved import wound
from hetpass.schedules.make import make_schedule
from hetpass.schedules.one_f_one_b import one_f_one_b_tasks
from hetpass.schedules.pipe import Pipe, lanes_of, numbered, prepare
from hetpass.simulator.bounds import lower_bound_s
from hetpass.simulator.engine import play
from hetpass.simulator.memory import peak_bytes

_ONE_STAGE_NAMES = ("1f1b", "h-1f1b", "eager-1f1b", "gpipe")
_WEIGHT_NAMES = ("zb-h1", "zb-h2")
_SLACK = 1e-9
"""Relative; differences below it are rounding."""

_STARTS = 3
"""Descents by moves begin from so many candidates with W tasks, and as many without."""

Counts = tuple[int, ...]


@dataclass(frozen=True)
class AdaptiveProblem:
    """What the schedule is for.

    Attributes:
      costs: of stages and links.
      num_microbatches: M.
      lane_of: per stage, its lane; None: one stage per lane.
      limits_bytes: per lane, the most it may hold; None: no limit.
      split_weights: whether weight gradients may be tasks of their own.
      max_plays: how many candidates are played in the last two steps.
    """

    costs: PipelineCosts
    num_microbatches: int
    lane_of: tuple[int, ...] | None = None
    limits_bytes: tuple[float, ...] | None = None
    split_weights: bool = False
    max_plays: int = 600

    def __post_init__(self) -> None:
        stages = len(self.costs.stages)
        lanes = self.lane_of if self.lane_of is not None else tuple(range(stages))
        count = max(lanes, default=-1) + 1
        limits = self.limits_bytes
        wrong = len(lanes) != stages or set(lanes) != set(range(count))
        if wrong or self.num_microbatches < 1 or (limits is not None and len(limits) != count):
            raise ScheduleError(
                "HP-SCHEDULE-SIZES",
                "stages, lanes, limits and microbatches do not fit together",
                details=(
                    f"{stages} stages on lanes {list(lanes)}, limits {limits}, "
                    f"{self.num_microbatches} microbatches",
                ),
                ways_out=("give every stage a lane, every lane a stage and a limit, and M ≥ 1",),
            )

    @property
    def lanes(self) -> tuple[int, ...]:
        """Per stage, its lane."""
        return self.lane_of if self.lane_of is not None else tuple(range(len(self.costs.stages)))


@dataclass(frozen=True)
class Adaptive:
    """The schedule found, and how it compares.

    Attributes:
      schedule: named "adaptive".
      makespan_s: by the simulator.
      bound_s: no schedule of these tasks on these lanes is faster.
      named_s: the named schedules that fit the same memory.
      plays: candidates played.
    """

    schedule: Schedule
    makespan_s: float
    bound_s: float
    named_s: Mapping[str, float]
    plays: int


def adaptive(problem: AdaptiveProblem) -> Adaptive:
    """The fastest schedule found within the memory limits; never slower than a named one.

    Raises:
      ScheduleError: HP-SCHEDULE-MEMORY if one microbatch at a time does not fit.
    """
    search = _Search(problem)
    search.try_named()
    search.try_counts()
    search.try_lists()
    search.try_moves()
    best = search.best
    if best is None:
        raise _too_little(problem)
    lanes = lanes_of(best.orders, problem.lanes, problem.num_microbatches)
    stages = len(problem.lanes)
    in_flight = peaks(lanes, stages, last="B")
    schedule = Schedule("adaptive", stages, problem.num_microbatches, lanes, in_flight)
    return Adaptive(schedule, best.makespan_s, search.bound_s, search.named_s, search.plays)


@dataclass(frozen=True)
class _Candidate:
    orders: Lanes
    has_weight: bool
    makespan_s: float


class _Search:
    """Candidates so far; `best` is the fastest, first found among equals."""

    def __init__(self, problem: AdaptiveProblem) -> None:
        self.problem = problem
        self.costs, self.lane_of = problem.costs, problem.lanes
        self.m, self.stages = problem.num_microbatches, len(self.lane_of)
        self.one_per_lane = self.lane_of == tuple(range(self.stages))
        self.pipes: dict[bool, Pipe] = {
            w: prepare(self.costs, self.lane_of, self.m, w) for w in self._modes()
        }
        self.bound_s = min(
            lower_bound_s(
                self.costs, self.lane_of, self.m, has_weight=w, limits_bytes=problem.limits_bytes
            )
            for w in self._modes()
        )
        self.best: _Candidate | None = None
        self.pool: dict[tuple[bool, Lanes], _Candidate] = {}
        self.named_s: dict[str, float] = {}
        self.best_counts = (1,) * self.stages
        self.count_s: dict[Counts, float] = {}
        self.plays = 0

    def _modes(self) -> tuple[bool, ...]:
        return (False, True) if self.problem.split_weights else (False,)

    def _done(self) -> bool:
        best = self.best
        return best is not None and best.makespan_s <= self.bound_s * (1 + _SLACK)

    def consider(self, orders: Lanes, has_weight: bool) -> _Candidate | None:
        """Plays orders that fit the memory, and remembers the fastest."""
        key = (has_weight, orders)
        if key in self.pool:
            return self.pool[key]
        limits = self.problem.limits_bytes
        if limits is not None:
            held = peak_bytes(self.costs, self.lane_of, orders, self.m)
            if any(h > limit * (1 + _SLACK) for h, limit in zip(held, limits, strict=True)):
                return None
        self.plays += 1
        played = play(self.pipes[has_weight], orders)
        if played is None:
            return None
        candidate = _Candidate(orders, has_weight, played.makespan_s)
        self.pool[key] = candidate
        if self.best is None or candidate.makespan_s < self.best.makespan_s * (1 - _SLACK):
            self.best = candidate
        return candidate

    # ------------------------------------------------------------------ 1: named schedules

    def try_named(self) -> None:
        for name in self._names():
            per_lane = self.stages // (max(self.lane_of) + 1)
            schedule = make_schedule(
                name,
                num_stages=self.stages,
                num_microbatches=self.m,
                costs=self.costs,
                stages_per_lane=per_lane,
            )
            orders = tuple(tuple(order) for order in numbered(schedule))
            found = self.consider(orders, schedule.has_weight)
            if found is not None:
                self.named_s[name] = found.makespan_s

    def _names(self) -> tuple[str, ...]:
        split = self.problem.split_weights
        if self.one_per_lane:
            return (*_ONE_STAGE_NAMES, "interleaved") + (_WEIGHT_NAMES if split else ())
        lanes = max(self.lane_of) + 1
        names = ("interleaved",) if self.lane_of == wound(lanes, self.stages) else ()
        v_shape = (*range(lanes), *reversed(range(lanes)))
        return names + (("zb-v",) if split and self.lane_of == v_shape else ())

    # ------------------------------------------------------------------ 2: in-flight counts

    def try_counts(self) -> None:
        """Descent from the largest counts, from H-1F1B's and from those of 1F1B."""
        if not self.one_per_lane:
            return
        most = self._most_counts()
        if most is None:
            return
        starts = [
            most,
            *(
                tuple(min(c, d) for c, d in zip(most, self._named_counts(n), strict=True))
                for n in ("1f1b", "h-1f1b", "eager-1f1b")
            ),
        ]
        self.best_counts = most
        best_s = float("inf")
        for start in dict.fromkeys(starts):
            counts, seconds = self._descend(start, most)
            if seconds < best_s * (1 - _SLACK):
                best_s, self.best_counts = seconds, counts

    def _named_counts(self, name: str) -> tuple[int, ...]:
        return make_schedule(
            name, num_stages=self.stages, num_microbatches=self.m, costs=self.costs
        ).in_flight

    def _most_counts(self) -> tuple[int, ...] | None:
        """Per stage, as many as fit, never rising along the stages."""
        counts, limits = [], self.problem.limits_bytes
        last = self.m
        for stage, cost in enumerate(self.costs.stages):
            if limits is not None and cost.activation_bytes:
                free_bytes = limits[stage] * (1 + _SLACK) - cost.fixed_bytes
                last = min(last, int(free_bytes // cost.activation_bytes))
            counts.append(last)
        return tuple(counts) if last >= 1 else None

    def _count_seconds(self, counts: Counts) -> float:
        if counts not in self.count_s:
            orders = tuple(self._count_order(stage, count) for stage, count in enumerate(counts))
            found = self.consider(orders, False)
            self.count_s[counts] = found.makespan_s if found is not None else float("inf")
        return self.count_s[counts]

    def _count_order(self, stage: int, count: int) -> tuple[int, ...]:
        base = {"F": stage * self.m, "B": (self.stages + stage) * self.m}
        tasks = one_f_one_b_tasks(stage, self.m, count)
        return tuple(base[task.kind] + task.microbatch for task in tasks)

    def _descend(self, counts: Counts, most: Counts) -> tuple[Counts, float]:
        """Steps of one stage's count (neighbours give way) while they help or save memory."""
        seconds = self._count_seconds(counts)  # the least so far, so that steps cannot go round
        improved = True
        while improved and not self._done():
            improved = False
            for stage, change in product(range(self.stages), (1, -1, 2, -2)):
                value = counts[stage] + change
                if not 1 <= value <= most[stage]:
                    continue
                near = tuple(
                    max(c, value) if i < stage else value if i == stage else min(c, value)
                    for i, c in enumerate(counts)
                )
                near_s = self._count_seconds(near)
                saves = near_s <= seconds * (1 + _SLACK) and sum(near) < sum(counts)
                if near_s < seconds * (1 - _SLACK) or saves:
                    counts, seconds, improved = near, min(seconds, near_s), True
        return counts, seconds

    # ------------------------------------------------------------------ 3: list schedules

    def try_lists(self) -> None:
        for has_weight, room, ranks in self._listings():
            if self._done():
                return
            listed = list_orders(self.pipes[has_weight], room, ranks, kinds=3 if has_weight else 2)
            if listed is not None:
                self.consider(listed.orders, has_weight)

    def _listings(self) -> Iterator[tuple[bool, Room, Ranks]]:
        several = not self.one_per_lane
        rankings = [
            Ranks(kinds, late, early, patience)
            for kinds, late, early, patience in product(
                ("BFW", "FBW", "FWB") if self.problem.split_weights else ("BFW", "FBW"),
                (True, False) if several else (True,),
                (True, False) if several else (True,),
                (0.0, 0.3, 0.6, 1.0),
            )
        ]
        for has_weight in reversed(self._modes()):
            for counts, reserves in product(self._caps(), (True, False) if several else (False,)):
                room = self._room(counts, has_weight, reserves)
                for ranks in rankings:
                    yield has_weight, room, ranks

    def _caps(self) -> list[tuple[int, ...]]:
        caps = [(self.m,) * self.stages]
        if self.one_per_lane and self._most_counts() is not None:
            best = self.best_counts
            caps += [best, tuple(c + 1 for c in best)]
            caps += [self._named_counts(name) for name in ("1f1b", "h-1f1b", "eager-1f1b")]
        return list(dict.fromkeys(caps))

    def _room(self, counts: tuple[int, ...], has_weight: bool, reserves: bool) -> Room:
        stages, limits = self.costs.stages, self.problem.limits_bytes
        lanes = range(max(self.lane_of) + 1)
        if limits is None:
            limits = (float("inf"),) * len(lanes)
        free = tuple(
            limits[lane] * (1 + _SLACK)
            - sum(s.fixed_bytes for i, s in enumerate(stages) if self.lane_of[i] == lane)
            for lane in lanes
        )
        keeps = tuple(s.weight_bytes if has_weight else 0.0 for s in stages)
        return Room(counts, free, tuple(s.activation_bytes for s in stages), keeps, reserves)

    # ------------------------------------------------------------------ 4: single moves

    def try_moves(self) -> None:
        """Descends from the best few, then from near the best until the plays are spent.

        Each descent takes the first move along the critical path that helps, again and again.
        """
        starts = [
            start
            for mode in self._modes()
            for start in sorted(
                (c for c in self.pool.values() if c.has_weight == mode), key=lambda c: c.makespan_s
            )[:_STARTS]
        ]
        first, end = self.plays, self.plays + self.problem.max_plays
        for index, start in enumerate(starts):
            share = (index + 1) * self.problem.max_plays // (2 * len(starts))
            self._descend_moves(start, first + share)
        chance = Random(0)  # fixed: the same answer every time
        for _ in range(self.problem.max_plays):
            if self.best is None or self.plays >= end or self._done():
                return
            kicked = self._kicked(self.best, chance)
            if kicked is not None:
                self._descend_moves(kicked, end)

    def _descend_moves(self, current: _Candidate, end: int) -> None:
        while self.plays < end and not self._done():
            better = self._first_better(current, end)
            if better is None:
                return
            current = better

    def _kicked(self, current: _Candidate, chance: Random) -> _Candidate | None:
        """A few random exchanges of neighbours away, whatever they cost."""
        found: _Candidate | None = None
        for _ in range(chance.randint(1, 4)):
            orders = exchanged(self.pipes[current.has_weight], current.orders, chance)
            step = self.consider(orders, current.has_weight)
            if step is not None:
                current = found = step
        return found

    def _first_better(self, current: _Candidate, end: int) -> _Candidate | None:
        pipe = self.pipes[current.has_weight]
        played = play(pipe, current.orders)
        if played is None:  # it was played before
            raise AssertionError("a candidate does not end")
        for orders in moved(pipe, current.orders, played):
            if self.plays >= end:
                return None
            found = self.consider(orders, current.has_weight)
            if found is not None and found.makespan_s < current.makespan_s * (1 - _SLACK):
                return found
        return None


def _too_little(problem: AdaptiveProblem) -> ScheduleError:
    needs = [0.0] * (max(problem.lanes) + 1)
    for stage, lane in enumerate(problem.lanes):
        cost = problem.costs.stages[stage]
        needs[lane] += cost.fixed_bytes + cost.activation_bytes
    limits = problem.limits_bytes or ()
    return ScheduleError(
        "HP-SCHEDULE-MEMORY",
        "not even one microbatch at a time fits",
        details=[
            f"lane {lane} needs {spelled(need, 'bytes', 4)} and has {spelled(limit, 'bytes', 4)}"
            for lane, (need, limit) in enumerate(zip(needs, limits, strict=False))
            if need > limit
        ],
        ways_out=("use more microbatches", "recompute activations", "move layers to other stages"),
    )
