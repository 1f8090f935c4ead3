"""The assignments of a range of layers, with what crosses between them laid out anew. No JAX.

Tables of boundary states leave out much: on two axes a value and its cotangent lie alike, and what
goes past layers in between is nobody's state. With all else as the chain has it, every value that
crosses then takes the layout that is best for the layers that make and read it together, of those
that take no more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetpass.ir.operation_graph import Assignment
from hetpass.planner.intra_op.boundary import BoundaryTable, left_values, right_values
from hetpass.planner.intra_op.chain import Chain, matched
from hetpass.planner.intra_op.pbqp import Floats, Problem

_ROUNDS = 3
"""Of a value after the other; what one gains, another may."""

Crossing = tuple[tuple[int, int], ...]
"""(layer of the range, node) of one value in every layer that makes or reads it."""


def range_assignments(chain: Chain, first: int, end: int) -> tuple[Assignment, ...]:
    """How the layers first … end - 1 run together."""
    tables = [chain.tables[kind] for kind in chain.kinds[first:end]]
    path = chain.path(first, end)
    costs = {table: table.made.weighed(table.price) for table in tables}
    layers = [
        _Layer(costs[table], table.made.memory, list(table.choices(*states)))
        for table, states in zip(tables, path, strict=True)
    ]
    crossing = crossings(tables)
    for _ in range(_ROUNDS):
        if not any([_improved(layers, value) for value in crossing]):
            break
    return tuple(
        table.made.assignment(layer.choices) for table, layer in zip(tables, layers, strict=True)
    )


@dataclass
class _Layer:
    """A layer of the range; `choices` is written to."""

    costs: Problem
    memory: Problem
    choices: list[int]

    def of(self, problem: Problem, node: int) -> Floats:
        """What every choice of a node comes to, with all others as they are."""
        total = problem.nodes[node].copy()
        for (i, j), costs in problem.edges.items():
            if i == node:
                total += costs[:, self.choices[j]]
            elif j == node:
                total += costs[self.choices[i]]
        return total


def _improved(layers: Sequence[_Layer], crossing: Crossing) -> bool:
    """Gives a value the layout that is best for all its layers; whether that changed anything."""
    own = [(layers[layer], node) for layer, node in crossing]
    total = np.sum([layer.of(layer.costs, node) for layer, node in own], axis=0)
    memory = [layer.of(layer.memory, node) for layer, node in own]
    held = sum(float(m[layer.choices[node]]) for m, (layer, node) in zip(memory, own, strict=True))
    total[np.sum(memory, axis=0) > held * (1 + 1e-9)] = np.inf
    now = {layer.choices[node] for layer, node in own}
    cost = float(total[now.pop()]) if len(now) == 1 else np.inf
    best = int(np.argmin(total))
    if not total[best] < cost - 1e-9 * abs(total[best]):
        return False
    for layer, node in own:
        layer.choices[node] = best
    return True


def crossings(tables: Sequence[BoundaryTable]) -> list[Crossing]:
    """The values that cross between layers, as far as can be told: of a layer and the next in
    order, as chains have it; what is left, with what layers further away have.

    Args:
      tables: of the layers of a range, in order.
    """
    found: list[list[tuple[int, int]]] = []
    of: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (layer, node) -> its crossing
    far: list[tuple[int, int]] = []  # (layer, value) that no layer so far has taken
    near: list[tuple[int, int]] = []
    for layer, table in enumerate(tables):
        waiting = [(layer, v) for v in left_values(table.made.graph)]
        for sources in (near, far):
            sides = [
                [tables[k].made.graph.values[v] for k, v in side] for side in (sources, waiting)
            ]
            taken = [(sources[a], waiting[b]) for a, b in matched(sides[0], sides[1])]
            for source, target in taken:
                ends = [(k, tables[k].made.boundary[v]) for k, v in (source, target)]
                if ends[0] not in of:
                    of[ends[0]] = [ends[0]]
                    found.append(of[ends[0]])
                if ends[1] not in of[ends[0]]:
                    of[ends[0]].append(ends[1])
                of[ends[1]] = of[ends[0]]
                sources.remove(source)
                waiting.remove(target)
        far += near
        near = [(layer, v) for v in right_values(table.made.graph)]
    return [tuple(crossing) for crossing in found]
