"""How much of the state belongs to each layer: parameters that only the optimizer reads, moments.

Values of equal size that meet in an equation of the prologue or the epilogue are of one family: a
gradient, the moments that it changes, the parameter that it updates. A family is at home where the
region reads its parameters, or else where its gradient is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetpass._jax import Atom, DropVar, Jaxpr, JaxprEqn, Var
from hetpass.analysis.flops import aval_bytes, sub_jaxprs
from hetpass.ir.program import StepProgram

Shares = Mapping[int, float]
"""By layer, the share of a value that is there; they add up to 1."""


def state_bytes(
    program: StepProgram, read: Mapping[Var, Shares], made: Mapping[Var, Shares], num_layers: int
) -> tuple[float, ...]:
    """Per layer, the bytes of the state that the region does not read.

    Args:
      read: full-batch variables that the region reads, and where.
      made: full-batch variables that the region makes, and where.
    """
    families = _Families()
    families.add(program.prologue)
    families.add(program.epilogue)
    homes: dict[int, Shares] = {}
    for var, shares in (*read.items(), *made.items()):
        homes.setdefault(families.find(var), shares)
    totals = [0.0] * num_layers
    homeless = 0.0
    leaves = zip(program.traced.jaxpr.invars, program.traced.inputs, strict=True)
    for var, leaf in leaves:
        if leaf.batch_dim is not None or var in read:
            continue
        home = homes.get(families.find(var), {})
        homeless += aval_bytes(var.aval) if not home else 0.0
        for layer, share in home.items():
            totals[layer] += share * aval_bytes(var.aval)
    return _with_rest(totals, homeless)


def _with_rest(totals: Sequence[float], rest: float) -> tuple[float, ...]:
    """What has no home is shared out as the others are."""
    known = sum(totals)
    if known:
        return tuple(total * (1 + rest / known) for total in totals)
    return tuple(rest / len(totals) for _ in totals)


class _Families:
    """Variables of equal size that meet; local to `state_bytes`."""

    def __init__(self) -> None:
        self.parent: dict[Var, Var] = {}

    def find(self, var: Var) -> int:
        return id(self._root(var))

    def _root(self, var: Var) -> Var:
        self.parent.setdefault(var, var)
        while self.parent[var] is not var:
            self.parent[var] = self.parent[self.parent[var]]
            var = self.parent[var]
        return var

    def _join(self, one: Any, other: Any) -> None:
        if all(isinstance(v, Var) and not isinstance(v, DropVar) for v in (one, other)):
            self.parent[self._root(one)] = self._root(other)

    def add(self, eqns: Iterable[JaxprEqn]) -> None:
        for eqn in eqns:
            bodies = list(sub_jaxprs(eqn))
            operands = eqn.invars[1:] if eqn.primitive.name == "cond" else eqn.invars
            matching = [b for b in bodies if _matches(b, operands, eqn.outvars)]
            for body in matching:
                outer, inner = [*operands, *eqn.outvars], [*body.invars, *body.outvars]
                for pair in zip(outer, inner, strict=True):
                    self._join(*pair)
                self.add(body.eqns)
            if not matching:
                for result in eqn.outvars:
                    for operand in eqn.invars:
                        if _elements(operand) == _elements(result) > 1:
                            self._join(operand, result)


def _matches(body: Jaxpr, operands: Sequence[Atom], results: Sequence[Var]) -> bool:
    return len(body.invars) == len(operands) and len(body.outvars) == len(results)


def _elements(atom: Atom) -> int:
    return int(getattr(atom.aval, "size", 0))
