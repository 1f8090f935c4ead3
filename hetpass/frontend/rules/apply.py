"""One equation: from the kinds of its operands to the kinds of its results."""

from __future__ import annotations

from collections.abc import Sequence

from hetpass._jax import JaxprEqn
from hetpass.frontend.rules import control_flow, elementwise, indexing, reductions, shapes
from hetpass.frontend.rules.linear import partial_result, scaled_result
from hetpass.frontend.rules.values import (
    WHOLE,
    Context,
    Mixes,
    Rule,
    Val,
    check_result,
    is_partial,
    needs_full,
)
from hetpass.ir.kinds import Whole

_RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shapes.RULES,
    **reductions.RULES,
    **indexing.RULES,
}

_KEEPS_ZERO = frozenset(
    "broadcast_in_dim reshape transpose squeeze slice copy neg convert_element_type reduce_sum "
    "concatenate stack add add_any pad select_n name".split()
)


def apply(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """The kinds of the results.

    Args:
      eqn: an equation at B.
      vals: what is known of its operands.
      ctx: sizes; receives what the region must do differently.

    Raises:
      Mixes: the equation is not proved to act example by example on these operands.
    """
    name = eqn.primitive.name
    if name in control_flow.RULES:
        results = control_flow.RULES[name](eqn, vals, ctx)
    elif name == "optimization_barrier":
        results = list(vals)
    else:
        results = _plain(eqn, vals, ctx)
    for var, val in zip(eqn.outvars, results, strict=True):
        check_result(eqn, var, val, ctx)
    return results


def _plain(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    name = eqn.primitive.name
    if eqn.effects:
        raise Mixes(eqn, "has side effects")
    factors = scaled_result(eqn, vals) if any(v.factors for v in vals) else ()
    bare = [Val(v.kind, (), v.const, v.columns) for v in vals] if factors else vals
    along = any(v.along_batch for v in vals)
    parts = any(is_partial(v) for v in vals)
    if along and parts and name not in indexing.ADDS:
        raise needs_full(eqn, vals)
    if along:
        if name not in _RULES:
            raise Mixes(eqn, "is a primitive without a rule for the batch")
        results = _RULES[name](eqn, bare, ctx)
    elif parts and any(ctx.grows(v) for v in eqn.outvars):
        raise needs_full(eqn, vals)
    elif parts:
        results = [Val(partial_result(eqn, bare)) for _ in eqn.outvars]
    else:
        results = _from_whole(eqn, bare, ctx)
    if factors:
        results = [Val(v.kind, factors, v.const) for v in results]
    return results


def _from_whole(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """No operand knows of the batch; the result may still have its size."""
    name = eqn.primitive.name
    if any(ctx.grows(v) for v in eqn.outvars):
        if name == "broadcast_in_dim":
            return _RULES[name](eqn, vals, ctx)
        if name not in reductions.PRODUCERS:
            raise Mixes(eqn, "makes a dimension that grows with the batch", "shape")
        return reductions.PRODUCERS[name](eqn, vals, ctx)
    data = vals[1:] if name == "select_n" else vals
    if name in _KEEPS_ZERO and data and all(v.zero for v in data):
        return [Val(Whole(), const=0) for _ in eqn.outvars]
    if name in ("broadcast_in_dim", "reshape") and vals[0].const is not None:
        return [Val(Whole(), const=vals[0].const)]
    return [WHOLE for _ in eqn.outvars]
