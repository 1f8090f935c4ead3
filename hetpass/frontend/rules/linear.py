"""Which operands an equation is linear in, and what happens to sums kept in parts.

The sum over microbatches of f(x_m) is f of the sum exactly if f is linear. The same table says
where a scale that is known only later may wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hetpass._jax import JaxprEqn, Var
from hetpass.frontend.rules.values import Mixes, Val, needs_full
from hetpass.ir.kinds import CombineOp, Partial

_ALL = -1

JOINTLY_LINEAR: dict[str, tuple[int, ...]] = {
    "neg": (0,),
    "add": (0, 1),
    "add_any": (0, 1),
    "sub": (0, 1),
    "complex": (0, 1),
    "real": (0,),
    "imag": (0,),
    "conj": (0,),
    "convert_element_type": (0,),
    "copy": (0,),
    "copy_p": (0,),
    "name": (0,),
    "stop_gradient": (0,),
    "hetpass_stage_boundary": (0,),
    "optimization_barrier": (_ALL,),
    "reduce_sum": (0,),
    "cumsum": (0,),
    "reduce_window_sum": (0,),
    "reshape": (0,),
    "transpose": (0,),
    "broadcast_in_dim": (0,),
    "squeeze": (0,),
    "tile": (0,),
    "expand_dims": (0,),
    "slice": (0,),
    "split": (0,),
    "rev": (0,),
    "concatenate": (_ALL,),
    "stack": (_ALL,),
    "unstack": (0,),
    "pad": (0, 1),
    "gather": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter-add": (0, 2),
    "scatter_add": (0, 2),
    "scatter": (0, 2),
    "scatter-sub": (0, 2),
    "scatter_sub": (0, 2),
    "scatter-mul": (0,),
    "scatter_mul": (0,),
    "select_and_scatter_add": (0,),
    "fft": (0,),
    "triangular_solve": (1,),
}
"""Primitive -> operands that it is linear in together (all others held fixed)."""

LINEAR_IN_EACH: dict[str, tuple[int, ...]] = {
    "mul": (0, 1),
    "dot_general": (0, 1),
    "conv_general_dilated": (0, 1),
    "div": (0,),
}
"""Primitive -> operands that it is linear in one by one."""

_MOVES = frozenset(
    "copy copy_p name stop_gradient hetpass_stage_boundary reshape transpose broadcast_in_dim "
    "squeeze expand_dims slice split unstack rev gather dynamic_slice concatenate "
    "convert_element_type".split()
)
"""Primitives that only move numbers: they commute with max, min, or, and."""

_IDEMPOTENT: dict[str, CombineOp] = {"max": "max", "min": "min", "or": "or", "and": "and"}
_REDUCES: dict[str, CombineOp] = {
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_and": "and",
}


def _linear_operands(eqn: JaxprEqn) -> tuple[int, ...]:
    name = eqn.primitive.name
    if name == "select_n":
        return tuple(range(1, len(eqn.invars)))
    if name == "gather" and _fills(eqn):
        return ()
    operands = JOINTLY_LINEAR.get(name, ())
    return tuple(range(len(eqn.invars))) if operands == (_ALL,) else operands


def _fills(eqn: JaxprEqn) -> bool:
    """A gather that puts a number of its own where an index is out of bounds (NaN is no matter)."""
    if "fill" not in str(eqn.params.get("mode")).lower():
        return False
    value = eqn.params.get("fill_value")
    if value is None:
        return not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    return bool(value != 0)


def narrows(eqn: JaxprEqn) -> bool:
    """A cast to a type that cannot hold what the operand's type can."""
    if eqn.primitive.name != "convert_element_type":
        return False
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if jnp.issubdtype(source, jnp.inexact) and jnp.issubdtype(target, jnp.inexact):
        return jnp.finfo(target).bits < jnp.finfo(source).bits
    if jnp.issubdtype(source, jnp.integer) and jnp.issubdtype(target, jnp.integer):
        # Sums wrap around in their own type: a wider one tells the difference. (Those of 32 bits
        # and more are taken not to overflow.)
        bits = jnp.iinfo(source).bits
        return bool(jnp.iinfo(target).bits < bits or (bits < 32 and source != target))
    return not jax.dtypes.issubdtype(target, jnp.inexact) and source != target


