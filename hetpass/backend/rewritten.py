"""Equations that XLA gets wrong in a sharded program, written in other words, wherever they stand.

Pads are the business of `backend/pads`. A Fourier transform (jaxlib 0.10 to 0.12, CPU) ends in a
failed check where what it reads or makes is not laid out row by row, which layout assignment does
to it when collectives stand next to it; so its layouts are said.

What cannot be said in other words is kept from the partitioner: `backend/unpartitioned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from hetpass import _jax
from hetpass._jax import Jaxpr, JaxprEqn
from hetpass.backend import pads


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """`bind_equation`, without such equations, here and in nested jaxprs."""
    if pads.is_mistaken(eqn):
        operand, fill = operands
        return [pads.pad(operand, fill, eqn.params["padding_config"])]
    if eqn.primitive.name == "fft":
        return [row_by_row(r) for r in _jax.bind_equation(eqn, [row_by_row(v) for v in operands])]
    return _jax.bind_equation(_without(eqn), operands)


def row_by_row(value: Any) -> Any:
    """The value, laid out with its last dimension innermost."""
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))


def _is_rewritten(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "fft" or pads.is_mistaken(eqn)


def _holds_rewritten(jaxpr: Jaxpr) -> bool:
    return any(
        _is_rewritten(eqn) or any(_holds_rewritten(inner) for inner in _nested(eqn))
        for eqn in jaxpr.eqns
    )


def _nested(eqn: JaxprEqn) -> list[Jaxpr]:
    values = (v for p in eqn.params.values() for v in (p if isinstance(p, tuple) else (p,)))
    return [_jax.open_jaxpr(value)[0] for value in values if _jax.is_jaxpr(value)]


def _without(eqn: JaxprEqn) -> JaxprEqn:
    if not any(_holds_rewritten(inner) for inner in _nested(eqn)):
        return eqn
    params = {
        name: tuple(map(_rewritten, p)) if isinstance(p, tuple) else _rewritten(p)
        for name, p in eqn.params.items()
    }
    return eqn.replace(params=params)


def _rewritten(value: Any) -> Any:
    """A parameter of an equation; a jaxpr comes back without such equations."""
    if not _jax.is_jaxpr(value):
        return value
    jaxpr, consts = _jax.open_jaxpr(value)
    if not _holds_rewritten(jaxpr) or len(jaxpr.constvars) != len(consts):
        return value

    def evaluated(*arguments: Any) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            results = bind(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    closed = jax.make_jaxpr(evaluated)(*(v.aval for v in jaxpr.invars))
    return closed if isinstance(value, _jax.ClosedJaxpr) else _jax.open_jaxpr(closed)[0]
