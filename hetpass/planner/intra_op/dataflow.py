"""Who makes and who reads the values of an operation graph. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hetpass.ir.operation_graph import OperationGraph, Phase


@dataclass(frozen=True)
class Reader:
    """Operand `operand` of operation `operation`."""

    operation: int
    operand: int


@dataclass(frozen=True, eq=False)
class Dataflow:
    """Derived from a graph, once.

    Attributes:
      graph: of which.
      producers: value -> (operation, which of its results).
      readers: per value, in order.
    """

    graph: OperationGraph

    @cached_property
    def producers(self) -> dict[int, tuple[int, int]]:
        return {
            value: (k, r)
            for k, operation in enumerate(self.graph.operations)
            for r, value in enumerate(operation.results)
        }

    @cached_property
    def readers(self) -> tuple[tuple[Reader, ...], ...]:
        found: list[list[Reader]] = [[] for _ in self.graph.values]
        for k, operation in enumerate(self.graph.operations):
            for i, value in enumerate(operation.operands):
                found[value].append(Reader(k, i))
        return tuple(tuple(readers) for readers in found)

    @cached_property
    def owners(self) -> dict[int, int]:
        """Gradient -> the parameter that it goes to: the first, where one is read in two forms."""
        found: dict[int, int] = {}
        for number, parameter in enumerate(self.graph.parameters):
            if parameter.gradient is not None:
                found.setdefault(parameter.gradient, number)
        return found

    def gradient(self, number: int) -> int | None:
        """Of a parameter; None if there is none here, or it goes to another."""
        gradient = self.graph.parameters[number].gradient
        return gradient if gradient is not None and self.owners[gradient] == number else None

    @cached_property
    def phases(self) -> tuple[frozenset[Phase], ...]:
        """In which each operation runs: its own; where its results are remade, those of whoever
        reads them."""
        graph = self.graph
        leaving = {*graph.activations_out, *graph.cotangents_out, *graph.accumulated}
        wanted: list[set[Phase]] = [set() for _ in graph.values]
        found: list[frozenset[Phase]] = []
        for operation in reversed(graph.operations):
            phases: set[Phase] = {operation.phase}
            if operation.remade:
                readers = set[Phase]().union(*(wanted[v] for v in operation.results))
                phases = readers | (phases if leaving & {*operation.results} else set())
            for v in operation.operands:
                wanted[v] |= phases
            found.append(frozenset(phases or {operation.phase}))
        return tuple(reversed(found))

    def reading_phases(self, value: int) -> frozenset[Phase]:
        """The phases that read a value."""
        return frozenset[Phase]().union(*(self.phases[r.operation] for r in self.readers[value]))

    @cached_property
    def residuals(self) -> frozenset[int]:
        """Values of a microbatch that forward has, and backward reads and does not make again."""
        found = set()
        for v, value in enumerate(self.graph.values):
            if value.role in ("parameter", "whole", "cotangent"):
                continue
            made = self.producers.get(v)
            early = made is None or "backward" not in self.phases[made[0]]
            if early and "backward" in self.reading_phases(v):
                found.add(v)
        return frozenset(found)

    @cached_property
    def canonical(self) -> frozenset[int]:
        """Values with a layout of their own: inputs, several readers, residuals, boundary, ties."""
        graph = self.graph
        tied = {v for pair in graph.ties for v in pair}
        kept = {*graph.activations_out, *graph.cotangents_out, *tied, *self.residuals}
        accumulated = set(graph.accumulated)
        for v in range(len(graph.values)):
            uses = len(self.readers[v]) + (v in accumulated)
            if (v not in self.producers and uses) or uses > 1:
                kept.add(v)
        return frozenset(kept)

    def repeated(self, *, alone: bool) -> frozenset[int]:
        """Forward operations that run again where forward is recomputed: backward needs them.

        Args:
          alone: what the layer gives to the next is not needed again; inside a stage it is.
        """
        operations = self.graph.operations
        wanted = set() if alone else set(self.graph.activations_out)
        wanted |= {v for o in operations if o.phase == "backward" for v in o.operands}
        found = set()
        for k in reversed(range(len(operations))):
            if operations[k].phase == "forward" and wanted & set(operations[k].results):
                found.add(k)
                wanted |= set(operations[k].operands)
        return frozenset(found)

    def summands(self, *, merging: bool) -> frozenset[int]:
        """Values that may be left partial.

        Those on the way to an accumulator, through linear operations alone; where the compiler
        merges reductions also operands of a sum, whose result is reduced instead.
        """
        graph, found = self.graph, set[int]()
        accumulated = set(graph.accumulated)
        for k in reversed(range(len(graph.operations))):
            for v in graph.operations[k].results:
                if self._is_summand(v, accumulated, found, merging):
                    found.add(v)
        return frozenset(found)

    def _is_summand(
        self, value: int, accumulated: set[int], found: set[int], merging: bool
    ) -> bool:
        if value in self.canonical:
            return False
        producer = self.graph.operations[self.producers[value][0]]
        if producer.count != 1:  # inside a loop everything is carried reduced
            return False
        if not self.readers[value]:
            return value in accumulated
        reader = self.graph.operations[self.readers[value][0].operation]
        if not reader.linear or reader.count != 1:
            return False
        onwards = all(result in found for result in reader.results)
        return onwards or (merging and len(reader.operands) > 1)
