"""Columns: the pipelines that a plan of parallel pipelines may be made of. No JAX.

A column is one pipeline on rows of devices: for each group that it uses, in some order, a run of
stages on rows of one size. Its layers are cut so that the slowest stage is as fast as possible with
what each stage holds in flight under 1F1B: for a bound on the stage's time the stages, in order,
take as many layers as they can, and the bound is bisected.

Where stages do not compute while they send, a stage's time holds its transfers, there and back.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetpass.cost.layer_costs import RowCosts
from hetpass.ir.devices import DeviceGroup
from hetpass.planner.pipelines import Market

_BISECTIONS = 18


@dataclass(frozen=True)
class Segment:
    """A run of stages on one group: `stages` rows of `ways` devices."""

    group: int
    ways: int
    stages: int


@dataclass(frozen=True)
class ColumnStage:
    """The layers first … end - 1 on a row of `ways` devices of a group."""

    group: int
    ways: int
    first: int
    end: int


@dataclass(frozen=True)
class Column:
    """A pipeline, and what is expected of it.

    Attributes:
      stages: in layer order.
      devices: that it takes of each group.
      period_s: from one microbatch to the next.
      first_s: the first microbatch, forward and back.
      update_s: of the slowest stage.
    """

    stages: tuple[ColumnStage, ...]
    devices: tuple[int, ...]
    period_s: float
    first_s: float
    update_s: float


def columns(market: Market, examples: int, most_stages: int) -> list[Column]:
    """Every column of at most so many stages that fits, for microbatches of `examples`."""
    maker = _Maker(market, examples)
    found: dict[tuple[ColumnStage, ...], Column] = {}
    for segments in maker.segments(most_stages):
        column = maker.column(segments)
        if column is not None:
            found.setdefault(column.stages, column)
    return list(found.values())


def column_of(market: Market, examples: int, segments: Sequence[Segment]) -> Column | None:
    """The column of these segments; None where it does not fit."""
    maker = _Maker(market, examples)
    known = all((part.group, part.ways) in maker.rows for part in segments)
    return maker.column(segments) if known else None


@dataclass(frozen=True, eq=False)
class _Row:
    """Running sums over the layers of one row."""

    costs: RowCosts
    time_s: list[float]
    held: dict[int, list[float]]
    """By microbatches in flight, bytes on each device."""


class _Maker:
    def __init__(self, market: Market, examples: int) -> None:
        self.market, self.examples = market, examples
        self.groups: Sequence[DeviceGroup] = market.cluster.groups
        self.layers = market.costs.num_layers
        self.rows: dict[tuple[int, int], _Row] = {}
        for index, group in enumerate(self.groups):
            for ways in market.costs.ways(group):
                costs = market.costs.row(group, ways, examples)
                if costs is not None:
                    self.rows[index, ways] = _Row(
                        costs, _sums(costs.forward_s + costs.backward_s), {}
                    )
        self.streams: dict[tuple[int, int, int, int], float] = {}

    def segments(self, most_stages: int) -> Iterator[tuple[Segment, ...]]:
        """Groups in every order, one maybe at both ends; every row size, every number of stages."""
        most = min(most_stages, self.layers)
        for order in self._orders(most):
            used = sorted(set(order))
            for ways in itertools.product(*[[w for g, w in self.rows if g == x] for x in used]):
                widths = dict(zip(used, ways, strict=True))
                for stages in _compositions(len(order), most):
                    parts = [Segment(g, widths[g], n) for g, n in zip(order, stages, strict=True)]
                    if self._has_room(parts):
                        yield tuple(parts)

    def _orders(self, most_stages: int) -> Iterator[tuple[int, ...]]:
        for count in range(1, min(len(self.groups), most_stages) + 1):
            for order in itertools.permutations(range(len(self.groups)), count):
                yield order
                if count > 1 and count < most_stages:
                    yield (*order, order[0])

    def _has_room(self, parts: Sequence[Segment]) -> bool:
        return all(
            sum(p.ways * p.stages for p in parts if p.group == g) <= group.num_devices
            for g, group in enumerate(self.groups)
        )

    def column(self, segments: Sequence[Segment]) -> Column | None:
        rows = [(s.group, s.ways) for s in segments for _ in range(s.stages)]
        between_s = self._between_s(segments)
        around_s = [0.0, *between_s, 0.0]
        held_s = [0.0] * len(rows)
        if not self.market.overlaps:
            held_s = [2 * (a + b) for a, b in itertools.pairwise(around_s)]
        cuts = self._cuts(rows, held_s)
        if cuts is None:
            return None
        stages = tuple(
            ColumnStage(group, ways, first, end)
            for (group, ways), (first, end) in zip(rows, itertools.pairwise(cuts), strict=True)
        )
        times = [self._time_s(stage) for stage in stages]
        return Column(
            stages,
            tuple(
                sum(s.ways * s.stages for s in segments if s.group == g)
                for g in range(len(self.groups))
            ),
            max([t + h for t, h in zip(times, held_s, strict=True)] + between_s),
            math.fsum(times) + 2 * math.fsum(between_s),
            max(self._sum(stage, "update_s") for stage in stages),
        )

    def _time_s(self, stage: ColumnStage) -> float:
        sums = self.rows[stage.group, stage.ways].time_s
        return sums[stage.end] - sums[stage.first]

    def _sum(self, stage: ColumnStage, name: str) -> float:
        costs = self.rows[stage.group, stage.ways].costs
        return float(getattr(costs, name)[stage.first : stage.end].sum())

    # -- transfers ----------------------------------------------------------------------------

    def _between_s(self, segments: Sequence[Segment]) -> list[float]:
        """One way over each boundary; stages of one group lie side by side."""
        seconds: list[float] = []
        for number, part in enumerate(segments):
            per_host = self.groups[part.group].devices_per_host
            for stage in range(part.stages - 1):
                inside = (stage + 1) * part.ways % per_host != 0
                seconds.append(self._stream_s(part, part, inside=inside))
            if number + 1 < len(segments):
                seconds.append(self._stream_s(part, segments[number + 1], inside=False))
        return seconds

    def _stream_s(self, one: Segment, other: Segment, *, inside: bool) -> float:
        """A host of one group is full of such columns, and so are those it sends to."""
        groups = self.groups[one.group], self.groups[other.group]
        sent = float(np.median(self.rows[one.group, one.ways].costs.output_bytes))
        if inside:
            return self.market.network.inside_s(groups[0], sent)
        ends = [
            max(1, g.devices_per_host // (s.ways * s.stages))
            for g, s in zip(groups, (one, other), strict=True)
        ]
        key = (one.group, other.group, one.ways, max(ends))
        if key not in self.streams:
            self.streams[key] = self.market.network.stream_s(*groups, sent, max(ends))
        return self.streams[key]

    # -- cuts ---------------------------------------------------------------------------------

    def _cuts(
        self, rows: Sequence[tuple[int, int]], held_s: Sequence[float]
    ) -> tuple[int, ...] | None:
        """0, the layers at which stages end, L; None where the stages do not fit."""
        if len(rows) > self.layers:
            return None
        high_s = max(
            self.rows[row].time_s[-1] + held for row, held in zip(rows, held_s, strict=True)
        )
        best = self._packed(rows, held_s, high_s)
        if best is None:
            return None
        low_s = 0.0
        for _ in range(_BISECTIONS):
            middle_s = (low_s + high_s) / 2
            found = self._packed(rows, held_s, middle_s)
            if found is None:
                low_s = middle_s
            else:
                best, high_s = found, middle_s
        return best

    def _packed(
        self, rows: Sequence[tuple[int, int]], held_s: Sequence[float], bound_s: float
    ) -> tuple[int, ...] | None:
        """Each stage takes as many layers as time and memory allow; at least one is left to each
        stage that follows."""
        cuts = [0]
        for position, (key, held) in enumerate(zip(rows, held_s, strict=True)):
            row, start = self.rows[key], cuts[-1]
            after = len(rows) - position - 1
            end = bisect_right(row.time_s, row.time_s[start] + bound_s - held) - 1
            bytes_held = self._held(key, after + 1)
            room = bytes_held[start] + self.market.costs.usable_bytes(self.groups[key[0]])
            end = min(end, bisect_right(bytes_held, room) - 1, self.layers - after)
            if end <= start:
                return None
            cuts.append(end)
        return tuple(cuts) if cuts[-1] == self.layers else None

    def _held(self, key: tuple[int, int], in_flight: int) -> list[float]:
        row = self.rows[key]
        if in_flight not in row.held:
            row.held[in_flight] = _sums(row.costs.fixed_bytes + in_flight * row.costs.held_bytes)
        return row.held[in_flight]


def _sums(values: np.ndarray) -> list[float]:
    sums: list[float] = np.concatenate([[0.0], np.cumsum(values)]).tolist()
    return sums


def _compositions(parts: int, most: int) -> Iterator[tuple[int, ...]]:
    """Numbers of one or more for each part, at most `most` together."""
    for numbers in itertools.product(range(1, most - parts + 2), repeat=parts):
        if sum(numbers) <= most:
            yield numbers
