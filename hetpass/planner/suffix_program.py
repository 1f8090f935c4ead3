"""The suffix dynamic program: the shortest fill whose load stays within a bound. No JAX.

Over layers from the last to the first. V[p][x, k, N] is the shortest fill of the layers k … L - 1
on the devices that state x leaves, after a stage on group p which must hold N microbatches in
flight; the link in front of layer k is counted. Keeping every N apart is the Pareto front over
(time, microbatches in flight): a stage with little memory may need a slower, shallower suffix.

Vectorized over states and ranges; the sums of a path are always taken in the same order, and ties
go to the first option, so that equal problems give equal plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.tables import CostTables
from hetpass.planner.objective import ANY, Deltas, Pick, most_in_flight, needed_deltas
from hetpass.planner.resources import NO_STATE, START, ResourceGraph

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to run a stage on some devices: entry [first, end] of a range of layers.

    Attributes:
      table: index into `CostTables.stages`.
      time_s: t, infinite where another way with as many devices is better in all that counts.
      load_s: (M - 1) t + u.
      most: microbatches in flight that fit.
    """

    table: int
    time_s: Floats
    load_s: Floats
    most: Counts


_AT_ONCE = 2_000_000
"""Numbers in one array operation; more are taken in parts."""

Ranges = tuple[Counts, ...]
"""Per first layer, the ends of the ranges that can be used."""

Choices = Mapping[tuple[int, int], tuple[Choice, ...]]
"""By group and number of devices."""


def choices_of(tables: CostTables) -> Choices:
    """The ways to run stages, without those that are dominated."""
    m = tables.num_microbatches
    by_size: dict[tuple[int, int], list[Choice]] = {}
    for index, table in enumerate(tables.stages):
        time_s = table.forward_s + table.backward_s
        most = most_in_flight(table, tables.groups[table.group].memory_bytes, m)
        with np.errstate(invalid="ignore"):
            load_s = (m - 1) * time_s + table.once_s
        load_s[np.isnan(load_s)] = np.inf
        choice = Choice(index, time_s, load_s, most)
        by_size.setdefault((table.group, table.devices), []).append(choice)
    kept = {
        key: tuple(c for c in _undominated(ways) if np.isfinite(c.time_s).any())
        for key, ways in sorted(by_size.items())
    }
    return {key: ways for key, ways in kept.items() if ways}


def _undominated(ways: Sequence[Choice]) -> list[Choice]:
    results = []
    for i, way in enumerate(ways):
        time_s = np.where(way.most >= 1, way.time_s, np.inf)
        for j, other in enumerate(ways):
            if i == j:
                continue
            no_better = (
                (other.time_s <= way.time_s)
                & (other.load_s <= way.load_s)
                & (other.most >= way.most)
            )
            same = (
                (other.time_s == way.time_s)
                & (other.load_s == way.load_s)
                & (other.most == way.most)
            )
            time_s[no_better & ~same | (same & (j < i))] = np.inf
        results.append(Choice(way.table, time_s, way.load_s, way.most))
    return results


@dataclass(frozen=True, eq=False)
class SuffixProgram:
    """The program for one problem; `solve` runs it for a bound.

    Attributes:
      tables, choices, graph: the problem.
      most_levels: in-flight counts are told apart up to so many; a stage that needs more must have
        room for all M.
      allowed: what the schedule allows for in-flight counts of neighbours.
    """

    tables: CostTables
    choices: Choices
    graph: ResourceGraph
    most_levels: int = 32
    allowed: Deltas = ANY

    def levels(self) -> int:
        """How many in-flight counts matter: beyond the largest that binds, all are alike."""
        m = self.tables.num_microbatches
        binding = max(
            (int(c.most[c.most < m].max(initial=0)) for w in self.choices.values() for c in w),
            default=0,
        )
        return max(1, min(m, binding + 1, self.most_levels))

    def solve(self, bound_s: float, *, free_memory: bool = False) -> tuple[Pick, ...] | None:
        """The stages of the shortest fill with a load of at most `bound_s`; None if there are none.

        Args:
          free_memory: one microbatch in flight is taken for any number, and what is allowed for
            them is not looked at: faster, and a lower bound.
        """
        found = self.paths(bound_s, 1, free_memory=free_memory)
        return found[0] if found else None

    def paths(
        self, bound_s: float, count: int, *, free_memory: bool = False
    ) -> list[tuple[Pick, ...]]:
        """As `solve`; after it, the best that begin with other numbers of devices or on other
        groups, at most `count` in all."""
        run = _Run(self, bound_s, 1 if free_memory else self.levels(), free_memory)
        return run.paths(count)


