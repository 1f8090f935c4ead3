"""The cheapest assignment of a layer for every pair of boundary states. No JAX.

A boundary state says how all values that cross between two layers lie: activations and their
cotangents. The nodes of one boundary become one node, whose choices are states; then all other
nodes are eliminated. On two axes that is too much at once: there all assignments within some
allowance of the optimum are found (`near_optima`), and other pairs of states are reached from those
by resharding at the ends. Their entries are upper bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import cast

import numpy as np

from hetpass.ir.operation_graph import Layout, OperationGraph
from hetpass.planner.intra_op.answers import cheapest
from hetpass.planner.intra_op.elimination import Eliminated, eliminated
from hetpass.planner.intra_op.linear_program import Effort
from hetpass.planner.intra_op.near_optima import near_optima
from hetpass.planner.intra_op.pbqp import Choices, Edge, Floats, Problem, Reduced, reduced
from hetpass.planner.intra_op.program import Program
from hetpass.planner.intra_op.tree_bounds import least_between

State = tuple[Layout, ...]


@dataclass(frozen=True, eq=False)
class BoundaryTable:
    """A layer kind at one price of memory.

    Attributes:
      made: the program.
      price: of memory, seconds per byte.
      left, right: states at its two ends; one empty state where nothing crosses.
      costs: shape [left, right], seconds of a step and the price of its memory, of the best
        assignment that is known.
      lower: the same shape; no assignment costs less.
    """

    made: Program
    price: float
    left: tuple[State, ...]
    right: tuple[State, ...]
    costs: Floats
    lower: Floats
    _decoder: _Eliminated | _Neighbours

    def choices(self, left: int, right: int) -> tuple[int, ...]:
        """The cheapest known choices of the program's nodes between two states."""
        return self._decoder.choices(left, right)

    def refined(self, left: int, right: int, effort: Effort = Effort()) -> BoundaryTable:
        """The same, with the entry of two states solved by itself; others may gain by it."""
        if isinstance(self._decoder, _Eliminated):
            return self
        merged = self._decoder.merged
        nodes = list(merged.problem.nodes)
        for end, state in zip(merged.ends, (left, right), strict=True):
            costs = np.full(len(nodes[end]), np.inf)
            costs[state] = nodes[end][state]
            nodes[end] = costs
        found = cheapest(Problem(tuple(nodes), merged.problem.edges), effort)
        lower = self.lower.copy()
        lower[left, right] = max(lower[left, right], found.bound)
        if found.choices is None:
            return replace(self, lower=lower)
        around = _Neighbours.of(merged, (*self._decoder.known, found.choices))
        return replace(self, costs=around.costs, lower=lower, _decoder=around)


def left_values(graph: OperationGraph) -> tuple[int, ...]:
    """What crosses to the layer before: its activations, and their cotangents."""
    activations = [v for v, value in enumerate(graph.values) if value.role == "activation"]
    return (*activations, *graph.cotangents_out)


def right_values(graph: OperationGraph) -> tuple[int, ...]:
    """What crosses to the layer after, in the same order."""
    cotangents = [v for v, value in enumerate(graph.values) if value.role == "cotangent"]
    return (*graph.activations_out, *cotangents)


def boundary_table(
    made: Program, price: float = 0.0, effort: Effort = Effort()
) -> BoundaryTable | None:
    """The cheapest assignments of a program, by its boundary states.

    Args:
      price: of memory, seconds per byte.

    Returns:
      None if nothing is allowed.
    """
    merged = _merge(made, made.weighed(price), effort.most_states)
    rest = reduced(merged.problem, merged.ends)
    if not np.isfinite(rest.cost):
        return None
    left, right = (side.states for side in merged.sides)
    ends = [rest.nodes.index(end) for end in merged.ends]
    everything = eliminated(rest.core, ends, effort.most_entries)
    if everything is not None:
        costs = everything.costs + rest.cost
        if not np.isfinite(costs).any():
            return None
        decoder = _Eliminated(merged, rest, everything)
        return BoundaryTable(made, price, left, right, costs, costs, decoder)
    near = near_optima(rest.core, ends, effort)
    if near is None:
        return None
    around = _Neighbours.of(merged, tuple(rest.complete(choices) for choices in near.choices))
    scale = effort.allowances[-1] * abs(near.relaxed) if effort.allowances else np.inf
    lower = near.relaxed + least_between(near.above, (ends[0], ends[1]), scale)
    states = {choices[-2:] for choices in (rest.complete(c) for c in near.choices)}
    beyond = np.full(lower.shape, near.bound + near.allowance)
    for state in states:
        beyond[state] = near.bound
    lower = np.maximum(lower, beyond) + rest.cost
    return BoundaryTable(
        made, price, left, right, around.costs, np.minimum(lower, around.costs), around
    )


