"""One place for every residual of a branch: what JAX merges by shape is taken apart again.

Where a `cond` is differentiated, the forward `cond` hands residuals to the backward one. JAX lets
residuals of different branches share a result if they are alike in shape and type. At a batch as
large as some width, a branch's weight may so share with another branch's activation; at twice the
batch it cannot, and the two programs no longer correspond although the step is the same. Taken
apart, they do: each branch's residuals are results of their own, in the order in which the branch
makes them, and zero in the other branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from hetpass import _jax
from hetpass._jax import Atom, Jaxpr, JaxprEqn, Var
from hetpass.frontend.emit import emit
from hetpass.frontend.inline import live


@dataclass(frozen=True)
class _Residual:
    """What one branch of a forward `cond` keeps for the backward ones.

    Attributes:
      branch: which branch makes and reads it.
      shared: the result of the forward `cond` that held it, perhaps for other branches too.
      made: by the branch: (equation, result), or (-1, operand).
      own: the result that holds it now.
    """

    branch: int
    shared: Var
    made: tuple[int, int]
    own: Var


def residuals_apart(jaxpr: Jaxpr) -> Jaxpr:
    """The same program, no residual of a branch sharing a result with another branch's.

    Args:
      jaxpr: without calls, as `inline` gives it; bodies of loops and branches are done too.

    Returns:
      As many equations in the same order; invars and outvars are the same variables.
    """
    eqns = [_inside(eqn) for eqn in jaxpr.eqns]
    readers: dict[Var, set[int]] = {}
    for i, eqn in enumerate(eqns):
        for atom in eqn.invars:
            if isinstance(atom, Var):
                readers.setdefault(atom, set()).add(i)
    outs = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name != "cond":
            continue
        shared = [v for v in eqn.outvars if v not in outs and _only_backward(v, eqn, eqns, readers)]
        if not shared:
            continue
        at = sorted(set().union(*(readers[v] for v in shared)))
        residuals = _residuals(eqn, shared, [eqns[r] for r in at])
        eqns[i] = _forward(eqn, shared, residuals)
        for r in at:
            eqns[r] = _backward(eqns[r], shared, residuals)
            for atom in eqns[r].invars:
                readers.setdefault(atom, set()).add(r) if isinstance(atom, Var) else None
    return _jax.make_jaxpr_value(jaxpr.invars, jaxpr.outvars, eqns, constvars=jaxpr.constvars)


def _inside(eqn: JaxprEqn) -> JaxprEqn:
    def done(param: Any) -> Any:
        if isinstance(param, tuple) and param and all(_jax.is_jaxpr(p) for p in param):
            return tuple(done(p) for p in param)
        if not _jax.is_jaxpr(param):
            return param
        jaxpr, consts = _jax.open_jaxpr(param)
        return _jax.close(residuals_apart(jaxpr), consts)

    if not _jax.holds(eqn, lambda e: e.primitive.name == "cond"):
        return eqn
    return _jax.make_eqn(
        eqn, eqn.invars, eqn.outvars, {name: done(param) for name, param in eqn.params.items()}
    )


def _only_backward(
    var: Var, forward: JaxprEqn, eqns: Sequence[JaxprEqn], readers: dict[Var, set[int]]
) -> bool:
    """Whether only conds of the same choice read it: then it may be zero in a branch not taken."""
    reading = [eqns[i] for i in readers.get(var, ())]
    plain = not jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended)
    index = forward.invars[0]
    return (
        bool(reading)
        and plain
        and all(e.primitive.name == "cond" and e.invars[0] is index for e in reading)
    )


def _branches(eqn: JaxprEqn) -> list[tuple[Jaxpr, tuple[Any, ...]]]:
    return [_jax.open_jaxpr(branch) for branch in eqn.params["branches"]]


def _residuals(
    forward: JaxprEqn, shared: Sequence[Var], backward: Sequence[JaxprEqn]
) -> list[_Residual]:
    """By branch, and in a branch in the order in which it makes them."""
    found = []
    for branch, (jaxpr, _) in enumerate(_branches(forward)):
        order: dict[Var, tuple[int, int]] = {}
        for i, var in enumerate([*jaxpr.constvars, *jaxpr.invars]):
            order[var] = (-1, i)
        for i, eqn in enumerate(jaxpr.eqns):
            order.update((v, (i, k)) for k, v in enumerate(eqn.outvars))
        kept = []
        for var in shared:
            if any(_positions(eqn, branch, var) for eqn in backward):
                value = jaxpr.outvars[forward.outvars.index(var)]
                made = order[value] if isinstance(value, Var) else (-2, 0)
                kept.append(_Residual(branch, var, made, _jax.make_var(var.aval)))
        found += sorted(kept, key=lambda r: r.made)
    return found


def _positions(backward: JaxprEqn, branch: int, var: Var) -> list[int]:
    """At which operands of a branch it comes in and is read."""
    jaxpr, _ = _branches(backward)[branch]
    read = {a for e in jaxpr.eqns for a in e.invars if isinstance(a, Var)}
    read |= {a for a in jaxpr.outvars if isinstance(a, Var)}
    operands = enumerate(backward.invars[1:])
    return [i for i, atom in operands if atom is var and jaxpr.invars[i] in read]


def _forward(eqn: JaxprEqn, shared: Sequence[Var], residuals: Sequence[_Residual]) -> JaxprEqn:
    kept = [k for k, v in enumerate(eqn.outvars) if v not in shared]
    branches = []
    for branch, (jaxpr, consts) in enumerate(_branches(eqn)):
        eqns = list(jaxpr.eqns)
        outs: list[Atom] = [jaxpr.outvars[k] for k in kept]
        for residual in residuals:
            if residual.branch == branch:
                outs.append(jaxpr.outvars[eqn.outvars.index(residual.shared)])
            else:
                made, (zeros,) = _zeros(eqn, residual.own.aval)
                eqns += made
                outs.append(zeros)
        alive = list(compress(eqns, live(eqns, outs)))
        body = _jax.make_jaxpr_value(jaxpr.invars, outs, alive, constvars=jaxpr.constvars)
        branches.append(_jax.close(body, consts))
    outvars = [*(eqn.outvars[k] for k in kept), *(r.own for r in residuals)]
    return _jax.make_eqn(eqn, eqn.invars, outvars, {**eqn.params, "branches": tuple(branches)})


def _zeros(eqn: JaxprEqn, aval: Any) -> tuple[list[JaxprEqn], list[Atom]]:
    return emit(eqn, lambda: jnp.zeros(aval.shape, aval.dtype), ())


def _backward(eqn: JaxprEqn, shared: Sequence[Var], residuals: Sequence[_Residual]) -> JaxprEqn:
    operands = eqn.invars[1:]
    kept = [i for i, atom in enumerate(operands) if not any(atom is v for v in shared)]
    incoming = [(r, i) for r in residuals for i in _positions(eqn, r.branch, r.shared)]
    branches = []
    for branch, (jaxpr, consts) in enumerate(_branches(eqn)):
        invars = [jaxpr.invars[i] for i in kept]
        for residual, i in incoming:
            here = residual.branch == branch
            invars.append(jaxpr.invars[i] if here else _jax.make_var(residual.own.aval))
        body = _jax.make_jaxpr_value(invars, jaxpr.outvars, jaxpr.eqns, constvars=jaxpr.constvars)
        branches.append(_jax.close(body, consts))
    return _jax.make_eqn(
        eqn,
        [eqn.invars[0], *(operands[i] for i in kept), *(r.own for r, _ in incoming)],
        eqn.outvars,
        {**eqn.params, "branches": tuple(branches)},
    )