@dataclass(frozen=True, eq=False)
class _Way:
    """A choice under a bound.

    Attributes:
      ranges: per first layer, the ends that stay within it.
      deltas: by the group in front, δ per range of layers.
    """

    choice: Choice
    ranges: Ranges
    deltas: tuple[Counts | None, ...]

    def deltas_of(self, before: int, layer: int, ends: Counts) -> Counts:
        table = self.deltas[before]
        if table is None:
            raise AssertionError("no link from the group in front")
        result: Counts = table[layer, ends]
        return result


Ways = Mapping[tuple[int, int], Sequence[_Way]]
"""By group and number of devices."""


@dataclass(frozen=True, eq=False)
class _Merged:
    """A group without regard to memory: the fastest way within the bound, per number of devices.

    Attributes:
      time_s: [number of devices, first layer, end].
      moves: by the group in front, [number of devices, its states].
    """

    group: int
    time_s: Floats
    moves: Mapping[int, Counts]

    @classmethod
    def of(cls, run: _Run, group: int) -> _Merged | None:
        """None for a group that cannot be used."""
        sizes = [key[1] for key in run.choices if key[0] == group]
        moves = {}
        for p in range(len(run.values)):
            rows = [run.graph.moves.get((p, group, size)) for size in sizes]
            known = [row for row in rows if row is not None]
            if sizes and len(known) == len(sizes):
                moves[p] = np.stack(known)
        if not moves:
            return None
        fastest = [
            np.minimum.reduce(
                [
                    np.where((w.load_s <= run.bound_s) & (w.most >= 1), w.time_s, np.inf)
                    for w in run.choices[group, size]
                ]
            )
            for size in sizes
        ]
        return cls(group, np.stack(fastest), moves)


@dataclass(frozen=True)
class _Step:
    """A stage of a path: the fill from it on, its group, and the state and level after it."""

    fill_s: float
    pick: Pick
    group: int
    state: int
    level: int


