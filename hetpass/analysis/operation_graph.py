"""operation_graphs: Layered -> one OperationGraph per layer kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpass._jax import JaxprEqn, Var
from hetpass.analysis.flops import aval_bytes, equation_flops
from hetpass.analysis.layer_operations import (
    LayerEquations,
    LayerOperations,
    OperationDraft,
    layer_operations,
)
from hetpass.analysis.sharding_rules import sharding_rules
from hetpass.analysis.state_groups import StateGroup, group_of_reads, state_groups
from hetpass.analysis.traffic import traffic_bytes
from hetpass.ir.devices import DTYPES
from hetpass.ir.operation_graph import (
    Operation,
    OperationGraph,
    Parameter,
    ShardingRule,
    Value,
)
from hetpass.ir.program import Accumulated, Layered

SUMS = frozenset("dot_general reduce_sum conv_general_dilated scatter-add scatter_add".split())
"""Primitives whose reduction is a sum that can be left in parts, one per device."""

JOINTLY_LINEAR = frozenset(
    "add add_any sub neg transpose reshape broadcast_in_dim convert_element_type reduce_sum "
    "concatenate squeeze expand_dims copy copy_p slice rev".split()
)
"""Primitives that are linear in all their arrays together."""

LINEAR_IN_ONE = frozenset("mul div".split())
"""Linear where all operands but the first are scalars from outside."""


@dataclass(frozen=True)
class LayerGraph:
    """A layer's graph, with the means to find its values and operations in the program."""

    graph: OperationGraph
    operations: LayerOperations


def operation_graphs(layered: Layered) -> tuple[OperationGraph, ...]:
    """One graph per layer kind, made from the first layer of the kind.

    A scan over layers gives one iteration. Loops inside a layer give operations that run many times
    a microbatch. What has no sharding rule has None, and is named in `unknown`.
    """
    return tuple(found.graph for found in layer_graphs(GraphSource.of(layered)))


def layer_graphs(source: GraphSource) -> tuple[LayerGraph, ...]:
    """One per layer kind."""
    kinds = source.layered.layer_kinds
    first = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    layers = [source.operations(first[kind]) for kind in sorted(first)]
    drafts = [draft for found in layers for draft in found.drafts]
    eqns = [d.eqn for d in drafts if d.kind == "equation"]
    rules = iter(sharding_rules(eqns))
    found_rules = [
        [
            _rule(d, next(rules)) if d.kind == "equation" else _passing_rule(d, found)
            for d in found.drafts
        ]
        for found in layers
    ]
    return tuple(
        LayerGraph(source.graph(found, own), found)
        for found, own in zip(layers, found_rules, strict=True)
    )


