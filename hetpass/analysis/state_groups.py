"""Which leaves of the state belong to one parameter: its master copy, its optimizer state.

The update brings them together element by element: `p - lr * m / (sqrt(v) + eps)` ties `p`, `m`,
`v` and the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpass._jax import Var
from hetpass.analysis.element_groups import ElementGroups, Tokens
from hetpass.ir.program import Accumulated, StepProgram, WholeInput


@dataclass(frozen=True)
class StateGroup:
    """Values that hold the same elements, or are combined with them one by one.

    Attributes:
      leaves: numbers of inputs of the step that are not batched.
      gradients: numbers of region outputs that are accumulated.
      results: numbers of outputs of the step.
      reads: region inputs -> tokens of the value that they read.
      targets: of the gradients, tokens of what they are summed to.
    """

    leaves: tuple[int, ...]
    gradients: tuple[int, ...]
    results: tuple[int, ...]
    reads: Mapping[Var, Tokens]
    targets: tuple[Tokens, ...]

    def gradient_dims(self, read: Var, gradient: int, rows: int) -> tuple[int | None, ...]:
        """Per dimension of a gradient, the dimension of the value read that it is.

        Args:
          rows: 1 for values stacked over layers, of which one is meant; else 0.
        """
        of_value = list(self.reads[read][rows:])
        target = self.targets[self.gradients.index(gradient)][rows:]
        return tuple(of_value.index(dim) if dim in of_value else None for dim in target)


def state_groups(program: StepProgram) -> tuple[StateGroup, ...]:
    """The groups that have a leaf of the state, in order of their first one; scalars have none."""
    joined = ElementGroups()
    for eqn in (*program.prologue, *program.epilogue):
        joined.visit(eqn)
    leaves: dict[Var, list[int]] = {}

    def add(table: dict[Var, list[int]], var: object, number: int) -> None:
        if isinstance(var, Var) and var.aval.shape:
            table.setdefault(joined.root(var), []).append(number)

    inputs = zip(program.traced.jaxpr.invars, program.traced.inputs, strict=True)
    for number, (var, leaf) in enumerate(inputs):
        if leaf.batch_dim is None:
            add(leaves, var, number)
    gradients: dict[Var, list[int]] = {}
    for number, output in enumerate(program.region_outputs):
        if isinstance(output, Accumulated):
            add(gradients, output.target, number)
    results: dict[Var, list[int]] = {}
    for number, var in enumerate(program.outvars):
        add(results, var, number)
    reads: dict[Var, dict[Var, Var]] = {}
    for var, source in zip(program.region.invars, program.region_inputs, strict=True):
        if isinstance(source, WholeInput) and source.var.aval.shape:
            reads.setdefault(joined.root(source.var), {})[var] = source.var
    return tuple(
        StateGroup(
            tuple(numbers),
            tuple(gradients.get(root, ())),
            tuple(results.get(root, ())),
            {v: joined.dims_of(full) for v, full in reads.get(root, {}).items()},
            tuple(
                joined.dims_of(program.region_outputs[g].target) for g in gradients.get(root, ())
            ),
        )
        for root, numbers in leaves.items()
    )


def group_of_reads(groups: Sequence[StateGroup]) -> Mapping[Var, StateGroup]:
    """Region input -> its group."""
    return {var: group for group in groups for var in group.reads}
