"""The cheapest assignment of a layer for every pair of boundary states. No JAX.

A boundary state says how all values that cross between two layers lie: activations and their
cotangents. The nodes of one boundary become one node, whose choices are states; then all other
nodes are eliminated. On two axes that is too much at once. There the dual of the linear program
tells how much more than the optimum every choice costs at least; choices that cost too much are
left out first, and entries of the table above that are known as upper bounds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import cast

import numpy as np

from hetpass.ir.operation_graph import Layout, OperationGraph
from hetpass.planner.intra_op.elimination import Eliminated, eliminated
from hetpass.planner.intra_op.linear_program import Effort, slack
from hetpass.planner.intra_op.pbqp import Choices, Edge, Floats, Problem, Reduced, reduced
from hetpass.planner.intra_op.program import Program

State = tuple[Layout, ...]


@dataclass(frozen=True, eq=False)
class BoundaryTable:
    """A layer kind at one price of memory.

    Attributes:
      made: the program.
      left, right: states at its two ends; one empty state where nothing crosses.
      costs: shape [left, right], seconds of a step and the price of its memory.
      optimum: the least of them.
      exact: entries up to `optimum + exact` are least costs; above, upper bounds.
    """

    made: Program
    left: tuple[State, ...]
    right: tuple[State, ...]
    costs: Floats
    optimum: float
    exact: float
    _merged: _Merged
    _rest: Reduced
    _choices: tuple[Choices, ...]
    _found: Eliminated

    def choices(self, left: int, right: int) -> tuple[int, ...]:
        """The cheapest choices of the program's nodes between two states."""
        core = self._found.choices((left, right))
        chosen = [int(kept[c]) for kept, c in zip(self._choices, core, strict=True)]
        return self._merged.expanded(self._rest.complete(chosen), (left, right))

    @property
    def lower(self) -> Floats:
        """No pair of states costs less."""
        return np.minimum(self.costs, self.optimum + self.exact)


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
    ends = [rest.nodes.index(end) for end in merged.ends]
    everything = tuple(np.arange(len(costs)) for costs in rest.core.nodes)
    found = eliminated(rest.core, ends, effort.most_entries)
    if found is not None:
        exact, bound, kept = np.inf, float(found.costs.min()), everything
    else:
        pruned = _pruned(rest.core, ends, effort)
        if pruned is None:
            return None
        exact, bound, kept, found = pruned
    costs = found.costs + rest.cost
    if not np.isfinite(costs).any():
        return None
    left, right = (side.states for side in merged.sides)
    bound += rest.cost
    return BoundaryTable(made, left, right, costs, bound, exact, merged, rest, kept, found)


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

    def expanded(self, choices: Sequence[int], ends: tuple[int, int]) -> tuple[int, ...]:
        """Choices of the whole problem's nodes."""
        chosen = dict(zip(self.old, choices, strict=False))
        for side, state in zip(self.sides, ends, strict=True):
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


# -- leaving out what costs too much ----------------------------------------------------------


def _pruned(
    core: Problem, ends: Sequence[int], effort: Effort
) -> tuple[float, float, tuple[Choices, ...], Eliminated] | None:
    """How far above the bound choices were kept, the bound, the kept choices, and their table."""
    measured = slack(core)
    if measured is None:
        return None
    finite = [costs[np.isfinite(costs)] for costs in measured.above.nodes]
    above = max(float(costs.max(initial=0.0)) for costs in finite)
    least = abs(measured.bound) * 1e-9
    while True:
        kept = tuple(
            np.arange(len(costs)) if node in ends else np.flatnonzero(costs <= above + least)
            for node, costs in enumerate(measured.above.nodes)
        )
        nodes = tuple(c[k] for c, k in zip(core.nodes, kept, strict=True))
        edges = {(i, j): e[np.ix_(kept[i], kept[j])] for (i, j), e in core.edges.items()}
        found = eliminated(Problem(nodes, edges), ends, effort.most_entries_pruned)
        if found is not None:
            return above, measured.bound, kept, found
        if above < least:
            return None
        above /= 2
