"""Values that hold the same elements, or are combined with them one by one.

Casts, transposes and reshapes keep the elements; what is computed element by element from values of
one shape should lie on a mesh in one way. So such values make a group, and a layout of one says how
each of the others lies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hetpass._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, open_jaxpr
from hetpass.analysis.dimension_tokens import DimensionTokens
from hetpass.analysis.flops import ELEMENTWISE, sub_jaxprs

_SAME_PLACES = ELEMENTWISE | frozenset(
    "convert_element_type copy copy_p stop_gradient reduce_precision rev".split()
)
_SAME_ELEMENTS = frozenset("reshape squeeze expand_dims broadcast_in_dim reduce_sum".split())
"""If there are as many elements before and after (`ElementGroups.reshape`)."""

_PARTS = frozenset("slice concatenate dynamic_slice dynamic_update_slice".split())

Axes = tuple[tuple[str, ...], ...]
"""Per dimension the mesh axes that cut it, major to minor."""

Tokens = tuple[tuple[tuple[int, int], ...], ...]
"""Per dimension (token, size) pairs, major to minor."""


def moved(axes: Axes, source: Tokens, target: Tokens, sizes: Mapping[str, int]) -> Axes | None:
    """How a value lies where another of its group lies as `axes`; None where that cannot be said.

    Args:
      sizes: of the mesh axes.
    """
    cut: dict[int, tuple[str, ...]] = {}
    for names, tokens in zip(axes, source, strict=True):
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
    for tokens in target:
        placed: list[str] = []
        full = True
        for token, size in tokens:
            if cut.get(token) and not full:
                return None
            placed += cut.get(token, ())
            full = full and math.prod(sizes[n] for n in cut.get(token, ())) == size
        result.append(tuple(placed))
    return tuple(result)


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


class ElementGroups:
    """Groups of variables, and tokens of their dimensions; grows with every equation visited.

    Attributes:
      with_parts: slices and concatenations join groups too; their other dimensions are the same.
    """

    def __init__(self, with_parts: bool = False) -> None:
        self.with_parts = with_parts
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

    def dims_of(self, var: Var) -> Tokens:
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
        elif name in _PARTS and self.with_parts:
            for atom in eqn.invars:
                self._part(eqn.outvars[0], atom)
        else:
            self._bodies(eqn)

    def reshape(self, result: Var, operand: Atom) -> None:
        """Row-major on both sides, so all dimensions together are one list."""
        if self._same_elements(result, operand):
            mine = [t for dim in self._tokens(result) for t in dim]
            other = [t for dim in self._tokens(operand) for t in dim]  # type: ignore[arg-type]
            self.tokens.unify(mine, other)

    def _part(self, result: Var, operand: Atom) -> None:
        if isinstance(operand, Literal) or len(_shape(operand)) != len(_shape(result)):
            return
        a, b = self.root(result), self.root(operand)
        if a is not b:
            self.above[b] = a
        for mine, other in zip(self._tokens(result), self._tokens(operand), strict=True):
            if self._size(mine) == self._size(other):
                self.tokens.unify(mine, other)

    def _size(self, dim: Sequence[int]) -> int:
        return math.prod(self.tokens.sizes[t] for t in self.tokens.leaves(dim))

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
