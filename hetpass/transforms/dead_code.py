"""Dead code: which equations some results need, and a `cond` cut down to some of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetpass._jax import JaxprEqn, Var, close, drop_dead_code, open_jaxpr


def live_equations(eqns: Sequence[JaxprEqn], needed: Iterable[object]) -> tuple[bool, ...]:
    """Per equation, whether `needed` values depend on it; one with effects is always live."""
    wanted = {v for v in needed if isinstance(v, Var)}
    live = [False] * len(eqns)
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        live[i] = bool(eqn.effects) or any(v in wanted for v in eqn.outvars)
        if live[i]:
            wanted.update(v for v in eqn.invars if isinstance(v, Var))
    return tuple(live)


def restrict_cond(eqn: JaxprEqn, keep: Sequence[bool]) -> JaxprEqn:
    """The `cond` with only the outputs marked in `keep`, and only the operands these need."""
    branches = [open_jaxpr(branch)[0] for branch in eqn.params["branches"]]
    used = [False] * (len(eqn.invars) - 1)
    for branch in branches:
        _, needs = drop_dead_code(branch, keep, [False] * len(used))
        used = [a or b for a, b in zip(used, needs, strict=True)]
    smaller = tuple(close(drop_dead_code(b, keep, used)[0]) for b in branches)
    operands = [v for v, kept in zip(eqn.invars[1:], used, strict=True) if kept]
    return eqn.replace(
        invars=[eqn.invars[0], *operands],
        outvars=[v for v, kept in zip(eqn.outvars, keep, strict=True) if kept],
        params={**eqn.params, "branches": smaller},
    )
