"""Stages for what runs once per step: inputs, prologue and epilogue equations.

An input that the region reads lives where most of its reading is done. Everything else follows by
sizes: an equation runs where most of its operands' bytes live, an unplaced value of about the same
size (an optimizer moment, an average of parameters) joins the values that it meets in equations.
Small values do not decide where large ones live. The branches of a `cond` are looked into, so
that each of its outputs finds its own stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpass._jax import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var, open_jaxpr
from hetpass.transforms.sizes import aval_bytes
from hetpass.transforms.splice import call_body, is_call

Votes = dict[int, int]
"""Bytes by stage."""

_COMPARABLE = 16
"""A value decides where an equation runs if it is no less than 1/16 of the largest one."""


@dataclass(frozen=True)
class Placement:
    """The stage of every full-batch variable, inputs and results alike."""

    stage: Mapping[Var, int]


def place(
    inputs: Sequence[Var],
    prologue: Sequence[JaxprEqn],
    epilogue: Sequence[JaxprEqn],
    region_reads: Mapping[Var, Votes],
    fixed: Mapping[Var, int],
) -> Placement:
    """A stage for every input and every prologue and epilogue variable.

    Args:
      inputs: of the step.
      prologue, epilogue: equations over full-batch variables.
      region_reads: how many bytes of each full-batch variable the stages' fragments read.
      fixed: the stages of region results, and of inputs that already live somewhere.
    """
    graph = _Graph()
    for var, stage in fixed.items():
        graph.fix(graph.node(var), stage)
    graph.votes = {graph.node(var): dict(votes) for var, votes in region_reads.items()}
    graph.add(prologue)
    graph.pass_votes_up()
    for var in inputs:
        graph.fix_by_votes(graph.node(var))
    num_prologue = len(graph.items)
    graph.add(epilogue)
    graph.settle(num_prologue)
    return Placement({var: graph.stage.get(n, 0) for var, n in graph.nodes.items()})


@dataclass
class _Item:
    """An equation as placement sees it: nodes in, nodes out."""

    operands: list[int]
    results: list[int]


@dataclass
class _Graph:
    """Variables as numbered nodes (a branch's variables anew for every `cond`), and their stages.

    Attributes:
      weight: bytes per node.
      stage: of the nodes that have one.
      votes: of the region's readers, by node.
    """

    nodes: dict[Var, int] = field(default_factory=dict)
    weight: list[int] = field(default_factory=list)
    items: list[_Item] = field(default_factory=list)
    stage: dict[int, int] = field(default_factory=dict)
    votes: dict[int, Votes] = field(default_factory=dict)

    def node(self, var: Var) -> int:
        return self._node(var, self.nodes)

    def _node(self, var: Var, scope: dict[Var, int]) -> int:
        if var not in scope:
            scope[var] = len(self.weight)
            self.weight.append(aval_bytes(var.aval))
        return scope[var]

    def add(self, eqns: Sequence[JaxprEqn], scope: dict[Var, int] | None = None) -> None:
        scope = self.nodes if scope is None else scope
        for eqn in eqns:
            operands = [self._node(v, scope) for v in eqn.invars if isinstance(v, Var)]
            results = [self._node(v, scope) for v in eqn.outvars if not isinstance(v, DropVar)]
            if eqn.primitive.name == "cond" and not eqn.effects:
                for branch in eqn.params["branches"]:
                    self._add_body(open_jaxpr(branch)[0], eqn.invars[1:], eqn.outvars, scope)
            elif is_call(eqn):
                self._add_body(call_body(eqn), eqn.invars, eqn.outvars, scope)
            else:
                self.items.append(_Item(operands, results))

    def _add_body(
        self, body: Jaxpr, operands: Sequence[Atom], results: Sequence[Var], scope: dict[Var, int]
    ) -> None:
        inner: dict[Var, int] = {}
        for outer, var in zip(operands, body.invars, strict=True):
            self._alias(outer, scope, var, inner)
        self.add(body.eqns, inner)
        for out, result in zip(body.outvars, results, strict=True):
            if not isinstance(result, DropVar):
                self._alias(out, inner, result, scope)

    def _alias(
        self, source: Atom, source_scope: dict[Var, int], target: Var, scope: dict[Var, int]
    ) -> None:
        if not isinstance(source, Literal):
            pair = self._node(source, source_scope), self._node(target, scope)
            self.items.append(_Item([pair[0]], [pair[1]]))

    def fix(self, node: int, stage: int) -> None:
        self.stage.setdefault(node, stage)

    def fix_by_votes(self, node: int) -> None:
        if self.votes.get(node):
            self.fix(node, _winner(self.votes[node]))

    def pass_votes_up(self) -> None:
        """What the region reads of a result, it asks of the operands too."""
        for item in reversed(self.items):
            for result in item.results:
                for stage, count in self.votes.get(result, {}).items():
                    for operand in item.operands:
                        votes = self.votes.setdefault(operand, {})
                        votes[stage] = votes.get(stage, 0) + min(count, self.weight[operand])

    def settle(self, num_prologue: int) -> None:
        """Gives every node that can be reached a stage; several sweeps, then without scruples."""
        self._sweep_down(strict=True, stop=num_prologue)
        for strict in (True, True, True, False):
            before = len(self.stage)
            self._sweep_down(strict)
            self._sweep_up(strict)
            if strict and len(self.stage) == before:
                continue
        self._sweep_down(strict=False)

    def _sweep_down(self, strict: bool, stop: int | None = None) -> None:
        """Equations go where their operands are."""
        for item in self.items[:stop]:
            if all(r in self.stage for r in item.results):
                continue
            votes: Votes = {}
            floor = self._floor(item) if strict else 0
            for operand in item.operands:
                if operand in self.stage and self.weight[operand] >= floor:
                    stage = self.stage[operand]
                    votes[stage] = votes.get(stage, 0) + self.weight[operand]
            for result in item.results:
                for stage, count in self.votes.get(result, {}).items():
                    votes[stage] = votes.get(stage, 0) + count
            if votes:
                for result in item.results:
                    self.fix(result, _winner(votes))

    def _sweep_up(self, strict: bool) -> None:
        """Unplaced operands join the placed results that they are made into."""
        asked: dict[int, Votes] = {}
        for item in reversed(self.items):
            for result in item.results:
                if result not in self.stage and result in asked:
                    self.fix(result, _winner(asked[result]))
            placed = [r for r in item.results if r in self.stage]
            if not placed:
                continue
            stage = self.stage[max(placed, key=lambda r: self.weight[r])]
            floor = self._floor(item) if strict else 0
            for operand in item.operands:
                if operand not in self.stage and self.weight[operand] >= floor:
                    votes = asked.setdefault(operand, {})
                    votes[stage] = votes.get(stage, 0) + self.weight[operand]
        for node, votes in asked.items():
            self.fix(node, _winner(votes))

    def _floor(self, item: _Item) -> int:
        largest = max((self.weight[n] for n in (*item.operands, *item.results)), default=0)
        return largest // _COMPARABLE


def _winner(votes: Votes) -> int:
    """The stage with most bytes; the first of equals."""
    return min(votes, key=lambda stage: (-votes[stage], stage))
