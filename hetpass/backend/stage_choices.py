"""What the assignments of a stage say about an equation, a value, a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hetpass._jax import JaxprEqn, Var
from hetpass.analysis.layer_operations import LayerOperations, OperationDraft, Path
from hetpass.analysis.operation_graph import LayerGraph
from hetpass.cost.operation_choices import natural_layouts, wanted_layouts
from hetpass.ir.operation_graph import Assignment, Layout, Operation, OperationChoice
from hetpass.transforms.tag_operations import operation_tag


@dataclass(frozen=True)
class LayerChoices:
    """One layer: its graph, and the assignment that it runs by."""

    source: LayerGraph
    assignment: Assignment

    @property
    def found(self) -> LayerOperations:
        return self.source.operations

    @cached_property
    def makers(self) -> dict[int, tuple[int, int]]:
        """Value -> (operation, which of its results)."""
        return {
            value: (number, place)
            for number, operation in enumerate(self.source.graph.operations)
            for place, value in enumerate(operation.results)
        }

    @cached_property
    def parameters(self) -> dict[int, int]:
        """Value -> its number among the parameters."""
        return {p.value: k for k, p in enumerate(self.source.graph.parameters)}

    def kept(self, value: int) -> Layout | None:
        """How a value is kept; None where nothing is said."""
        if value in self.assignment.stored:
            return self.assignment.stored[value]
        if value not in self.makers:
            return None
        number, place = self.makers[value]
        return self.assignment.operations[number].results[place]

    def at_rest(self, value: int) -> Layout | None:
        """How a parameter's state lies, of its value as the layer reads it."""
        if value not in self.parameters:
            return None
        return self.assignment.at_rest.get(self.parameters[value])

    def is_gathered_once(self, value: int) -> bool:
        return self.parameters.get(value) in self.assignment.gathered_once


@dataclass(frozen=True)
class OperationAt:
    """An operation of a layer, and how it runs."""

    layer: LayerChoices
    number: int

    @property
    def draft(self) -> OperationDraft:
        return self.layer.found.drafts[self.number]

    @property
    def operation(self) -> Operation:
        return self.layer.source.graph.operations[self.number]

    @property
    def choice(self) -> OperationChoice:
        return self.layer.assignment.operations[self.number]

    @property
    def wanted(self) -> tuple[Layout, ...]:
        """Per numbered operand."""
        return wanted_layouts(self.operation, self.layer.source.graph.values, self.choice)

    @property
    def natural(self) -> tuple[Layout, ...]:
        """Per numbered result, before it is reduced."""
        return natural_layouts(self.operation, self.layer.source.graph.values, self.choice)

    def operand(self, position: int) -> int | None:
        """The value that is the equation's operand at a position."""
        rows = self.draft.rows[0]
        return self.draft.operands[rows.index(position)] if position in rows else None

    def result(self, position: int) -> int | None:
        """The value that is the equation's result at a position."""
        rows = self.draft.rows[1]
        return self.draft.results[rows.index(position)] if position in rows else None


@dataclass(frozen=True)
class StageChoices:
    """The layers of a stage.

    Attributes:
      first_layer: of the stage; a scan over layers is tagged with the first of all its layers.
      layers: number -> choices; layers without an assignment are absent.
    """

    first_layer: int
    layers: Mapping[int, LayerChoices]

    @classmethod
    def of(
        cls,
        first_layer: int,
        assignments: Sequence[Assignment | None],
        graphs: Sequence[LayerGraph],
        kinds: Sequence[int],
    ) -> StageChoices:
        """Args:
        assignments: one per layer of the stage.
        graphs: one per layer kind.
        kinds: per layer of the program.
        """
        layers = {
            first_layer + k: LayerChoices(graphs[kinds[first_layer + k]], assignment)
            for k, assignment in enumerate(assignments)
            if assignment is not None
        }
        return cls(first_layer, layers)

    def layer(self, eqn: JaxprEqn) -> tuple[LayerChoices, Path] | None:
        """The layer and path of a tagged equation."""
        tag = operation_tag(eqn)
        if tag is None or max(tag[0], self.first_layer) not in self.layers:
            return None
        return self.layers[max(tag[0], self.first_layer)], tag[1]

    def of_equation(self, eqn: JaxprEqn) -> OperationAt | None:
        """The operation that an equation is."""
        found = self.layer(eqn)
        if found is None or found[1] not in found[0].found.paths:
            return None
        at = OperationAt(found[0], found[0].found.paths[found[1]])
        same = at.draft.eqn.primitive is eqn.primitive
        return at if same and len(at.draft.eqn.invars) == len(eqn.invars) else None

    def of_loop(self, eqn: JaxprEqn, end: int, position: int) -> OperationAt | None:
        """The operation at which a loop or branch takes (LOOP_IN) or gives (LOOP_OUT) a value."""
        found = self.layer(eqn)
        if found is None:
            return None
        number = found[0].found.paths.get((*found[1], end, position))
        if number is None:
            return None
        at = OperationAt(found[0], number)
        same = len(at.draft.eqn.invars) == len(eqn.invars)
        same = same and len(at.draft.eqn.outvars) == len(eqn.outvars)
        return at if same else None

    def inner(self, eqn: JaxprEqn, var: Var) -> tuple[LayerChoices, int] | None:
        """The value that a variable of the body of a loop is."""
        found = self.layer(eqn)
        number = None if found is None else found[0].found.numbers.get(var)
        return None if found is None or number is None else (found[0], number)
