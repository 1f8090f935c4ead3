"""Prologue and epilogue code by stage and phase.

The once-per-step program is a list of nodes: prologue equations, region results (each combines an
accumulator or joins microbatches' slices), epilogue equations. A node has one home stage; a cheap
one runs on every stage that reads it. A value that crosses stages is written in an earlier phase
than it is read: the earliest phases follow from the longest chains of crossings; then every node
moves as late as its readers allow, so that nothing large waits between phases without need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

from hetpass._jax import JaxprEqn, Var

OnceRole = OneOf["prologue", "epilogue"]


@dataclass(frozen=True)
class Node:
    """One piece of the once-per-step program.

    Attributes:
      eqn: None for a region result.
      operands, results: the variables it reads and makes.
      role: of its equation; a cheap node that only the epilogue reads runs there.
      home: its stage.
      free: whether any stage may run it for its own use.
    """

    eqn: JaxprEqn | None
    operands: tuple[Var, ...]
    results: tuple[Var, ...]
    role: OnceRole
    home: int
    free: bool


@dataclass(frozen=True)
class Demand:
    """A stage reads a full-batch variable, from the region or as an output of the step."""

    var: Var
    stage: int
    by_region: bool


@dataclass(frozen=True)
class Instance:
    """A node on one stage, in a fragment."""

    node: int
    stage: int
    role: OnceRole
    phase: int


@dataclass(frozen=True)
class Phased:
    """Every instance, in program order, and by (node, stage); and the node of each variable."""

    nodes: tuple[Node, ...]
    instances: tuple[Instance, ...]
    at: Mapping[tuple[int, int], Instance]
    maker: Mapping[Var, int]

    def source(self, var: Var, stage: int) -> Instance:
        """The instance that makes `var` for `stage`: its own, or the one at home."""
        index = self.maker[var]
        return self.at.get((index, stage)) or self.at[index, self.nodes[index].home]


def phases(nodes: Sequence[Node], demands: Iterable[Demand]) -> Phased:
    """Drops what nobody needs, repeats what is cheap, and orders the rest in phases."""
    maker = {v: i for i, node in enumerate(nodes) for v in node.results}
    demands = tuple(demands)
    runs, needed_early = _reach(nodes, maker, demands)
    keys = [(i, stage) for i, stages in enumerate(runs) for stage in sorted(stages)]
    roles = {key: _role(nodes[key[0]], key in needed_early) for key in keys}

    def source(var: Var, stage: int) -> tuple[int, int] | None:
        index = maker.get(var)
        if index is None:
            return None
        return (index, stage) if (index, stage) in roles else (index, nodes[index].home)

    earliest: dict[tuple[int, int], int] = {}
    for key in keys:
        phase = 0
        for var in nodes[key[0]].operands:
            origin = source(var, key[1])
            if origin is not None and roles[origin] == roles[key]:
                phase = max(phase, earliest[origin] + (origin[1] != key[1]))
        earliest[key] = phase
    latest: dict[tuple[int, int], int] = {}
    fixed = {source(d.var, d.stage) for d in demands}
    for key in reversed(keys):
        node = nodes[key[0]]
        effects = node.eqn is not None and node.eqn.effects
        if key in fixed or effects or key not in latest:
            latest[key] = earliest[key]
        for var in node.operands:
            origin = source(var, key[1])
            if origin is not None and roles[origin] == roles[key]:
                bound = latest[key] - (origin[1] != key[1])
                latest[origin] = min(latest.get(origin, bound), bound)
    instances = tuple(Instance(*key, roles[key], latest[key]) for key in keys)
    return Phased(tuple(nodes), instances, {(x.node, x.stage): x for x in instances}, maker)


def _role(node: Node, early: bool) -> OnceRole:
    return "epilogue" if node.free and not early else node.role


def _reach(
    nodes: Sequence[Node], maker: Mapping[Var, int], demands: Iterable[Demand]
) -> tuple[list[set[int]], set[tuple[int, int]]]:
    """The stages that run each node; and which of these runs the region or a prologue waits for."""
    runs: list[set[int]] = [set() for _ in nodes]
    early: set[tuple[int, int]] = set()

    def ask(var: Var, stage: int, before_region: bool) -> None:
        index = maker.get(var)
        if index is None:
            return
        where = stage if nodes[index].free else nodes[index].home
        runs[index].add(where)
        if before_region:
            early.add((index, where))

    for demand in demands:
        ask(demand.var, demand.stage, demand.by_region)
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if node.eqn is not None and node.eqn.effects:
            runs[i].add(node.home)
        for stage in sorted(runs[i]):
            before = node.role == "prologue" and ((i, stage) in early or not node.free)
            for var in node.operands:
                ask(var, stage, before)
    return runs, early
