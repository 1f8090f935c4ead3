"""An operation graph in a setting as nodes and edges with seconds and bytes. No JAX.

Nodes are operations (their strategies), values with a layout of their own, and for every parameter
three: at rest, in use, accumulator. Edges are the reshards between them. Seconds are of a whole
step: what happens in every microbatch counts M times, what happens once per step counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from hetpass.cost.layouts import layouts, ways, whole
from hetpass.cost.operation_choices import compute_ways, operation_s, touched_share
from hetpass.cost.reshard import ReshardTable, arrival_s, reshard_table
from hetpass.ir.operation_graph import (
    Assignment,
    Layout,
    Operation,
    OperationGraph,
    Value,
)
from hetpass.planner.intra_op.dataflow import Dataflow
from hetpass.planner.intra_op.pbqp import Edge, Floats, Problem
from hetpass.planner.intra_op.setting import Setting, arrives
from hetpass.planner.intra_op.strategies import Liberties, Strategy, strategies

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class InUse:
    """How a parameter is used: its layout, and whether it is gathered once per step."""

    layout: Layout
    once: bool


@dataclass(frozen=True)
class Node:
    """What a node of the problem decides.

    Attributes:
      of: what it is.
      number: of the operation, the value or the parameter.
      choices: strategies for an operation, `InUse` for a parameter in use, else layouts.
    """

    of: Literal["operation", "stored", "at_rest", "in_use", "accumulator"]
    number: int
    choices: tuple[Strategy, ...] | tuple[Layout, ...] | tuple[InUse, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """Attributes:
    flow, setting: what it was made from.
    nodes: what each node decides.
    seconds, memory: the same nodes and edges with seconds of a step, and bytes on each device.
    boundary: value -> node, for the values that come from or go to other layers.
    """

    flow: Dataflow
    setting: Setting
    nodes: tuple[Node, ...]
    seconds: Problem
    memory: Problem
    boundary: dict[int, int]

    @property
    def graph(self) -> OperationGraph:
        """The operations."""
        return self.flow.graph

    def weighed(self, seconds_per_byte: float) -> Problem:
        """Seconds, with a price on memory."""
        if not seconds_per_byte:
            return self.seconds
        nodes = tuple(
            s + seconds_per_byte * m
            for s, m in zip(self.seconds.nodes, self.memory.nodes, strict=True)
        )
        edges = dict(self.seconds.edges)
        for key, table in self.memory.edges.items():
            edges[key] = edges[key] + seconds_per_byte * table
        return Problem(nodes, edges)

    def assignment(self, choices: Sequence[int]) -> Assignment:
        """The answer that one choice per node makes."""
        operations = {}
        kept: dict[str, dict[int, Layout]] = {"stored": {}, "at_rest": {}, "accumulator": {}}
        once = set()
        parameters = {p.value: k for k, p in enumerate(self.graph.parameters)}
        for node, number in zip(self.nodes, choices, strict=True):
            choice = node.choices[number]
            if isinstance(choice, Strategy):
                operations[node.number] = choice.choice
            elif isinstance(choice, InUse):
                kept["stored"][node.number] = choice.layout
                if choice.once:
                    once.add(parameters[node.number])
            else:
                kept[node.of][node.number] = choice
        return Assignment(
            self.setting.mesh.axes,
            tuple(operations[k] for k in range(len(self.graph.operations))),
            stored=kept["stored"],
            at_rest=kept["at_rest"],
            accumulators=kept["accumulator"],
            gathered_once=frozenset(once),
            recompute=self.setting.recompute,
            links=tuple((k.latency_s, k.bandwidth) for k in self.setting.mesh.links),
            reduce_scatter=self.setting.mesh.reduce_scatter,
        )


def program(
    graph: OperationGraph, setting: Setting, resting: Mapping[str, Layout] = MappingProxyType({})
) -> Program:
    """The nodes and edges of a graph in a setting.

    Args:
      resting: parameter, by name -> how it lies at rest, where that is decided already.
    """
    return _Builder(graph, setting, resting).built()


class _Builder:
    """Collects nodes and edges."""

    def __init__(
        self, graph: OperationGraph, setting: Setting, resting: Mapping[str, Layout]
    ) -> None:
        self.graph, self.setting, self.flow = graph, setting, Dataflow(graph)
        self.resting = resting
        self.mesh = setting.mesh.axes
        self.again = self.flow.repeated(alone=setting.alone)
        self.nodes: list[Node] = []
        self.seconds: list[Floats] = []
        self.memory: list[Floats] = []
        self.edge_seconds: dict[Edge, Floats] = {}
        self.edge_memory: dict[Edge, Floats] = {}
        self.operations: list[int] = []
        self.stored: dict[int, int] = {}
        self.trained = {p.value: k for k, p in enumerate(graph.parameters)}

    def built(self) -> Program:
        self.add_operations()
        for value in sorted(self.flow.canonical):
            self.add_stored(value)
        for value in range(len(self.graph.values)):
            self.connect_value(value)
        for number in range(len(self.graph.parameters)):
            self.add_parameter(number)
        for value in self.graph.accumulated:
            if value not in self.flow.owners:
                self.add_accumulator(value, self.graph.values[value].item_bytes)
        for one, other in self.graph.ties:
            self.tie(one, other)
        edge = {*self.graph.activations_out, *self.graph.cotangents_out}
        roles = ("activation", "cotangent")
        boundary = {
            v: node
            for v, node in self.stored.items()
            if v in edge or self.graph.values[v].role in roles
        }
        return Program(
            self.flow,
            self.setting,
            tuple(self.nodes),
            Problem(tuple(self.seconds), self.edge_seconds),
            Problem(tuple(self.memory), self.edge_memory),
            boundary,
        )

    # -- nodes --------------------------------------------------------------------------------

    def add(self, node: Node, seconds: Floats, memory: Floats) -> int:
        self.nodes.append(node)
        self.seconds.append(seconds)
        self.memory.append(memory)
        return len(self.nodes) - 1

    def add_operations(self) -> None:
        merging = self.setting.mesh.merges_reductions
        summands = self.flow.summands(merging=merging)
        for k, operation in enumerate(self.graph.operations):
            liberties = Liberties(
                take=bool(operation.operands) and summands.issuperset(operation.operands),
                leave=summands.issuperset(operation.results),
                scatter=self.setting.mesh.reduce_scatter,
            )
            found = strategies(operation, self.graph.values, self.mesh, liberties)
            seconds = self.runs(k) * np.array([self.strategy_s(operation, s) for s in found])
            self.operations.append(
                self.add(Node("operation", k, found), seconds, np.zeros(len(found)))
            )

    def runs(self, number: int) -> int:
        """How often an operation runs in a step."""
        phases = set(self.flow.phases[number])
        if self.setting.recompute and number in self.again:
            phases.add("backward")
        return self.setting.num_microbatches * self.graph.operations[number].count * len(phases)

    def strategy_s(self, operation: Operation, strategy: Strategy) -> float:
        """Of one run: arithmetic, memory traffic, and the reduction of its results."""
        values = self.graph.values
        touched = touched_share(operation, values, (strategy.operands, strategy.natural), self.mesh)
        parts = compute_ways(strategy.choice, self.mesh)
        seconds = operation_s(operation, parts, touched, self.setting.kind, self.setting.reached)
        pinned = strategy.choice.results
        for v, before, after in zip(operation.results, strategy.natural, pinned, strict=True):
            if before != after:
                table = self.table(values[v])
                seconds += float(table.seconds[table.index[before], table.index[after]])
        return seconds

    def table(self, value: Value, item_bytes: float | None = None) -> ReshardTable:
        size = value.item_bytes if item_bytes is None else item_bytes
        return reshard_table(value.shape, size, self.setting.mesh)

    def add_stored(self, number: int) -> None:
        value = self.graph.values[number]
        if number in self.trained:
            return
        everywhere = value.role == "whole" or (
            value.role == "inner" and number not in self.flow.producers
        )
        if everywhere:
            choices: tuple[Layout, ...] = (whole(len(value.shape)),)
        else:
            choices = self.candidates(number)
        local = self.local_bytes(value.size_bytes, choices)
        memory, seconds = np.zeros(len(choices)), np.zeros(len(choices))
        if number in self.flow.residuals:
            memory = self.setting.held * local
        if value.role == "parameter":
            memory = local
        if value.role == "example":  # copied from the host beforehand, and read
            seconds = self.setting.num_microbatches * local / self.setting.bandwidth
        if arrives(value, self.setting):
            prices = arrival_s(value, self.setting.mesh)
            seconds = self.setting.num_microbatches * np.array([prices[c] for c in choices])
        self.stored[number] = self.add(Node("stored", number, choices), seconds, memory)

    def candidates(self, number: int) -> tuple[Layout, ...]:
        """Layouts of a value: all with axes in the order of the mesh, and others that occur."""
        value = self.graph.values[number]
        found = dict.fromkeys(layouts(value.shape, self.mesh))
        if value.role in ("activation", "cotangent") or number in {
            *self.graph.activations_out,
            *self.graph.cotangents_out,
        }:
            return tuple(found)  # neighbouring layers have the same
        found |= dict.fromkeys(self.meeting(number))
        return tuple(layout for layout in found if not layout.partial)

    def meeting(self, number: int) -> list[Layout]:
        """The layouts in which a value is made or wanted."""
        found = []
        made = self.flow.producers.get(number)
        if made is not None:
            found += [s.choice.results[made[1]] for s in self.strategies_of(made[0])]
        for reader in self.flow.readers[number]:
            found += [s.operands[reader.operand] for s in self.strategies_of(reader.operation)]
        return found

    def strategies_of(self, number: int) -> tuple[Strategy, ...]:
        return self.nodes[self.operations[number]].choices  # type: ignore[return-value]

    def local_bytes(self, size_bytes: float, choices: Sequence[Layout]) -> Floats:
        return size_bytes / np.array([ways(layout, self.mesh) for layout in choices])

    # -- edges --------------------------------------------------------------------------------

    def connect(self, i: int, j: int, seconds: Floats, memory: Floats | None = None) -> None:
        """Adds costs [choice of i, choice of j]."""
        if i > j:
            i, j, seconds = j, i, seconds.T
            memory = None if memory is None else memory.T
        known = self.edge_seconds.get((i, j))
        self.edge_seconds[i, j] = seconds if known is None else known + seconds
        if memory is not None:
            self.edge_memory[i, j] = memory

    def connect_value(self, number: int) -> None:
        """From its operation to where it is kept, and on to its readers."""
        table = self.table(self.graph.values[number])
        made = self.flow.producers.get(number)
        source: tuple[int, Indices] | None = None
        if made is not None:
            results = [s.choice.results[made[1]] for s in self.strategies_of(made[0])]
            source = self.operations[made[0]], _indices(table, results)
        if number in self.stored:
            kept = self.stored[number]
            indices = _indices(table, self.nodes[kept].choices)  # type: ignore[arg-type]
            if source is not None and made is not None:
                seconds = table.seconds[np.ix_(source[1], indices)]
                self.connect(source[0], kept, self.runs(made[0]) * seconds)
            source = kept, indices
        if source is not None:
            self.connect_readers(number, table, source)

    def connect_readers(
        self, number: int, table: ReshardTable, source: tuple[int, Indices]
    ) -> None:
        seen: dict[int, list[Indices]] = {}
        for reader in self.flow.readers[number]:
            found = self.strategies_of(reader.operation)
            indices = _indices(table, [s.operands[reader.operand] for s in found])
            seconds = self.runs(reader.operation) * table.seconds[np.ix_(source[1], indices)]
            for earlier in seen.get(reader.operation, ()):  # one reshard serves both operands
                seconds = np.where(earlier == indices, 0.0, seconds)
            seen.setdefault(reader.operation, []).append(indices)
            self.connect(source[0], self.operations[reader.operation], seconds)

    def add_parameter(self, number: int) -> None:
        """At rest, in use, accumulator."""
        parameter, setting = self.graph.parameters[number], self.setting
        value = self.graph.values[parameter.value]
        decided = self.resting.get(value.name)
        resting = layouts(value.shape, self.mesh) if decided is None else (decided,)
        share = 1 / np.array([ways(layout, self.mesh) for layout in resting])
        touched = 2 * parameter.state_bytes + parameter.accumulator_bytes
        gradient = self.flow.gradient(number)
        update = (0.0 if gradient is None else touched) * share / setting.bandwidth
        at_rest = self.add(Node("at_rest", number, resting), update, parameter.state_bytes * share)
        if parameter.value in self.flow.canonical:
            self.add_in_use(number, at_rest)
        if gradient is not None:
            value = self.graph.values[gradient]
            item_bytes = parameter.accumulator_bytes / max(1.0, value.size_bytes / value.item_bytes)
            self.add_accumulator(gradient, item_bytes, at_rest)

    def add_in_use(self, number: int, at_rest: int) -> None:
        parameter, setting = self.graph.parameters[number], self.setting
        value, table = (
            self.graph.values[parameter.value],
            self.table(self.graph.values[parameter.value]),
        )
        used = tuple(
            InUse(layout, once)
            for layout in self.candidates(parameter.value)
            for once in (True, False)
        )
        in_use = self.add(
            Node("in_use", parameter.value, used), np.zeros(len(used)), np.zeros(len(used))
        )
        resting: tuple[Layout, ...] = self.nodes[at_rest].choices  # type: ignore[assignment]
        indices = _indices(table, [u.layout for u in used])
        once = np.array([u.once for u in used])
        gathers = np.where(once, 1, setting.num_microbatches * self.gathers(parameter.value))
        seconds = table.seconds[np.ix_(_indices(table, resting), indices)] * gathers
        local = self.local_bytes(value.size_bytes, [u.layout for u in used])
        copies = _indices(table, resting)[:, None] != indices[None, :]
        self.connect(at_rest, in_use, seconds, np.where(copies & once, local, 0.0))
        self.connect_readers(parameter.value, table, (in_use, indices))

    def gathers(self, value: int) -> int:
        """How often per microbatch a parameter is gathered, if not once per step."""
        phases = set(self.flow.reading_phases(value))
        readers = {reader.operation for reader in self.flow.readers[value]}
        if self.setting.recompute and readers & self.again:
            phases.add("backward")
        return len(phases)

    def add_accumulator(self, number: int, item_bytes: float, at_rest: int | None = None) -> None:
        """Where a value is summed over microbatches; for a parameter it goes on to `at_rest`."""
        value, setting = self.graph.values[number], self.setting
        table = self.table(value, item_bytes)
        if number in self.stored:
            source = self.stored[number]
            made: list[Layout] = list(self.nodes[source].choices)  # type: ignore[arg-type]
        else:
            operation, result = self.flow.producers[number]
            source = self.operations[operation]
            made = [s.choice.results[result] for s in self.strategies_of(operation)]
        choices = tuple(dict.fromkeys((*layouts(value.shape, self.mesh), *made)))
        local = self.local_bytes(value.size_bytes / value.item_bytes * item_bytes, choices)
        adding = setting.num_microbatches * 3 * local / setting.bandwidth
        indices = _indices(table, choices)
        if at_rest is None:
            end = table.index[whole(len(value.shape))]
            adding = adding + table.seconds[indices, end]
        node = self.add(Node("accumulator", number, choices), adding, local)
        each = self.table(value)
        seconds = each.seconds[np.ix_(_indices(each, made), _indices(each, choices))]
        self.connect(source, node, setting.num_microbatches * seconds)
        if at_rest is not None:
            rest = self.nodes[at_rest]
            parameter = self.graph.parameters[rest.number]
            ends = [parameter.of_gradient(cast(Layout, layout)) for layout in rest.choices]
            self.connect(node, at_rest, table.seconds[np.ix_(indices, _indices(table, ends))])

    def tie(self, one: int, other: int) -> None:
        first, second = self.kept(one), self.kept(other)
        if first[0] == second[0]:
            return
        same = np.array([[a == b for b in second[1]] for a in first[1]])
        self.connect(first[0], second[0], np.where(same, 0.0, np.inf))

    def kept(self, value: int) -> tuple[int, list[Layout]]:
        """The node that decides how a value is kept, and its layouts."""
        node = self.stored[value]
        return node, list(self.nodes[node].choices)  # type: ignore[arg-type]


def _indices(table: ReshardTable, chosen: Sequence[Layout]) -> Indices:
    return np.array([table.index[layout] for layout in chosen], dtype=np.int64)
