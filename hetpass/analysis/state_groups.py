"""Which leaves of the state belong to one parameter: its master copy, its optimizer state.

The update brings them together element by element: `p - lr * m / (sqrt(v) + eps)` ties `p`, `m`,
`v` and the gradient. Casts, transposes and reshapes on the way to the region, and from it, keep the
elements. What holds the same elements should lie on a mesh in the same way, so such values make a
group, and a layout of one says how each of the others lies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpass._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, open_jaxpr
from hetpass.analysis.dimension_tokens import DimensionTokens
from hetpass.analysis.flops import ELEMENTWISE, sub_jaxprs
from hetpass.ir.program import Accumulated, StepProgram, WholeInput

_SAME_PLACES = ELEMENTWISE | frozenset(
    "convert_element_type copy copy_p stop_gradient reduce_precision rev".split()
)
_SAME_ELEMENTS = frozenset("reshape squeeze expand_dims broadcast_in_dim reduce_sum".split())
"""If there are as many elements before and after (`_Groups.reshape`)."""

Axes = tuple[tuple[str, ...], ...]
"""Per dimension the mesh axes that cut it, major to minor."""


@dataclass(frozen=True)
class StateGroup:
    """Values that hold the same elements, or are combined with them one by one.

    Attributes:
      leaves: numbers of inputs of the step that are not batched.
      gradients: numbers of region outputs that are accumulated.
      results: numbers of outputs of the step.
      reads: region inputs.
      dims: variable -> per dimension (token, size) pairs, major to minor; of leaves, targets of
        gradients, and the full-batch values that the region reads.
    """

    leaves: tuple[int, ...]
    gradients: tuple[int, ...]
    results: tuple[int, ...]
    reads: tuple[Var, ...]
    dims: Mapping[Var, tuple[tuple[tuple[int, int], ...], ...]]

    def moved(self, axes: Axes, source: Var, target: Var, sizes: Mapping[str, int]) -> Axes | None:
        """How `target` lies where `source` lies as `axes`; None where that cannot be said.

        Args:
          sizes: of the mesh axes.
        """
        cut: dict[int, tuple[str, ...]] = {}
        for names, tokens in zip(axes, self.dims[source], strict=True):
            left = list(names)
            for token, size in tokens:
                mine: list[str] = []
                while left and size % (math.prod(sizes[n] for n in mine) * sizes[left[0]]) == 0:
                    mine.append(left.pop(0))
                cut[token] = tuple(mine)
                if left and math.prod(sizes[n] for n in mine) != size:
                    return None
            if left:
                return None
        result: list[tuple[str, ...]] = []
        for tokens in self.dims[target]:
            placed: list[str] = []
            full = True
            for token, size in tokens:
                if cut.get(token) and not full:
                    return None
                placed += cut.get(token, ())
                full = full and math.prod(sizes[n] for n in cut.get(token, ())) == size
            result.append(tuple(placed))
        return tuple(result)


def state_groups(program: StepProgram) -> tuple[StateGroup, ...]:
    """The groups that have a leaf of the state, in order of their first one; scalars have none."""
    joined = _Groups()
    for eqn in (*program.prologue, *program.epilogue):
        joined.visit(eqn)
    leaves: dict[Var, list[int]] = {}
    members: dict[Var, dict[Var, None]] = {}

    def add(table: dict[Var, list[int]], var: object, number: int) -> None:
        if isinstance(var, Var) and _shape(var):
            root = joined.root(var)
            table.setdefault(root, []).append(number)
            members.setdefault(root, {})[var] = None

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
    reads: dict[Var, list[Var]] = {}
    for var, source in zip(program.region.invars, program.region_inputs, strict=True):
        if isinstance(source, WholeInput) and _shape(source.var):
            root = joined.root(source.var)
            reads.setdefault(root, []).append(var)
            members.setdefault(root, {})[source.var] = None
    return tuple(
        StateGroup(
            tuple(numbers),
            tuple(gradients.get(root, ())),
            tuple(results.get(root, ())),
            tuple(reads.get(root, ())),
            {var: joined.dims_of(var) for var in members[root]},
        )
        for root, numbers in leaves.items()
    )


def group_of_reads(groups: Sequence[StateGroup]) -> Mapping[Var, StateGroup]:
    """Region input -> its group."""
    return {var: group for group in groups for var in group.reads}


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


class _Groups:
    """Union of variables and of their dimensions; local to `state_groups`."""

    def __init__(self) -> None:
        self.above: dict[Var, Var] = {}
        self.tokens = DimensionTokens()
        self.dims: dict[Var, list[list[int]]] = {}

    def root(self, var: Var) -> Var:
        path = []
        while var in self.above:
            path.append(var)
            var = self.above[var]
        self.above.update(dict.fromkeys(path, var))
        return var

    def dims_of(self, var: Var) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(
            tuple((token, self.tokens.sizes[token]) for token in self.tokens.leaves(dim))
            for dim in self._tokens(var)
        )

    def _tokens(self, var: Var) -> list[list[int]]:
        if var not in self.dims:
            self.dims[var] = [[self.tokens.token(size)] for size in _shape(var)]
        return self.dims[var]

    def _same_elements(self, left: Atom, right: Atom) -> bool:
        """Joins the groups of two values that hold the same elements, if they can."""
        if isinstance(left, Literal) or isinstance(right, Literal) or not _shape(left):
            return False
        if not _shape(right) or math.prod(_shape(left)) != math.prod(_shape(right)):
            return False
        a, b = self.root(left), self.root(right)
        if a is not b:
            self.above[b] = a
        return True

    def join(self, left: Atom, right: Atom, order: Sequence[int] | None = None) -> None:
        """The two hold the same elements in the same places, or `left` those of `right` with its
        dimensions in another order."""
        if order is None and _shape(left) != _shape(right):
            return
        if self._same_elements(left, right):
            other = self._tokens(right)  # type: ignore[arg-type]
            for k, mine in enumerate(self._tokens(left)):  # type: ignore[arg-type]
                self.tokens.unify(mine, other[k if order is None else order[k]])

    def visit(self, eqn: JaxprEqn) -> None:
        name = eqn.primitive.name
        if name in _SAME_PLACES:
            for result in eqn.outvars:
                for atom in eqn.invars:
                    self.join(result, atom)
        elif name == "transpose":
            self.join(eqn.outvars[0], eqn.invars[0], eqn.params["permutation"])
        elif name in _SAME_ELEMENTS:
            self.reshape(eqn.outvars[0], eqn.invars[0])
        else:
            self._bodies(eqn)

    def reshape(self, result: Var, operand: Atom) -> None:
        """Row-major on both sides, so all dimensions together are one list."""
        if self._same_elements(result, operand):
            mine = [t for dim in self._tokens(result) for t in dim]
            other = [t for dim in self._tokens(operand) for t in dim]  # type: ignore[arg-type]
            self.tokens.unify(mine, other)

    def _bodies(self, eqn: JaxprEqn) -> None:
        for operands, body in _bodies(eqn):
            for atom, var in zip(operands, body.invars, strict=True):
                self.join(var, atom)
            for inner in body.eqns:
                self.visit(inner)
            if len(body.outvars) == len(eqn.outvars):
                for var, made in zip(eqn.outvars, body.outvars, strict=True):
                    self.join(var, made)


def _bodies(eqn: JaxprEqn) -> list[tuple[Sequence[Atom], Jaxpr]]:
    """The equation's programs, each with the operands that it takes."""
    bodies = list(sub_jaxprs(eqn))
    if eqn.primitive.name == "cond":
        return [(eqn.invars[1:], body) for body in bodies]
    if eqn.primitive.name == "while":
        body = open_jaxpr(eqn.params["body_jaxpr"])[0]
        return [(eqn.invars[eqn.params["cond_nconsts"] :], body)]
    return [(eqn.invars, body) for body in bodies if len(body.invars) == len(eqn.invars)]