@dataclass(frozen=True, eq=False)
class _Eliminated:
    """Every pair of states has its own cheapest choices."""

    merged: _Merged
    rest: Reduced
    found: Eliminated

    def choices(self, left: int, right: int) -> tuple[int, ...]:
        return self.merged.expanded(self.rest.complete(self.found.choices((left, right))))


@dataclass(frozen=True, eq=False)
class _Neighbours:
    """A few choices that are optimal between their own states, and good ones near by.

    Between other states the layer does the same inside, and reshards at its ends.

    Attributes:
      costs: [left, right], of the best of them.
      best: [left, right], which.
    """

    merged: _Merged
    known: tuple[tuple[int, ...], ...]
    costs: Floats
    best: Choices

    @classmethod
    def of(cls, merged: _Merged, known: tuple[tuple[int, ...], ...]) -> _Neighbours:
        costs = np.array([merged.costs_between(choices) for choices in known])
        return cls(merged, known, costs.min(axis=0), costs.argmin(axis=0))

    def choices(self, left: int, right: int) -> tuple[int, ...]:
        inside = self.known[int(self.best[left, right])][: len(self.merged.old)]
        return self.merged.expanded((*inside, left, right))


# -- one node per boundary --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _End:
    """One boundary of a layer.

    Attributes:
      nodes: of the whole problem, of the values that cross.
      picks: [state, node] -> choice of the node.
      states: the same, as layouts of the values.
    """

    nodes: tuple[int, ...]
    picks: Choices
    states: tuple[State, ...]

    def of(self, node: int) -> Choices:
        """The choice of a node in every state."""
        return self.picks[:, self.nodes.index(node)]


