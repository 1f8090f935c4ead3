"""Inline calls: one flat list of equations, every variable fresh, constants hoisted.

Calls (`jit`, `custom_jvp_call`, `custom_vjp_call`, `checkpoint`, …) are inlined wherever they
stand, also inside the bodies of scan, while and cond, which stay whole. A train step has already
been differentiated when it is traced, so that the derivative rules of custom calls are used up.

`with_sharding_constraint` and `with_layout_constraint` go: they are requests about speed, of
devices and arrays that the step no longer has. Shardings are chosen by the plan.

Nested jaxprs get fresh variables too: JAX shares one jaxpr object between calls of equal shapes,
and two calls may agree in shape at one batch size and differ at another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from hetpass import _jax
from hetpass._jax import Atom, Jaxpr, JaxprEqn, Literal, Var

_CALLS: dict[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "call": ("call_jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("fun_jaxpr", "call_jaxpr"),
}
"""Primitive name -> the parameter that holds the called jaxpr (spellings by version)."""

_REQUESTS = ("sharding_constraint", "layout_constraint")

_REMATS = ("remat2", "checkpoint")


@dataclass(frozen=True)
class Inlined:
    """A flat jaxpr.

    Attributes:
      jaxpr: open; the captured constants are its last invars.
      constants: their values.
      recomputed: one flag per equation: stands inside a differentiated `jax.checkpoint`, where
        forward values are computed a second time.
    """

    jaxpr: Jaxpr
    constants: tuple[Any, ...]
    recomputed: tuple[bool, ...]


def inline(closed: Any) -> Inlined:
    """Flatten a traced function.

    Args:
      closed: what `jax.make_jaxpr` returns.

    Returns:
      The flat program without dead equations; equations with effects are never dead.
    """
    jaxpr, consts = _jax.open_jaxpr(closed)
    flat = _Flattener()
    invars = [_jax.make_var(v.aval) for v in jaxpr.invars]
    outvars = flat.run(jaxpr, consts, invars, caller=None, recomputed=False)
    alive = live(flat.eqns, outvars)
    constants = list(flat.constants.values())
    return Inlined(
        _jax.make_jaxpr_value(
            [*invars, *(v for v, _ in constants)], outvars, list(compress(flat.eqns, alive))
        ),
        tuple(value for _, value in constants),
        tuple(compress(flat.recomputed, alive)),
    )


def called_jaxpr(eqn: JaxprEqn) -> Any | None:
    """The jaxpr that a call equation runs; None for any other equation."""
    for name in _CALLS.get(eqn.primitive.name, ()):
        if name in eqn.params and _jax.is_jaxpr(eqn.params[name]):
            return eqn.params[name]
    return _jax.expanded(eqn)


def _called(eqn: JaxprEqn, operands: list[Atom]) -> tuple[Any | None, list[Atom]]:
    """What a call equation runs, and on which of its operands.

    A linear solve holds four jaxprs, each with its own constants; the values are those of one.
    """
    if eqn.primitive.name != "custom_linear_solve":
        return called_jaxpr(eqn), operands
    counts = eqn.params["const_lengths"]
    first = counts.matvec + counts.vecmat
    right_sides = operands[sum(counts) :]
    solve = eqn.params["jaxprs"].solve
    return solve, [*operands[first : first + counts.solve], *right_sides]


@dataclass
class _Flattener:
    """Builds one flat list; local to `inline`."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    recomputed: list[bool] = field(default_factory=list)
    constants: dict[int, tuple[Var, Any]] = field(default_factory=dict)

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Atom],
        caller: JaxprEqn | None,
        recomputed: bool,
    ) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(var, value)

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            named = eqn if caller is None else _jax.with_name_prefix(eqn, caller)
            operands = [read(a) for a in eqn.invars]
            if eqn.primitive.name in _REQUESTS:
                env[eqn.outvars[0]] = operands[0]
                continue
            inner, operands = _called(eqn, operands)
            if inner is not None:
                again = recomputed or (
                    eqn.primitive.name in _REMATS and bool(eqn.params.get("differentiated"))
                )
                body, body_consts = _jax.open_jaxpr(inner)
                results = self.run(body, body_consts, operands, named, again)
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            outvars = [_jax.make_var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            params = {k: _fresh_nested(v) for k, v in eqn.params.items()}
            self.eqns.append(_jax.make_eqn(named, operands, outvars, params))
            self.recomputed.append(recomputed)
        return [read(a) for a in jaxpr.outvars]

    def constant(self, var: Var, value: Any) -> Var:
        if id(value) not in self.constants:
            self.constants[id(value)] = (_jax.make_var(var.aval), value)
        return self.constants[id(value)][0]


def _fresh_nested(param: Any) -> Any:
    if _jax.is_jaxpr(param):
        return _fresh(param)
    if type(param) is tuple and param and all(_jax.is_jaxpr(p) for p in param):
        return tuple(_fresh(p) for p in param)
    return param


def _fresh(closed: Any) -> Any:
    """The nested jaxpr inlined and with fresh variables; its constants stay attached."""
    jaxpr, consts = _jax.open_jaxpr(closed)
    if len(consts) != len(jaxpr.constvars):
        return closed
    flat = _Flattener()
    invars = [_jax.make_var(v.aval) for v in jaxpr.invars]
    outvars = flat.run(jaxpr, consts, invars, caller=None, recomputed=False)
    constants = list(flat.constants.values())
    body = _jax.make_jaxpr_value(invars, outvars, flat.eqns, constvars=[v for v, _ in constants])
    return _jax.close(body, [value for _, value in constants])


def live(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]) -> list[bool]:
    """Per equation, whether a result or an effect needs it."""
    needed = {v for v in outvars if isinstance(v, Var)}
    kept = []
    for eqn in reversed(eqns):
        kept.append(bool(eqn.effects) or any(v in needed for v in eqn.outvars))
        if kept[-1]:
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    return kept[::-1]
