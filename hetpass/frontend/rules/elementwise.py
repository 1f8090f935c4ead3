"""Equations that treat every element, or every example, alike."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from hetpass._jax import JaxprEqn, Var
from hetpass.frontend.rules.values import WHOLE, Context, Mixes, Rule, Val, join_batched
from hetpass.ir.kinds import Batched, Position, Whole

_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt hetpass_stage_boundary igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to
max min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial
population_count pow random_fold_in random_gamma_grad random_seed real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
""".split()


def elementwise(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Operands of one shape, or scalars: the result lies as they lie."""
    del ctx
    known = _positions(eqn, vals)
    if known is not None:
        return [known]
    kind = join_batched(eqn, vals)
    if kind is None:
        return [WHOLE for _ in eqn.outvars]
    zero = eqn.primitive.name in ("neg", "convert_element_type", "copy", "name")
    const = vals[0].const if zero and vals[0].zero else None
    return [Val(kind, const=const) for _ in eqn.outvars]


def _positions(eqn: JaxprEqn, vals: Sequence[Val]) -> Val | None:
    """Index arithmetic on positions that stays exact: the wrap of negative indices, `+ 1`, casts.

    A position counts examples of the full batch from 0, so that `position < 0` is false.
    """
    name = eqn.primitive.name
    first = vals[0]
    if name == "select_n" and isinstance(first.const, (bool, int)) and len(vals) > 1:
        return vals[1 + int(first.const)] if first.along_batch else None
    if not isinstance(first.kind, Position):
        return None
    other = vals[1].const if len(vals) == 2 else None
    place = first.kind
    if name == "convert_element_type" and counts_in(eqn.outvars[0], place.dim):
        return Val(place)
    if isinstance(other, int) and not isinstance(other, bool):
        if name in ("add", "sub"):
            return Val(Position(place.dim, place.plus + (other if name == "add" else -other)))
        if name == "lt" and place.plus >= other:
            return Val(Batched(place.dim, None), const=False)
        if name == "ge" and place.plus >= other:
            return Val(Batched(place.dim, None), const=True)
    return None


def counts_in(var: Var, dim: int) -> bool:
    """Whether the type of a value can hold the positions along one of its dimensions."""
    dtype = var.aval.dtype
    return dtype.kind in "iu" and bool(jnp.iinfo(dtype).max >= var.aval.shape[dim])


def barrier(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """One result per operand, each unchanged."""
    del eqn, ctx
    return list(vals)


def leading(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Linear algebra on the last two dimensions: the batch must lead."""
    del ctx
    kind = join_batched(eqn, vals)
    assert kind is not None
    if any(not v.along_batch and isinstance(v.kind, Whole) for v in vals):
        raise Mixes(eqn, "takes one matrix for the whole batch and one per example")
    if any(kind.dim >= len(a.aval.shape) - 2 for a in eqn.invars[:1]):
        raise Mixes(eqn, "works along the batch")
    return [Val(kind) for _ in eqn.outvars]


def triangular_solve(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """One matrix, and examples as right-hand sides beside each other; or a matrix per example."""
    matrix, sides = vals
    rank = len(eqn.invars[1].aval.shape)
    beside = rank - 1 if eqn.params["left_side"] else rank - 2
    if not matrix.along_batch and sides.along_batch and sides.kind.dim == beside:
        return [Val(Batched(beside, getattr(sides.kind, "outer", 1)))]
    return leading(eqn, vals, ctx)


def keys(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Random keys per example: results have the keys' dimensions first."""
    del ctx
    kind = join_batched(eqn, vals)
    assert kind is not None
    return [Val(kind) for _ in eqn.outvars]


def gamma(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """One key for several draws is split as many times as there are draws."""
    if not vals[0].along_batch:
        raise Mixes(eqn, "draws for the whole batch from one key")
    return elementwise(eqn, vals, ctx)


def pivots(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Row swaps of one matrix lie along the last dimension."""
    del ctx
    kind = join_batched(eqn, vals)
    assert kind is not None
    if kind.dim >= len(eqn.invars[0].aval.shape) - 1:
        raise Mixes(eqn, "works along the batch")
    return [Val(kind) for _ in eqn.outvars]


RULES: dict[str, Rule] = {
    "random_gamma": gamma,
    "triangular_solve": triangular_solve,
    "lu_pivots_to_permutation": pivots,
    **dict.fromkeys(_NAMES, elementwise),
    "optimization_barrier": barrier,
    **dict.fromkeys(
        "cholesky eigh eig lu qr svd householder_product schur hessenberg tridiagonal "
        "geqrf".split(),
        leading,
    ),
    **dict.fromkeys("random_bits random_split random_wrap random_unwrap".split(), keys),
}
