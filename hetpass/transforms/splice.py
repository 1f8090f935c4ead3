"""Equations taken from one jaxpr into another: substitution with fresh variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from hetpass._jax import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var, make_var, open_jaxpr


@dataclass(frozen=True)
class Spliced:
    """Equations over fresh variables, and the atoms that hold the results."""

    eqns: tuple[JaxprEqn, ...]
    outs: tuple[Atom, ...]


def inline(jaxpr: Jaxpr, operands: Sequence[Atom]) -> Spliced:
    """The equations of `jaxpr` applied to `operands`; every result is a fresh variable."""
    env: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))

    def atom(value: Atom) -> Atom:
        return value if isinstance(value, Literal) else env[value]

    eqns = []
    for eqn in jaxpr.eqns:
        invars = [atom(v) for v in eqn.invars]
        outvars = []
        for var in eqn.outvars:
            if isinstance(var, DropVar):
                outvars.append(var)
            else:
                env[var] = make_var(var.aval)
                outvars.append(env[var])
        eqns.append(eqn.replace(invars=invars, outvars=outvars))
    return Spliced(tuple(eqns), tuple(atom(v) for v in jaxpr.outvars))


def equations_of(function: Callable[..., Any], *operands: Atom) -> Spliced:
    """The equations that `function` traces to, applied to `operands`."""
    args = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in operands
    ]
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(function)(*args))
    if consts:
        raise ValueError("a spliced function must not capture arrays")
    return inline(jaxpr, operands)