@dataclass(frozen=True, eq=False)
class _Merged:
    """A problem in which each boundary is one node, after all others.

    Attributes:
      old: per other node its number in the whole problem.
      sides: left and right.
    """

    problem: Problem
    old: tuple[int, ...]
    sides: tuple[_End, _End]

    @property
    def ends(self) -> tuple[int, int]:
        """The nodes of the two boundaries."""
        return len(self.old), len(self.old) + 1

    def costs_between(self, choices: Sequence[int]) -> Floats:
        """[left, right] -> cost of given choices of all nodes but the two."""
        left, right = self.ends
        inside = sum(float(c[k]) for c, k in zip(self.problem.nodes[:left], choices, strict=False))
        sides = {end: self.problem.nodes[end] for end in self.ends}
        for (i, j), costs in self.problem.edges.items():
            if j < left:
                inside += float(costs[choices[i], choices[j]])
            elif i < left:
                sides[j] = sides[j] + costs[choices[i]]
        total = inside + sides[left][:, None] + sides[right][None, :]
        return total + self.problem.edges.get(self.ends, 0.0)

    def expanded(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the whole problem's nodes."""
        chosen = dict(zip(self.old, choices, strict=False))
        for side, state in zip(self.sides, choices[len(self.old) :], strict=True):
            chosen |= {n: int(c) for n, c in zip(side.nodes, side.picks[state], strict=True)}
        return tuple(chosen[node] for node in range(len(chosen)))


def _end(made: Program, values: tuple[int, ...], most_states: int) -> _End:
    nodes = tuple(dict.fromkeys(made.boundary[v] for v in values))
    picks = _picks(made, nodes, most_states)
    found = []
    for pick in picks:
        layouts = {n: made.nodes[n].choices[c] for n, c in zip(nodes, pick, strict=True)}
        found.append(tuple(cast(Layout, layouts[made.boundary[v]]) for v in values))
    return _End(nodes, picks, tuple(found))


def _merge(made: Program, problem: Problem, most_states: int) -> _Merged:
    left = _end(made, left_values(made.graph), most_states)
    right = _end(made, right_values(made.graph), most_states)
    inner = [k for k in range(len(problem.nodes)) if k not in {*left.nodes, *right.nodes}]
    ends = len(inner), len(inner) + 1
    # A node becomes (new node, choice of the old one per choice of the new one).
    became: dict[int, tuple[int, Choices]] = {
        k: (position, np.arange(len(problem.nodes[k]))) for position, k in enumerate(inner)
    }
    became |= {node: (ends[1], right.of(node)) for node in right.nodes}
    became |= {node: (ends[0], left.of(node)) for node in left.nodes}
    sizes = [*(len(problem.nodes[k]) for k in inner), len(left.picks), len(right.picks)]
    nodes = [np.zeros(size) for size in sizes]
    for node, (new, pick) in became.items():
        nodes[new] = nodes[new] + problem.nodes[node][pick]
    edges: dict[Edge, Floats] = {}
    for (i, j), costs in problem.edges.items():
        (one, rows), (other, columns) = became[i], became[j]
        if one == other:
            nodes[one] = nodes[one] + costs[rows, columns]
            continue
        table = costs[np.ix_(rows, columns)]
        key, table = ((one, other), table) if one < other else ((other, one), table.T)
        edges[key] = edges[key] + table if key in edges else table
    for node in set(left.nodes) & set(right.nodes):  # passes through unchanged
        same = left.of(node)[:, None] == right.of(node)[None, :]
        edges[ends] = edges.get(ends, 0.0) + np.where(same, 0.0, np.inf)
    return _Merged(Problem(tuple(nodes), edges), tuple(inner), (left, right))


def _picks(made: Program, group: Sequence[int], most_states: int) -> Choices:
    """Which states a boundary may have: [state, node] -> choice.

    All combinations, if they are not too many; else values of the same shape (a cotangent and its
    activation) lie alike; else all values are cut like the largest, where they can be.
    """
    sizes = [len(made.nodes[node].choices) for node in group]
    if prod(sizes) <= most_states:
        return np.array(list(product(*(range(n) for n in sizes))), dtype=np.int64).reshape(
            prod(sizes), len(group)
        )
    shapes = [made.graph.values[made.nodes[node].number].shape for node in group]
    kinds = list(dict.fromkeys(shapes))
    by_kind = [len(made.nodes[group[shapes.index(kind)]].choices) for kind in kinds]
    if prod(by_kind) <= most_states:
        rows = [[pick[kinds.index(s)] for s in shapes] for pick in product(*map(range, by_kind))]
        return np.array(rows, dtype=np.int64)
    largest = max(range(len(group)), key=lambda k: (prod(shapes[k]), -k))
    choices = [made.nodes[node].choices for node in group]
    rows = []
    for layout in choices[largest][:most_states]:
        rows.append([_alike(layout, own) for own in choices])  # type: ignore[arg-type]
    return np.array(rows, dtype=np.int64)


def _alike(layout: Layout, choices: Sequence[Layout]) -> int:
    """The choice that agrees with a layout on the most leading dimensions, else whole."""

    def agreement(own: Layout) -> tuple[int, int]:
        pairs = list(zip(own.dims, layout.dims, strict=False))
        wrong = sum(bool(a) and a != b for a, b in pairs) + sum(
            bool(a) for a in own.dims[len(pairs) :]
        )
        return -wrong, sum(a == b and bool(a) for a, b in pairs)

    return max(range(len(choices)), key=lambda k: (agreement(choices[k]), -k))
