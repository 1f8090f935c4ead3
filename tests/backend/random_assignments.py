"""Legal assignments drawn at random: any of them must compile, and compute the same."""

from __future__ import annotations

import math
import random

from hetpass.cost.layouts import layouts
from hetpass.cost.operation_choices import natural_layouts, wanted_layouts
from hetpass.ir.operation_graph import (
    Assignment,
    Layout,
    Mesh,
    Operation,
    OperationChoice,
    OperationGraph,
)
from hetpass.planner.intra_op.dataflow import Dataflow
from hetpass.planner.intra_op.strategies import divides, free_factors


class _Draw:
    """Draws one assignment, operation by operation."""

    def __init__(self, graph: OperationGraph, mesh: Mesh, rng: random.Random) -> None:
        self.graph, self.mesh, self.rng = graph, mesh, rng
        self.flow = Dataflow(graph)
        self.names = [name for name, _ in mesh]
        self.summands = self.flow.summands(merging=True)
        self.kept: dict[int, Layout] = {}
        self.stored: dict[int, Layout] = {}

    def layout(self, value: int) -> Layout:
        return self.rng.choice(layouts(self.graph.values[value].shape, self.mesh))

    def inputs(self) -> None:
        tied = dict(self.graph.ties)
        for v in sorted(self.flow.canonical):
            value = self.graph.values[v]
            whole = Layout(((),) * len(value.shape))
            self.stored[v] = whole if value.role == "whole" else self.layout(v)
        for one, other in tied.items():
            self.stored[other] = self.stored[one]
        self.kept.update(self.stored)

    def factors(self, operation: Operation, taken: frozenset[str]) -> tuple[tuple[str, ...], ...]:
        assert operation.rule is not None
        chosen: list[tuple[str, ...]] = [() for _ in operation.rule.sizes]
        free = free_factors(operation.rule)
        for name in self.names:
            if name in taken or not free or self.rng.random() < 0.2:
                continue
            factor = self.rng.choice(free)
            trial = list(chosen)
            trial[factor] = (*trial[factor], name)
            if divides(operation.rule, tuple(trial), self.mesh):
                chosen = trial
        return tuple(chosen)

    def choose(self, operation: Operation) -> OperationChoice:
        if operation.rule is None:
            ranks = [len(self.graph.values[v].shape) for v in operation.results]
            return OperationChoice((), tuple(Layout(((),) * rank) for rank in ranks))
        partial: frozenset[str] = frozenset()
        if operation.linear and operation.operands:
            partial = frozenset.intersection(*(self.kept[v].partial for v in operation.operands))
        choice = OperationChoice(self.factors(operation, partial), (), partial)
        if partial:  # summands are not moved: only where operands lie as they are wanted
            wanted = wanted_layouts(operation, self.graph.values, choice)
            if any(self.kept[v] != w for v, w in zip(operation.operands, wanted, strict=True)):
                choice = OperationChoice(self.factors(operation, frozenset()), ())
        natural = natural_layouts(operation, self.graph.values, choice)
        apart = {
            v: self._leaves(operation, v, n)
            for v, n in zip(operation.results, natural, strict=True)
        }
        results = tuple(
            n if apart[v] else self.summed(v, n)
            for v, n in zip(operation.results, natural, strict=True)
        )
        return OperationChoice(choice.factors, results, choice.partial)

    def _leaves(self, operation: Operation, value: int, natural: Layout) -> bool:
        additive = operation.sums or bool(natural.partial and operation.linear)
        return bool(
            natural.partial
            and additive
            and value in self.summands
            and operation.count == 1
            and self.rng.random() < 0.7
        )

    def summed(self, value: int, natural: Layout) -> Layout:
        """All summands added up: everywhere, or scattered onto a dimension."""
        dims = [*natural.dims]
        sizes = dict(self.mesh)
        for name in self.names:
            if name in natural.partial and dims and self.rng.random() < 0.5:
                place = self.rng.randrange(len(dims))
                ways = math.prod(sizes[a] for a in (*dims[place], name))
                if self.graph.values[value].shape[place] % ways == 0:
                    dims[place] = (*dims[place], name)
        return Layout(tuple(dims))

    def assignment(self) -> Assignment:
        self.inputs()
        choices = []
        for operation in self.graph.operations:
            choices.append(self.choose(operation))
            for v, layout in zip(operation.results, choices[-1].results, strict=True):
                self.kept.setdefault(v, layout)
        parameters = range(len(self.graph.parameters))
        return Assignment(
            mesh=self.mesh,
            operations=tuple(choices),
            stored=self.stored,
            at_rest={k: self.layout(self.graph.parameters[k].value) for k in parameters},
            accumulators={
                v: self.kept[v] if self.kept[v].partial else self.layout(v)
                for v in self.graph.accumulated
            },
            gathered_once=frozenset(k for k in parameters if self.rng.random() < 0.5),
        )


def random_assignment(graph: OperationGraph, mesh: Mesh, rng: random.Random) -> Assignment:
    """A legal one: sizes divide, no axis twice, compound dimensions major first."""
    return _Draw(graph, mesh, rng).assignment()