@dataclass(frozen=True)
class GraphSource:
    """What the graphs of all layers are made from.

    Attributes:
      groups: region input -> the state that it belongs to.
      homes: first leaf of a group -> the first layer that reads it. A group that several layers
        read (a tied embedding) has its state there.
    """

    layered: Layered
    equations: LayerEquations
    groups: Mapping[Var, StateGroup]
    homes: Mapping[int, int]

    @classmethod
    def of(cls, layered: Layered) -> GraphSource:
        groups = group_of_reads(state_groups(layered.program))
        trained = frozenset(var for var, group in groups.items() if group.gradients)
        homes: dict[int, int] = {}
        for eqn, span in zip(layered.program.region.eqns, layered.spans, strict=True):
            for atom in eqn.invars:
                if isinstance(atom, Var) and atom in groups:
                    homes.setdefault(groups[atom].leaves[0], span.first)
        return cls(layered, LayerEquations.of(layered, trained), groups, homes)

    def operations(self, layer: int) -> LayerOperations:
        """The operations of one layer."""
        return layer_operations(self.equations, layer)

    def graph(self, found: LayerOperations, rules: Sequence[ShardingRule | None]) -> OperationGraph:
        """The graph of a layer, with the rules of its operations."""
        values = tuple(
            Value(
                tuple(var.aval.shape),
                _item_bytes(var),
                role,
                self._name(found, number) if role == "parameter" else "",
            )
            for number, (var, role) in enumerate(zip(found.variables, found.roles, strict=True))
        )
        accumulated = self._accumulated(found)
        out = self._leaving(found)
        traffic = traffic_bytes(found, frozenset((*accumulated, *out[0], *out[1])))
        again = {(o,) for n, o in found.ordinals.items() if n in self.equations.remade}
        operations = tuple(
            _operation(draft, rule, traffic_of, draft.path in again)
            for draft, rule, traffic_of in zip(found.drafts, rules, traffic, strict=True)
        )
        unknown = {o.name for o in operations if o.rule is None}
        return OperationGraph(
            values=values,
            operations=operations,
            parameters=self._parameters(found, accumulated),
            activations_out=out[0],
            cotangents_out=out[1],
            accumulated=tuple(accumulated),
            ties=tuple(found.ties),
            unknown=tuple(sorted(unknown)),
        )

    def source_of(self, found: LayerOperations, number: int) -> Var:
        """The region variable of a value that comes from outside (all rows of a stacked one)."""
        return found.rows_of.get(number, found.variables[number])

    def _name(self, found: LayerOperations, number: int) -> str:
        group = self.groups[self.source_of(found, number)]
        return self.layered.program.traced.inputs[group.leaves[0]].path

    def _accumulated(self, found: LayerOperations) -> dict[int, int]:
        """Value -> the region output that sums it over microbatches."""
        program = self.layered.program
        numbers = {self.source_of(found, n): n for n in range(len(found.variables))}
        numbers |= {v: n for n, v in enumerate(found.variables)}
        return {
            numbers[var]: index
            for index, (var, output) in enumerate(
                zip(program.region.outvars, program.region_outputs, strict=True)
            )
            if isinstance(output, Accumulated)
            and isinstance(var, Var)
            and var in numbers
            and found.roles[numbers[var]] == "inner"
        }

    def _parameters(
        self, found: LayerOperations, accumulated: dict[int, int]
    ) -> tuple[Parameter, ...]:
        program = self.layered.program
        homes = {index: number for number, index in accumulated.items()}
        parameters = []
        held: set[int] = set()  # groups' first leaves: their state is counted once
        for number, role in enumerate(found.roles):
            if role != "parameter":
                continue
            group = self.groups[self.source_of(found, number)]
            mine = [g for g in group.gradients if g in homes]
            share = 1.0
            if number in found.rows_of:
                share = 1.0 / found.rows_of[number].aval.shape[0]
            state = sum(aval_bytes(program.traced.inputs[k].aval) for k in group.leaves)
            gradient = homes[mine[0]] if mine else None
            output = program.region_outputs[mine[0]] if mine else None
            kept = 0.0
            if gradient is not None and isinstance(output, Accumulated):
                kept = found.variables[gradient].aval.size * output.dtype.itemsize
            leaf = group.leaves[0]
            here = number in found.rows_of or self.homes.get(leaf) == found.layer
            first = here and leaf not in held
            dims: tuple[int | None, ...] = ()
            if mine:
                rows = int(number in found.rows_of)
                dims = group.gradient_dims(self.source_of(found, number), mine[0], rows)
            held.add(leaf)
            parameters.append(
                Parameter(
                    number,
                    gradient,
                    state * share if first else 0.0,
                    float(kept),
                    dims if dims != tuple(range(len(dims))) else (),
                    elsewhere=not here,
                )
            )
        return tuple(parameters)

    def _leaving(self, found: LayerOperations) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Values that later layers read, and those of the backward part that earlier ones do."""
        program, layered = self.layered.program, self.layered
        forward: dict[int, None] = {}
        backward: dict[int, None] = {}
        mine = set(found.ordinals)
        made = {
            var: number
            for number, var in enumerate(found.variables)
            if found.roles[number] == "inner" and self.equations.maker.get(var) in mine
        }
        for number, eqn in enumerate(program.region.eqns):
            if number in mine:
                continue
            for atom in eqn.invars:
                if isinstance(atom, Var) and atom in made:
                    late = layered.backward[self.equations.maker[atom]]
                    (backward if late else forward)[made[atom]] = None
        for left, right in found.ties:
            if found.roles[left] == "activation" and found.roles[right] == "inner":
                forward[right] = None
            elif found.roles[left] == "cotangent" and found.roles[right] == "inner":
                backward[right] = None
        return tuple(forward), tuple(backward)


def _item_bytes(var: Var) -> float:
    size = var.aval.size
    return aval_bytes(var.aval) / size if size else 1.0


def _operation(
    draft: OperationDraft, rule: ShardingRule | None, traffic: float, remade: bool
) -> Operation:
    eqn, name = draft.eqn, draft.eqn.primitive.name
    counted = draft.kind == "equation"
    sums = counted and name in SUMS and _sums_all(eqn, rule)
    return Operation(
        name=name if counted else f"{name} {draft.kind}",
        phase=draft.phase,
        operands=draft.operands,
        results=draft.results,
        rule=rule,
        flops=equation_flops(eqn) if counted else 0.0,
        dtype=_format(eqn),
        traffic_bytes=traffic,
        count=draft.count,
        linear=not counted or _is_linear(draft),
        sums=sums,
        remade=remade,
        path=draft.path,
    )


def _sums_all(eqn: JaxprEqn, rule: ShardingRule | None) -> bool:
    """Floats only: sums of integers may wrap, and booleans are not added."""
    return rule is not None and "float" in str(eqn.outvars[0].aval.dtype)


def _is_linear(draft: OperationDraft) -> bool:
    eqn, name = draft.eqn, draft.eqn.primitive.name
    atoms = [*eqn.invars, *eqn.outvars]
    if not all("float" in str(getattr(a.aval, "dtype", "")) for a in atoms):
        return False
    if name == "convert_element_type":
        return eqn.outvars[0].aval.dtype.itemsize >= eqn.invars[0].aval.dtype.itemsize
    if name in LINEAR_IN_ONE:
        return draft.rows[0] == (0,)
    return name in JOINTLY_LINEAR and len(draft.operands) == len(eqn.invars)


def _format(eqn: JaxprEqn) -> str:
    """The number format that the operands are in, of those that rates are given for."""
    atoms = [a for a in (*eqn.invars, *eqn.outvars) if getattr(a.aval, "shape", ())]
    names = [str(getattr(a.aval, "dtype", "")) for a in atoms]
    return next((name for name in names if name in DTYPES), "float32")


def _rule(draft: OperationDraft, rule: ShardingRule | None) -> ShardingRule | None:
    """The rule over the operands and results that are numbered."""
    if rule is None:
        return None
    return ShardingRule(
        rule.sizes,
        tuple(rule.operands[k] for k in draft.rows[0]),
        tuple(rule.results[k] for k in draft.rows[1]),
        rule.reduction - rule.whole,
        rule.whole,
        rule.permutation,
    )


def _passing_rule(draft: OperationDraft, found: LayerOperations) -> ShardingRule:
    """A value enters or leaves a loop as it is, or as the rows of a stacked one: rows are never
    shared among devices."""
    sizes = tuple(found.variables[draft.results[0]].aval.shape)
    stacked = {"unstack": draft.operands, "stack": draft.results}.get(draft.kind)
    if draft.kind == "stack":
        sizes = sizes[1:]
    plain = tuple((k,) if size > 1 else () for k, size in enumerate(sizes))
    if stacked is None:
        return ShardingRule(sizes, (plain,) * len(draft.operands), (plain,))
    rows = ((len(sizes),), *plain)
    sizes = (*sizes, found.variables[stacked[0]].aval.shape[0])
    operands, results = (rows, plain) if draft.kind == "unstack" else (plain, rows)
    return ShardingRule(sizes, (operands,), (results,), whole=frozenset({len(sizes) - 1}))
