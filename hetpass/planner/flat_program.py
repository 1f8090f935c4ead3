"""The suffix program as flat arrays: ways to run stages, links in front of them, moves. No JAX.

`planner.suffix_program` goes over groups and sizes one by one; here they lie in one array, so that
one operation serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.tables import CostTables
from hetpass.planner.objective import Deltas
from hetpass.planner.resources import NO_STATE, START, ResourceGraph
from hetpass.planner.suffix_program import Choices

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Moves:
    """Edges between nodes (a group with one of its states), those of few left devices first.

    Attributes:
      source, target: nodes; a stage lies between the two.
      row: of `FlatProgram`: who takes how many devices, after whom.
      blocks: edges of each block have sources with equally many devices left.
    """

    source: Counts
    target: Counts
    row: Counts
    blocks: tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class FlatProgram:
    """A problem. A *row* is a number of devices of a group, after a group; a *way* belongs to one.

    Attributes:
      num_layers, num_microbatches, num_nodes: L, M and the number of nodes.
      allowed: what the schedule allows for in-flight counts of neighbours.
      table: per way, index into `CostTables.stages`.
      choice: per way, its place in the four arrays that follow.
      time_s, load_s, most: [choices, L, L + 1], as in `suffix_program.Choice`; infinite times and
        loads, and 0, where the stage cannot be.
      row_of: per way.
      first_way: per row, and the number of ways at the end.
      round_s: [rows, L], of the link in front of a layer; infinite where there is none.
      occupied_s: [rows, L], what the link adds to the load.
      moves: between nodes.
      start_row, start_target: moves from the state of all devices; their rows have no link.
    """

    num_layers: int
    num_microbatches: int
    num_nodes: int
    allowed: Deltas
    table: Counts
    choice: Counts
    time_s: Floats
    load_s: Floats
    most: Counts
    row_of: Counts
    first_way: Counts
    round_s: Floats
    occupied_s: Floats
    moves: Moves
    start_row: Counts
    start_target: Counts


def flat_program(
    tables: CostTables, choices: Choices, graph: ResourceGraph, allowed: Deltas
) -> FlatProgram:
    """The arrays of a problem."""
    ways = [way for own in choices.values() for way in own]
    time_s = np.stack([way.time_s for way in ways])
    load_s = np.stack([way.load_s for way in ways])
    most = np.stack([way.most for way in ways])
    never = ~(np.isfinite(time_s) & np.isfinite(load_s)) | (most < 1)
    time_s[never], load_s[never], most[never] = np.inf, np.inf, 0
    first_choice = dict(
        zip(choices, np.cumsum([0] + [len(own) for own in choices.values()]), strict=False)
    )
    round_s, occupied_s = _links(tables)
    rows = _Rows(round_s, occupied_s)
    moves, starts = _moves(graph, choices, rows)
    row_choices = [
        np.arange(first_choice[key], first_choice[key] + len(choices[key])) for key in rows.keys
    ]
    choice = np.concatenate(row_choices)
    sizes = [len(own) for own in row_choices]
    return FlatProgram(
        tables.num_layers,
        tables.num_microbatches,
        sum(graph.counts),
        allowed,
        np.array([way.table for way in ways])[choice],
        choice,
        time_s,
        load_s,
        most,
        np.repeat(np.arange(len(sizes)), sizes),
        np.concatenate([[0], np.cumsum(sizes)]),
        np.stack(rows.round_s),
        np.stack(rows.occupied_s),
        moves,
        np.array([row for row, _ in starts], dtype=np.int64),
        np.array([target for _, target in starts], dtype=np.int64),
    )


def _links(tables: CostTables) -> tuple[Floats, Floats]:
    """Round trips, and what links add to the load, [G, G, L]; infinite where there is no link."""
    forward, backward = tables.link_forward_s[:, :, :-1], tables.link_backward_s[:, :, :-1]
    round_s = forward + backward + 2 * tables.link_latency_s[:, :, None]
    with np.errstate(invalid="ignore"):
        occupied_s = (tables.num_microbatches - 1) * np.maximum(forward, backward)
    known = np.isfinite(round_s)
    return np.where(known, round_s, np.inf), np.where(known, occupied_s, np.inf)


class _Rows:
    """Rows by number of devices and the links in front: groups with equal links share one."""

    def __init__(self, round_s: Floats, occupied_s: Floats) -> None:
        self._links = round_s, occupied_s
        self._known: dict[object, int] = {}
        self.keys: list[tuple[int, int]] = []
        self.round_s: list[Floats] = []
        self.occupied_s: list[Floats] = []

    def of(self, before: int, key: tuple[int, int]) -> int | None:
        """The row of a number of devices of a group after another; None without a link."""
        if before == START:
            nothing = np.zeros(self._links[0].shape[-1])
            return self._row((START, key), key, nothing, nothing)
        round_s, occupied_s = (links[before, key[0]] for links in self._links)
        if not np.isfinite(round_s[1:]).any():
            return None
        return self._row((round_s.tobytes(), key), key, round_s, occupied_s)

    def _row(self, name: object, key: tuple[int, int], round_s: Floats, occupied_s: Floats) -> int:
        if name not in self._known:
            self._known[name] = len(self.keys)
            self.keys.append(key)
            self.round_s.append(round_s)
            self.occupied_s.append(occupied_s)
        return self._known[name]


def _moves(
    graph: ResourceGraph, choices: Choices, rows: _Rows
) -> tuple[Moves, list[tuple[int, int]]]:
    offset = np.concatenate([[0], np.cumsum(graph.counts)])
    parts, starts = [], []
    for key in choices:
        for before in range(-1, len(graph.counts)):
            move = graph.moves.get((before, *key))
            row = None if move is None else rows.of(before, key)
            if move is None or row is None:
                continue
            legal = np.nonzero(move != NO_STATE)[0]
            target = offset[key[0]] + move[legal]
            if before == START:
                starts += [(row, int(node)) for node in target]
                continue
            parts.append((offset[before] + legal, target, np.full(len(legal), row)))
    source, target, row_of = (
        np.concatenate([part[i] for part in parts]) if parts else np.zeros(0, dtype=np.int64)
        for i in range(3)
    )
    left = np.concatenate(graph.left)[source]
    order = np.lexsort((row_of, source, left))
    ends = np.nonzero(np.diff(left[order], append=-1))[0] + 1
    blocks = tuple(slice(int(a), int(b)) for a, b in zip([0, *ends], ends, strict=False))
    return Moves(source[order], target[order], row_of[order], blocks), starts
