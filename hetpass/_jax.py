"""The only door to the parts of JAX that move between versions.

Everything that hetpass takes from `jax.extend`, `jax.interpreters`, `jax._src` or `jaxlib` comes
through here, each name with the versions in which it was seen to differ. Supported: jax 0.10.2 up
to, not including, 0.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import source_info_util as _source_info_util  # private in 0.10 to 0.12
from jax.extend import core as _core

# jax.extend.core holds these since 0.4.36. By 0.12 ClosedJaxpr and Jaxpr are one class.
ClosedJaxpr = _core.ClosedJaxpr
Jaxpr = _core.Jaxpr
JaxprEqn = _core.JaxprEqn
Var = _core.Var
DropVar = _core.DropVar
Literal = _core.Literal
Primitive = _core.Primitive
ShapedArray = jax.core.ShapedArray
Atom = Var | Literal

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:3])


def make_var(aval: Any) -> Var:
    """A fresh variable. (0.10: `Var(aval, initial_qdd, final_qdd)`; 0.12: `Var(aval)`.)"""
    return Var(aval)


def make_jaxpr_value(
    invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]
) -> Jaxpr:
    """An open jaxpr without constants; its effects are those of its equations."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    return Jaxpr((), list(invars), list(outvars), list(eqns), effects)


def open_jaxpr(value: Any) -> tuple[Jaxpr, tuple[Any, ...]]:
    """The open jaxpr and the constants of a Jaxpr or ClosedJaxpr (one class by 0.12)."""
    consts = tuple(getattr(value, "consts", ()) or ())
    return getattr(value, "jaxpr", value), consts


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def user_frame(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the user's own code that made the equation; may be empty."""
    return str(_source_info_util.summarize(eqn.source_info))


def name_stack(eqn: JaxprEqn) -> str:
    return str(eqn.source_info.name_stack)
