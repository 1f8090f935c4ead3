"""The fastest schedule there is, for small pipelines: to hold the adaptive one against.

`exhaustive_s` plays every order of tasks that keeps microbatches in order; `cp_sat` solves a
constraint program (needs ortools) in which transfers and microbatches may take any order too.
Both are for one stage per lane and links that overlap with compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hetpass.planner.adaptive import AdaptiveProblem
from hetpass.schedules.pipe import Pipe, prepare
from hetpass.simulator.engine import play

Word = tuple[tuple[int, int], ...]
"""(kind, microbatch) of one stage's tasks, in order; kinds F = 0, B = 1, W = 2."""


def exhaustive_s(problem: AdaptiveProblem) -> float:
    """Seconds of the fastest order that fits the memory; inf if none does."""
    stages, m = len(problem.lanes), problem.num_microbatches
    best_s = float("inf")
    for has_weight in _modes(problem):
        pipe = prepare(problem.costs, problem.lanes, m, has_weight)
        words = tuple(_words(m, has_weight))
        lanes = [
            [
                [(kind * stages + stage) * m + microbatch for kind, microbatch in word]
                for word in words
                if _fits(problem, stage, word, has_weight)
            ]
            for stage in range(stages)
        ]
        for orders in itertools.product(*lanes):
            played = play(pipe, orders)
            if played is not None:
                best_s = min(best_s, played.makespan_s)
    return best_s


def _modes(problem: AdaptiveProblem) -> tuple[bool, ...]:
    return (False, True) if problem.split_weights else (False,)


def _words(
    m: int, has_weight: bool, word: Word = (), counts: tuple[int, ...] = (0, 0, 0)
) -> Iterator[Word]:
    if len(word) == m * (3 if has_weight else 2):
        yield word
    most = (m, counts[0], counts[1] if has_weight else 0)
    for kind in range(3):
        if counts[kind] < most[kind]:
            more = tuple(c + (k == kind) for k, c in enumerate(counts))
            yield from _words(m, has_weight, (*word, (kind, counts[kind])), more)


def _fits(problem: AdaptiveProblem, stage: int, word: Word, has_weight: bool) -> bool:
    if problem.limits_bytes is None:
        return True
    cost = problem.costs.stages[stage]
    keeps = cost.weight_bytes if has_weight else 0.0
    held = most = cost.fixed_bytes
    for kind, _ in word:
        held += (cost.activation_bytes, keeps - cost.activation_bytes, -keeps)[kind]
        most = max(most, held)
    return most <= problem.limits_bytes[stage] * (1 + 1e-9)


@dataclass(frozen=True)
class CpSat:
    """What the solver knows: nothing is faster than `bound_s`; `makespan_s` was found."""

    makespan_s: float
    bound_s: float

    @property
    def proved(self) -> bool:
        """Whether the two meet."""
        return self.bound_s >= self.makespan_s * (1 - 1e-6)


def cp_sat(problem: AdaptiveProblem, limit_s: float, ticks_per_s: int = 10_000) -> CpSat:
    """Solves with one worker; times are rounded down to ticks, so that the bound stays one."""
    found = [_solve(problem, has_weight, limit_s, ticks_per_s) for has_weight in _modes(problem)]
    return CpSat(min(f.makespan_s for f in found), min(f.bound_s for f in found))


@dataclass
class _Model:
    """A constraint program under construction."""

    cp: Any
    horizon: int
    ticks: int
    lanes: dict[int, list[Any]] = field(default_factory=dict)
    wires: dict[int, list[Any]] = field(default_factory=dict)
    starts: dict[tuple[int, int], Any] = field(default_factory=dict)
    ends: dict[tuple[int, int], Any] = field(default_factory=dict)


def _solve(problem: AdaptiveProblem, has_weight: bool, limit_s: float, ticks: int) -> CpSat:
    from ortools.sat.python import cp_model

    m, stages = problem.num_microbatches, len(problem.lanes)
    pipe = prepare(problem.costs, problem.lanes, m, has_weight)
    total_s = sum((b.duration_s + b.occupies_s + b.latency_s) * m for b in pipe.blocks)
    model = _Model(cp_model.CpModel(), int((total_s + sum(pipe.updates_s)) * ticks) + 1, ticks)
    cp = model.cp
    _add_tasks(model, pipe, 3 if has_weight else 2)
    _add_transfers(model, pipe)
    _add_memory(model, problem, has_weight)
    for intervals in (*model.lanes.values(), *model.wires.values()):
        cp.add_no_overlap(intervals)
    for block in range((3 if has_weight else 2) * stages):
        for i in range(m - 1):  # microbatches are alike
            if block < stages:
                cp.add(model.starts[block, i] <= model.starts[block, i + 1])
    makespan = cp.new_int_var(0, model.horizon, "makespan")
    for (block, _), end in model.ends.items():
        cp.add(makespan >= end + int(pipe.updates_s[block % stages] * ticks))
    cp.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    status = solver.solve(cp)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return CpSat(float("inf"), float("inf") if status == cp_model.INFEASIBLE else 0.0)
    return CpSat(solver.objective_value / ticks, solver.best_objective_bound / ticks)


def _add_tasks(model: _Model, pipe: Pipe, kinds: int) -> None:
    cp, stages = model.cp, pipe.num_stages
    for block in range(kinds * stages):
        ticks = int(pipe.blocks[block].duration_s * model.ticks)
        for i in range(pipe.num_microbatches):
            start = cp.new_int_var(0, model.horizon, "")
            model.starts[block, i], model.ends[block, i] = start, start + ticks
            interval = cp.new_fixed_size_interval_var(start, ticks, "")
            model.lanes.setdefault(block % stages, []).append(interval)
            if block >= stages:
                cp.add(start >= model.ends[block - stages, i])


def _add_transfers(model: _Model, pipe: Pipe) -> None:
    for index, block in enumerate(pipe.blocks[: 2 * pipe.num_stages]):
        if block.to < 0:
            continue
        occupies, latency = int(block.occupies_s * model.ticks), int(block.latency_s * model.ticks)
        for i in range(pipe.num_microbatches):
            sent = model.cp.new_int_var(0, model.horizon, "")
            model.cp.add(sent >= model.ends[index, i])
            model.cp.add(model.starts[block.to, i] >= sent + occupies + latency)
            interval = model.cp.new_fixed_size_interval_var(sent, occupies, "")
            for wire in block.wires:
                model.wires.setdefault(wire, []).append(interval)


def _add_memory(model: _Model, problem: AdaptiveProblem, has_weight: bool) -> None:
    if problem.limits_bytes is None:
        return
    stages, units = len(problem.lanes), 10_000
    for stage, cost in enumerate(problem.costs.stages):
        spans, demands = [], []
        parts = [(stage, stages + stage, cost.activation_bytes)]
        if has_weight:
            parts.append((stages + stage, 2 * stages + stage, cost.weight_bytes))
        for begin, end, held in parts:
            for i in range(problem.num_microbatches):
                start = model.starts[begin, i] if begin == stage else model.ends[begin, i]
                size = model.cp.new_int_var(0, model.horizon, "")
                spans.append(model.cp.new_interval_var(start, size, model.ends[end, i], ""))
                demands.append(int(held * units))
        free = problem.limits_bytes[stage] - cost.fixed_bytes
        model.cp.add_cumulative(spans, demands, int(free * units) + 1)