class _Run:
    """One bound: the tables of values, and the path through them."""

    def __init__(
        self, program: SuffixProgram, bound_s: float, levels: int, free_memory: bool
    ) -> None:
        self.choices, self.graph = program.choices, program.graph
        tables = program.tables
        self.m, self.layers = tables.num_microbatches, tables.num_layers
        self.bound_s, self.levels, self.free_memory = bound_s, levels, free_memory
        self.allowed = program.allowed
        occupied = np.maximum(tables.link_forward_s, tables.link_backward_s)
        rounds = tables.link_forward_s + tables.link_backward_s
        rounds = rounds + 2 * tables.link_latency_s[:, :, None]
        with np.errstate(invalid="ignore"):
            fast = (self.m - 1) * occupied <= bound_s
        self.round_s = np.where(fast & np.isfinite(rounds), rounds, np.inf)
        self.values = [
            np.full((count, self.layers + 1, levels), np.inf) for count in self.graph.counts
        ]
        for value in self.values:
            value[:, self.layers, 0] = 0.0
        self.reached = np.ones(self.layers + 1, dtype=np.int64)
        """Per layer, the most levels that any value in front of it or behind is finite on."""

    def _way(self, group: int, way: Choice) -> _Way:
        """The way with what the bound asks of it."""
        deltas: list[Counts | None] = []
        for p in range(len(self.values)):
            round_s = self.round_s[p, group, :-1, None]
            known = np.isfinite(round_s)
            if self.free_memory or not known.any():
                deltas.append(None)
                continue
            wait_s = way.time_s + np.where(known, round_s, 0.0)
            deltas.append(needed_deltas(wait_s, self.bound_s, self.m, self.allowed))
        return _Way(way, self._ranges(way), tuple(deltas))

    def paths(self, count: int) -> list[tuple[Pick, ...]]:
        """The shortest by their first stages, at most so many."""
        if self.free_memory:
            merged = [_Merged.of(self, group) for group in range(len(self.values))]
            for layer in range(self.layers - 1, 0, -1):
                for part in merged:
                    if part is not None:
                        self._extend_free(layer, part)
            return self._paths(self._ways(), count)
        ways = self._ways()
        for layer in range(self.layers - 1, 0, -1):
            for (group, devices), own in ways.items():
                self._extend(layer, group, devices, own)
            self.reached[layer] = max(self.reached[layer + 1], self._levels_at(layer))
        return self._paths(ways, count)

    def _ways(self) -> Ways:
        return {key: [self._way(key[0], way) for way in all_] for key, all_ in self.choices.items()}

    def _levels_at(self, layer: int) -> int:
        finite = [np.isfinite(value[:, layer]).any(axis=0) for value in self.values]
        levels = np.nonzero(np.logical_or.reduce(finite))[0]
        return int(levels[-1]) + 1 if len(levels) else 1

    def _ranges(self, way: Choice) -> tuple[Counts, ...]:
        """Per first layer, the ends of the ranges that stay within the bound."""
        usable = (way.load_s <= self.bound_s) & np.isfinite(way.load_s)
        usable &= np.isfinite(way.time_s) & (way.most >= 1)
        return tuple(np.nonzero(row)[0] for row in usable)

    def _ends(self, way: Choice, layer: int, ends: Counts, states: Floats) -> Floats:
        """Fill of a stage and what follows, [states, ends, N]; infinite where N does not fit."""
        if self.free_memory:
            free: Floats = states + way.time_s[layer, ends][:, None]
            return free
        most = way.most[layer, ends]
        counts = np.arange(1, states.shape[-1] + 1)
        if len(counts) == self.levels < self.m:
            counts[-1] = self.m  # the last level stands for all that are larger
        room = np.where(counts[None, :] <= most[:, None], 0.0, np.inf)
        cost: Floats = states + (way.time_s[layer, ends][:, None] + room)
        return cost

    def _extend(self, layer: int, group: int, devices: int, ways: Sequence[_Way]) -> None:
        """Every stage that begins at `layer` on these devices, after every group."""
        usable = [way for way in ways if len(way.ranges[layer])]
        before = [
            p
            for p in range(len(self.values))
            if np.isfinite(self.round_s[p, group, layer])
            and (p, group, devices) in self.graph.moves
        ]
        if not before or not usable:
            return
        shape = (self.graph.counts[group] + 1, self.levels)
        best = [np.full(shape, np.inf) for _ in before]
        states = self.values[group][..., : self.reached[layer + 1]]
        for way in usable:
            ends = way.ranges[layer]
            fill = self._ends(way.choice, layer, ends, states[:, ends])
            shifted: dict[bytes, Floats] = {}
            for index, p in enumerate(before):
                deltas = way.deltas_of(p, layer, ends)
                key = deltas.tobytes()
                if key not in shifted:
                    shifted[key] = self._shifted(fill, deltas)
                np.minimum(best[index][:-1], shifted[key], out=best[index][:-1])
        for index, p in enumerate(before):
            moves = self.graph.moves[p, group, devices]  # NO_STATE reads the last, infinite row
            value = self.values[p][:, layer]
            np.minimum(value, best[index][moves] + self.round_s[p, group, layer], out=value)

    def _extend_free(self, layer: int, part: _Merged) -> None:
        """The same without regard to memory, for all devices of a group at once."""
        time_s = part.time_s[:, layer, layer + 1 :]
        if not np.isfinite(time_s).any():
            return
        after = self.values[part.group][:, layer + 1 :, 0]
        best = np.full((len(time_s), len(after) + 1), np.inf)
        if time_s.size * len(after) <= _AT_ONCE:
            best[:, :-1] = (after[None] + time_s[:, None]).min(axis=2)
        else:
            for row, times in zip(best, time_s, strict=True):
                row[:-1] = (after + times).min(axis=1)
        for p, moves in part.moves.items():
            round_s = self.round_s[p, part.group, layer]
            if np.isfinite(round_s):
                value = self.values[p][:, layer, 0]
                found = np.take_along_axis(best, moves, axis=1).min(axis=0)
                np.minimum(value, found + round_s, out=value)

    def _shifted(self, fill: Floats, deltas: Counts) -> Floats:
        """The best over ends, [states, N + δ]: what the stage in front must hold."""
        result = np.full((fill.shape[0], self.levels), np.inf)
        for delta in np.unique(deltas):
            least = fill[:, deltas == delta].min(axis=1)
            if delta > self.m:
                held = self._all_held(least)
                np.minimum(result[:, -1], held, out=result[:, -1])
                continue
            cut = max(self.levels - int(delta), 0)
            kept = least[:, :cut]
            if kept.size:
                moved = result[:, int(delta) : int(delta) + kept.shape[1]]
                np.minimum(moved, kept, out=moved)
            last = result[:, -1]
            np.minimum(last, least[:, cut:].min(axis=1, initial=np.inf), out=last)
        return result

    def _reached(self, deltas: Counts) -> Counts:
        """Per end and N, the level that the stage in front is on; -1 where there is none."""
        last = self.levels - 1
        own = np.arange(self.levels)[None, :]
        reached: Counts = np.minimum(own + deltas[:, None], last)
        most = self.allowed.most
        if most is not None:
            held = (own + most >= last) & (self.levels == self.m)
            reached = np.where((deltas > self.m)[:, None], np.where(held, last, -1), reached)
        return reached

    def _all_held(self, least: Floats) -> Floats:
        """Where more is needed than is allowed: only a stage that holds all M never waits."""
        if self.allowed.most is None or self.levels < self.m:
            return np.full(least.shape[0], np.inf)
        first = max(self.m - 1 - self.allowed.most, 0)
        held: Floats = least[:, first:].min(axis=1, initial=np.inf)
        return held

    # -- the path -----------------------------------------------------------------------------

    def _paths(self, ways: Ways, count: int) -> list[tuple[Pick, ...]]:
        start = (START, 0, 0, -1)
        firsts = [self._step({key: own}, start) for key, own in ways.items()]
        known = sorted((f for f in firsts if f is not None), key=lambda first: first.fill_s)
        return [self._path(ways, first) for first in known[:count]]

    def _path(self, ways: Ways, step: _Step) -> tuple[Pick, ...]:
        picks = [step.pick]
        while picks[-1].end < self.layers:
            after = self._step(ways, (step.group, step.state, step.pick.end, step.level))
            if after is None:
                raise AssertionError("a value of the program has no path")
            step = after
            picks.append(step.pick)
        return tuple(picks)

    def _step(self, ways_of: Ways, place: tuple[int, int, int, int]) -> _Step | None:
        """The first best stage from a state whose value is at a level; any level at the start.

        Args:
          place: the group of the stage in front, the state after it, the layer, the level.
        """
        before, state, layer, level = place
        best_s, best = math.inf, None
        for (group, devices), ways in ways_of.items():
            moves = self.graph.moves.get((before, group, devices))
            round_s = 0.0 if before == START else float(self.round_s[before, group, layer])
            if moves is None or moves[state] == NO_STATE or math.isinf(round_s):
                continue
            after = int(moves[state])
            for way in ways:
                ends = way.ranges[layer]
                if not len(ends):
                    continue
                fill = self._ends(way.choice, layer, ends, self.values[group][after][ends])
                if before != START and not self.free_memory:
                    deltas = way.deltas_of(before, layer, ends)
                    fill = np.where(self._reached(deltas) == level, fill, np.inf)
                fill = fill + round_s
                at = int(fill.argmin())
                if fill.flat[at] < best_s:
                    best_s = float(fill.flat[at])
                    end, index = divmod(at, self.levels)
                    pick = Pick(way.choice.table, layer, int(ends[end]))
                    best = _Step(best_s, pick, group, after, index)
        return best
