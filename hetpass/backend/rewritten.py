"""Equations that XLA gets wrong in a sharded program, written in other words, wherever they stand.

Pads are the business of `backend/pads`. A Fourier transform (jaxlib 0.10 to 0.12, CPU) ends in a
failed check where what it reads or makes is not laid out row by row, which layout assignment does
to it when collectives stand next to it; so its layouts are said. A slice whose start may lie beyond
what it slices is clamped, until XLA fuses it with a slice of its result, as cuts make them:
`dynamic_slice(dynamic_slice(x, i), j)` becomes `dynamic_slice(x, i + j)`. So starts are clamped.

What leaves an executable is laid out as the next one expects it. JAX leaves the layout of a result
open where the equation that makes it says one, so a transform's layout is not said last.

What cannot be said in other words is kept from the partitioner: `backend/unpartitioned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from hetpass import _jax
from hetpass._jax import Jaxpr, JaxprEqn
from hetpass.backend import pads


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """`bind_equation`, without such equations, here and in nested jaxprs."""
    if pads.is_mistaken(eqn):
        operand, fill = operands
        return [pads.pad(operand, fill, eqn.params["padding_config"])]
    if eqn.primitive.name in _STARTS:
        return _jax.bind_equation(eqn, _STARTS[eqn.primitive.name](eqn, operands))
    if eqn.primitive.name == "fft":
        made = _jax.bind_equation(eqn, [row_by_row(value) for value in operands])
        return [jax.lax.optimization_barrier(row_by_row(value)) for value in made]
    return _jax.bind_equation(_without(eqn), operands)


def row_by_row(value: Any) -> Any:
    """The value, laid out with its last dimension innermost."""
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))


def _sliced(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Operands of `dynamic_slice` (x, starts…), with starts within x."""
    operand, *starts = operands
    return [operand, *_within(starts, operand.shape, eqn.params["slice_sizes"])]


def _updated(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Operands of `dynamic_update_slice` (x, update, starts…)."""
    operand, update, *starts = operands
    return [operand, update, *_within(starts, operand.shape, update.shape)]


def _gathered(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Operands of `gather` (x, indices), which XLA clamps in every mode."""
    operand, indices = operands
    dims = eqn.params["dimension_numbers"].start_index_map
    last = [operand.shape[d] - eqn.params["slice_sizes"][d] for d in dims]
    if eqn.params["mode"] != jax.lax.GatherScatterMode.CLIP:
        return [operand, indices]
    return [operand, _clamped(indices, last)]


def _within(starts: Sequence[Any], whole: Sequence[int], part: Sequence[int]) -> list[Any]:
    """Starts of parts that lie within the whole; constants, as after tracing, are there already."""
    return [
        _clamped(start, size - taken) if isinstance(start, jax.Array) else start
        for start, size, taken in zip(starts, whole, part, strict=True)
    ]


def _clamped(starts: Any, last: Any) -> Any:
    """Starts from 0 to `last`, or as far as their type counts."""
    most = np.minimum(last, np.iinfo(starts.dtype).max).astype(starts.dtype)
    return jnp.clip(starts, np.zeros_like(most), most)


_STARTS = {"dynamic_slice": _sliced, "dynamic_update_slice": _updated, "gather": _gathered}


def _is_rewritten(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("fft", *_STARTS) or pads.is_mistaken(eqn)


def _holds_rewritten(jaxpr: Jaxpr) -> bool:
    return any(_jax.holds(eqn, _is_rewritten) for eqn in jaxpr.eqns)


def _without(eqn: JaxprEqn) -> JaxprEqn:
    if not any(_holds_rewritten(inner) for inner in _jax.nested_jaxprs(eqn)):
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
