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


def is_call(eqn: JaxprEqn) -> bool:
    """Whether the equation is a plain call (`jit`), the same as its body."""
    return eqn.primitive.name == "jit" and not open_jaxpr(eqn.params["jaxpr"])[1]


def call_body(eqn: JaxprEqn) -> Jaxpr:
    """The body of a plain call."""
    return open_jaxpr(eqn.params["jaxpr"])[0]


def inline(jaxpr: Jaxpr, operands: Sequence[Atom]) -> Spliced:
    """The equations of `jaxpr` applied to `operands`; every result is a fresh variable.

    Plain calls inside are opened as well.
    """
    env: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))

    def atom(value: Atom) -> Atom:
        return value if isinstance(value, Literal) else env[value]

    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        invars = [atom(v) for v in eqn.invars]
        if is_call(eqn):
            called = inline(call_body(eqn), invars)
            eqns.extend(called.eqns)
            env.update(zip(eqn.outvars, called.outs, strict=True))
            continue
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
