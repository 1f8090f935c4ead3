"""Equations of a small function, written in place of another equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from hetpass import _jax
from hetpass._jax import Atom, JaxprEqn, Literal, Var


def emit(
    eqn: JaxprEqn,
    function: Callable[..., Any],
    operands: Sequence[Atom],
    results: Sequence[Var] | None = None,
) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations that `function` traces to, applied to `operands`, and its results.

    Args:
      eqn: the equations count as its source.
      function: captures no arrays.
      results: the variables that hold the results; None: fresh ones.
    """
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
    jaxpr, constants = _jax.open_jaxpr(jax.make_jaxpr(function)(*avals))
    if constants:
        raise ValueError("an emitted function must not capture arrays")
    env: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
    if results is not None:
        env.update(zip(jaxpr.outvars, results, strict=True))
    made = []
    for inner in jaxpr.eqns:
        for var in inner.outvars:
            env.setdefault(var, _jax.make_var(var.aval))
        reads = [a if isinstance(a, Literal) else env[a] for a in inner.invars]
        new = _jax.make_eqn(inner, reads, [env[v] for v in inner.outvars])
        made.append(new.replace(source_info=eqn.source_info))
    return made, [a if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]
