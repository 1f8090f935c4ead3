"""The price of any assignment, and what it violates, without the program. No JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from hetpass.cost.layouts import fits, ways, whole
from hetpass.cost.operation_choices import (
    compute_ways,
    natural_layouts,
    operation_s,
    touched_share,
    wanted_layouts,
)
from hetpass.cost.reshard import Kind, arrival_s, reshard_path
from hetpass.ir.operation_graph import (
    Assignment,
    Layout,
    OperationChoice,
    OperationGraph,
    Value,
)
from hetpass.planner.intra_op.dataflow import Dataflow
from hetpass.planner.intra_op.setting import Setting, arrives
from hetpass.planner.intra_op.strategies import divides, free_factors

When = Literal["forward", "backward", "once"]


@dataclass(frozen=True)
class Collective:
    """Attributes:
    count: how many of a kind along the same axes.
    result_bytes: of their results, on one device.
    """

    count: int
    result_bytes: float


@dataclass(frozen=True)
class Evaluation:
    """What an assignment costs on every device.

    Attributes:
      forward_s, backward_s: per microbatch; backward holds the forward that runs again.
      once_s: per step: gathers, gradient reductions, the update.
      state_bytes: parameters at rest with their state, accumulators, copies gathered once.
      residual_bytes: per microbatch in flight.
      gathered_bytes: the largest parameter that is gathered in a microbatch.
      repeated_s: per microbatch, what the program counts beyond that: it lets every reader of a
        value pay for its reshard, though one serves all that want the same layout.
      collectives: (when, kind, axes) -> how many, per microbatch or (when = "once") per step.
      violations: in words; empty for what can run.
    """

    forward_s: float
    backward_s: float
    once_s: float
    state_bytes: float
    residual_bytes: float
    gathered_bytes: float
    repeated_s: float
    collectives: Mapping[tuple[When, Kind, tuple[str, ...]], Collective] = field(hash=False)
    violations: tuple[str, ...] = ()

    def step_s(self, num_microbatches: int) -> float:
        """Of M microbatches and what happens once."""
        return num_microbatches * (self.forward_s + self.backward_s) + self.once_s

    def memory_bytes(self, held: int) -> float:
        """With the residuals of so many microbatches."""
        return self.state_bytes + held * self.residual_bytes

    def bytes_of(self, kind: Kind, when: When | None = None) -> float:
        """Result bytes of one kind of collective."""
        return sum(
            c.result_bytes
            for (w, k, _), c in self.collectives.items()
            if k == kind and when in (None, w)
        )

    def count_of(self, kind: Kind, when: When | None = None) -> int:
        """How many of one kind of collective."""
        return sum(
            c.count for (w, k, _), c in self.collectives.items() if k == kind and when in (None, w)
        )


def evaluate(graph: OperationGraph, setting: Setting, assignment: Assignment) -> Evaluation:
    """Prices an assignment, from whomever it comes."""
    violations = tuple(_violations(graph, setting, assignment))
    if violations:
        nothing: dict[tuple[When, Kind, tuple[str, ...]], Collective] = {}
        lost = math.inf
        return Evaluation(lost, lost, lost, lost, lost, lost, 0.0, nothing, violations)
    return measured(Dataflow(graph), setting, assignment)


def measured(flow: Dataflow, setting: Setting, assignment: Assignment) -> Evaluation:
    """The same for an assignment that the planner made, which violates nothing."""
    return _Meter(flow, setting, assignment).read()


class _Meter:
    """Adds up seconds, bytes and collectives."""

    def __init__(self, flow: Dataflow, setting: Setting, assignment: Assignment) -> None:
        self.graph, self.setting, self.assignment = flow.graph, setting, assignment
        self.flow = flow
        self.mesh = setting.mesh.axes
        self.again = self.flow.repeated(alone=setting.alone)
        self.seconds: dict[When, float] = {"forward": 0.0, "backward": 0.0, "once": 0.0}
        self.collectives: dict[tuple[When, Kind, tuple[str, ...]], Collective] = {}
        self.state_bytes = self.residual_bytes = self.gathered_bytes = 0.0
        self.unreached: list[str] = []
        self.repeated_s = 0.0
        self.resharded: set[tuple[int, Layout, When, int]] = set()

    def read(self) -> Evaluation:
        for number in range(len(self.graph.operations)):
            for when in self.times(number):
                self.run(number, when)
        for number in range(len(self.graph.parameters)):
            self.parameter(number)
        self.accumulate()
        self.keep()
        return Evaluation(
            self.seconds["forward"],
            self.seconds["backward"],
            self.seconds["once"],
            self.state_bytes,
            self.residual_bytes,
            self.gathered_bytes,
            self.repeated_s,
            MappingProxyType(dict(sorted(self.collectives.items()))),
            tuple(self.unreached),
        )

    def times(self, number: int) -> tuple[When, ...]:
        phases: set[When] = {*self.flow.phases[number]}
        if self.assignment.recompute and number in self.again:
            phases.add("backward")
        return tuple(sorted(phases, reverse=True))

    def local_bytes(self, value: Value, layout: Layout) -> float:
        return value.size_bytes / ways(layout, self.mesh)

    def move(
        self, value: Value, ends: tuple[Layout, Layout], when: When, what: str, count: int = 1
    ) -> None:
        if ends[0] == ends[1]:
            return
        path = reshard_path(value, *ends, self.setting.mesh)
        if not math.isfinite(path.seconds):
            self.unreached.append(f"{what}: no way from {ends[0]} to {ends[1]}")
        self.seconds[when] += count * path.seconds
        for step in path.steps:
            if step.kind != "slice":
                key = when, step.kind, step.axes
                known = self.collectives.get(key, Collective(0, 0.0))
                self.collectives[key] = Collective(
                    known.count + count, known.result_bytes + count * step.result_bytes
                )

    def run(self, number: int, when: When) -> None:
        operation = self.graph.operations[number]
        choice, values = self.assignment.operations[number], self.graph.values
        wanted = wanted_layouts(operation, values, choice)
        natural = natural_layouts(operation, values, choice)
        touched = touched_share(operation, values, (wanted, natural), self.mesh)
        parts = compute_ways(choice, self.mesh)
        device = self.setting.kind, self.setting.reached
        self.seconds[when] += operation.count * operation_s(operation, parts, touched, *device)
        for v, layout in dict.fromkeys(zip(operation.operands, wanted, strict=True)):
            what = f"operand {v} of operation {number} ({operation.name})"
            self.read_operand(v, layout, when, what, operation.count)
        for v, before, after in zip(operation.results, natural, choice.results, strict=True):
            what = f"result {v} of operation {number} ({operation.name})"
            self.move(values[v], (before, after), when, what, operation.count)
            if v in self.assignment.stored:
                stored = self.assignment.stored[v]
                self.move(values[v], (after, stored), when, f"{what}, stored", operation.count)
                self.resharded.add((v, after, when, operation.count))

    def read_operand(self, v: int, layout: Layout, when: When, what: str, count: int) -> None:
        """One step serves all that read a value and whose way it is on."""
        value, kept = self.graph.values[v], self.kept(v)
        if kept == layout:
            return
        path = reshard_path(value, kept, layout, self.setting.mesh)
        if (v, layout, when, count) in self.resharded:
            self.repeated_s += count * path.seconds
            return
        before = kept
        for step in path.steps:
            if (v, step.after, when, count) in self.resharded:
                self.repeated_s += count * step.seconds
            else:
                self.resharded.add((v, step.after, when, count))
                self.move(value, (before, step.after), when, what, count)
            before = step.after
        if not path.steps:
            self.move(value, (kept, layout), when, what, count)

    def kept(self, value: int) -> Layout:
        if value in self.assignment.stored:
            return self.assignment.stored[value]
        operation, result = self.flow.producers[value]
        return self.assignment.operations[operation].results[result]

    def parameter(self, number: int) -> None:
        parameter = self.graph.parameters[number]
        value, at_rest = self.graph.values[parameter.value], self.assignment.at_rest[number]
        parts = ways(at_rest, self.mesh)
        self.state_bytes += parameter.state_bytes / parts
        if self.flow.gradient(number) is not None:
            touched = 2 * parameter.state_bytes + parameter.accumulator_bytes
            self.seconds["once"] += touched / parts / self.setting.bandwidth
        if parameter.value not in self.assignment.stored:
            return
        used = self.assignment.stored[parameter.value]
        if number in self.assignment.gathered_once:
            self.move(value, (at_rest, used), "once", f"gather of parameter {number}")
            self.state_bytes += self.local_bytes(value, used) if used != at_rest else 0.0
            return
        phases: set[When] = {
            when
            for reader in self.flow.readers[parameter.value]
            for when in self.times(reader.operation)
        }
        for when in sorted(phases):
            self.move(value, (at_rest, used), when, f"gather of parameter {number}")
        if used != at_rest:
            self.gathered_bytes = max(self.gathered_bytes, self.local_bytes(value, used))

    def accumulate(self) -> None:
        owners = self.flow.owners
        for v in self.graph.accumulated:
            value, layout = self.graph.values[v], self.assignment.accumulators[v]
            end, held = whole(len(value.shape)), value
            if v in owners:
                parameter = self.graph.parameters[owners[v]]
                item_bytes = parameter.accumulator_bytes / math.prod(value.shape)
                held = Value(value.shape, item_bytes)
                end = parameter.of_gradient(self.assignment.at_rest[owners[v]])
            what = f"accumulator of value {v}"
            self.move(value, (self.kept(v), layout), "backward", what)
            self.seconds["backward"] += 3 * self.local_bytes(held, layout) / self.setting.bandwidth
            self.move(held, (layout, end), "once", what)
            self.state_bytes += self.local_bytes(held, layout)

    def keep(self) -> None:
        trained = {p.value for p in self.graph.parameters}
        for v, value in enumerate(self.graph.values):
            if v in self.flow.residuals:
                self.residual_bytes += self.local_bytes(value, self.kept(v))
            if v not in self.assignment.stored:
                continue
            local = self.local_bytes(value, self.assignment.stored[v])
            if value.role == "parameter" and v not in trained:
                self.state_bytes += local
            if value.role == "example":
                self.seconds["forward"] += local / self.setting.bandwidth
            if arrives(value, self.setting):
                when: When = "backward" if value.role == "cotangent" else "forward"
                prices = arrival_s(value, self.setting.mesh)
                self.seconds[when] += prices[self.assignment.stored[v]]


def _violations(graph: OperationGraph, setting: Setting, assignment: Assignment) -> Iterator[str]:
    mesh, flow = setting.mesh.axes, Dataflow(graph)
    if assignment.mesh != mesh:
        yield f"the assignment is for the mesh {assignment.mesh}, not {mesh}"
        return
    if assignment.recompute != setting.recompute:
        yield "the assignment and the setting differ on whether forward runs again"
    if len(assignment.operations) != len(graph.operations):
        yield f"{len(graph.operations)} operations, {len(assignment.operations)} choices"
        return
    for number, choice in enumerate(assignment.operations):
        for what in _choice_violations(graph, setting, number, choice):
            yield f"operation {number} ({graph.operations[number].name}): {what}"
    summands = flow.summands(merging=setting.mesh.merges_reductions)
    for number, (operation, choice) in enumerate(
        zip(graph.operations, assignment.operations, strict=True)
    ):
        for v, layout in zip(operation.results, choice.results, strict=False):
            if layout.partial and v not in summands:
                yield f"operation {number} ({operation.name}): result {v} may not stay partial"
    yield from _layout_violations(graph, setting, assignment, flow)


def _choice_violations(
    graph: OperationGraph, setting: Setting, number: int, choice: OperationChoice
) -> Iterator[str]:
    operation, mesh = graph.operations[number], setting.mesh.axes
    rule = operation.rule
    names = [axis for axes in (*choice.factors, tuple(choice.partial)) for axis in axes]
    if len(names) != len(set(names)) or not set(names) <= {name for name, _ in mesh}:
        yield f"axes {names} on the mesh {mesh}"
        return
    if len(choice.factors) != (0 if rule is None else len(rule.sizes)):
        yield f"{len(choice.factors)} factors are cut"
        return
    if choice.partial and not operation.linear:
        yield "operands may not be partial"
    if rule is not None:
        free = free_factors(rule)
        cut = [f for f, axes in enumerate(choice.factors) if axes]
        if not set(cut) <= set(free):
            yield f"factors {sorted(set(cut) - set(free))} cannot be cut"
        if not divides(rule, choice.factors, mesh):
            yield f"factors {rule.sizes} do not divide by {choice.factors}"
    wanted = wanted_layouts(operation, graph.values, choice)
    for v, layout in zip(operation.operands, wanted, strict=True):
        if not fits(layout, graph.values[v].shape, mesh):
            yield f"operand {v} of shape {graph.values[v].shape} cannot lie as {layout}"
    natural = natural_layouts(operation, graph.values, choice)
    if len(choice.results) != len(natural):
        yield f"{len(natural)} results, {len(choice.results)} layouts"
        return
    for v, before, after in zip(operation.results, natural, choice.results, strict=True):
        for layout in (before, after):
            if not fits(layout, graph.values[v].shape, mesh):
                yield f"result {v} of shape {graph.values[v].shape} cannot lie as {layout}"
        if after.partial and not (operation.sums or operation.linear):
            yield f"result {v} is no sum and cannot stay partial"


def _layout_violations(
    graph: OperationGraph, setting: Setting, assignment: Assignment, flow: Dataflow
) -> Iterator[str]:
    mesh = setting.mesh.axes
    shapes = [value.shape for value in graph.values]
    for v in sorted(flow.canonical - set(assignment.stored)):
        yield f"value {v} has no stored layout"
    for v, layout in assignment.stored.items():
        if layout.partial or not fits(layout, shapes[v], mesh):
            yield f"value {v} of shape {shapes[v]} cannot be stored as {layout}"
        elif graph.values[v].role == "whole" and ways(layout, mesh) > 1:
            yield f"value {v} is given whole, not as {layout}"
    for number, parameter in enumerate(graph.parameters):
        known = assignment.at_rest.get(number)
        if known is None or known.partial or not fits(known, shapes[parameter.value], mesh):
            yield f"parameter {number} of shape {shapes[parameter.value]} cannot rest as {known}"
    for v in graph.accumulated:
        known = assignment.accumulators.get(v)
        if known is None or not fits(known, shapes[v], mesh):
            yield f"value {v} of shape {shapes[v]} cannot be accumulated as {known}"
    for one, other in graph.ties:
        if assignment.stored.get(one) != assignment.stored.get(other):
            yield f"values {one} and {other} are tied and lie differently"