def scaled_result(eqn: JaxprEqn, vals: Sequence[Val]) -> tuple[Var, ...]:
    """The factors that the result still has to be multiplied by.

    Raises:
      Mixes: the equation is not linear in what is scaled.
    """
    scaled = [i for i, v in enumerate(vals) if v.factors]
    each = LINEAR_IN_EACH.get(eqn.primitive.name, ())
    if each and set(scaled) <= set(each):
        return tuple(f for i in scaled for f in vals[i].factors)
    together = _linear_operands(eqn)
    if not set(scaled) <= set(together) or narrows(eqn):
        reason = "is not linear in a value that waits for a sum over the whole batch"
        raise Mixes(eqn, reason, "scales")
    live = [vals[i].factors for i in together if not vals[i].zero]
    if any(sorted(map(id, f)) != sorted(map(id, live[0])) for f in live):
        raise Mixes(eqn, "adds values that wait for different sums over the whole batch", "scales")
    return live[0] if live else ()


def partial_result(eqn: JaxprEqn, vals: Sequence[Val]) -> Partial:
    """The kind of a result that has partial operands and otherwise whole ones.

    Raises:
      Mixes: the equation needs the full value of a partial operand.
    """
    name = eqn.primitive.name
    parts = [i for i, v in enumerate(vals) if isinstance(v.kind, Partial)]
    ops = {vals[i].kind.op for i in parts}
    if len(ops) != 1:
        raise needs_full(eqn, vals)
    op: CombineOp = ops.pop()
    if op == "sum":
        return _partial_sum(eqn, vals, parts)
    if name == "convert_element_type":
        return Partial(_op_after_cast(eqn, vals, op))
    moved = len(vals) if name in ("concatenate", "stack") else 1
    if name in _MOVES and parts == list(range(moved)):
        return Partial(op)
    if _IDEMPOTENT.get(name) == op or _REDUCES.get(name) == op:
        return Partial(op)
    signed = not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.unsignedinteger)
    if name == "neg" and op in ("max", "min") and signed:
        return Partial("min" if op == "max" else "max")
    raise needs_full(eqn, vals)


def _op_after_cast(eqn: JaxprEqn, vals: Sequence[Val], op: CombineOp) -> CombineOp:
    """Casts to signed numbers are monotone; "any" and "all" of 0 and 1 are max and min."""
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if source == target:
        return op
    from_bool, to_bool = (bool(d == jnp.bool_) for d in (source, target))
    monotone = not to_bool and not jnp.issubdtype(target, jnp.unsignedinteger)
    if op in ("max", "min") and monotone and not _shortens(source, target):
        return op
    if op in ("or", "and") and from_bool and not to_bool:
        return "max" if op == "or" else "min"
    both = jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.floating)
    if op == "prod" and both and not narrows(eqn):
        return op
    raise needs_full(eqn, vals)


def _shortens(source: Any, target: Any) -> bool:
    """An integer cast that may wrap around."""
    if not (jnp.issubdtype(source, jnp.integer) and jnp.issubdtype(target, jnp.integer)):
        return False
    return bool(jnp.iinfo(target).max < jnp.iinfo(source).max)


def _partial_sum(eqn: JaxprEqn, vals: Sequence[Val], parts: Sequence[int]) -> Partial:
    each = LINEAR_IN_EACH.get(eqn.primitive.name, ())
    if len(parts) == 1 and parts[0] in each and _is_inexact_result(eqn):
        return Partial("sum")
    together = _linear_operands(eqn)
    added = [vals[i] for i in together]
    if not set(parts) <= set(together) or narrows(eqn):
        raise needs_full(eqn, vals)
    if any(not isinstance(v.kind, Partial) and not v.zero for v in added):
        raise Mixes(eqn, "adds a sum over the batch to a value that is free of it", "start")
    return Partial("sum")


def _is_inexact_result(eqn: JaxprEqn) -> bool:
    """Integer division of a sum is not linear; multiplication is, and matters to floats only."""
    if eqn.primitive.name != "div":
        return True
    return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))
