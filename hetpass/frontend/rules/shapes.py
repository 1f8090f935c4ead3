"""Equations that move numbers: reshape, transpose, slice, concatenate, broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetpass._jax import JaxprEqn
from hetpass.frontend.rules.values import WHOLE, Context, Mixes, Rule, Val, join_batched
from hetpass.ir.kinds import Batched, Position


def _moved(val: Val, dim: int, outer: int | None = 1) -> Val:
    """The value with its examples along another dimension."""
    if isinstance(val.kind, Position):
        return Val(Position(dim, val.kind.plus), val.factors)
    return Val(Batched(dim, outer), val.factors, val.const)


def _outer(val: Val) -> int | None:
    return val.kind.outer if isinstance(val.kind, Batched) else 1


def _require_whole(eqn: JaxprEqn, vals: Sequence[Val], what: str) -> None:
    if any(v.along_batch for v in vals):
        raise Mixes(eqn, f"takes {what} from the batch")


def broadcast_in_dim(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """A value repeated along new dimensions; a new batch dimension holds equal rows."""
    (val,), out = vals[:1], eqn.outvars[0]
    if val.along_batch:
        dim = eqn.params["broadcast_dimensions"][val.kind.dim]
        return [_moved(val, int(dim), _outer(val))]
    dims = ctx.batch_dims(out)
    if dims:
        if len(dims) > 1:
            raise Mixes(eqn, "makes two dimensions that grow with the batch")
        return [Val(Batched(dims[0], None), val.factors, val.const)]
    return [Val(val.kind, val.factors, val.const)]


def reshape(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """The stride of the batch is invariant: as many elements lie before and behind it as did."""
    val = vals[0]
    if not val.along_batch:
        return [val]
    source, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    old = val.kind.dim
    order = eqn.params.get("dimensions")
    if order is not None:  # a transpose comes first
        source, old = tuple(source[d] for d in order), tuple(order).index(old)
    dims = ctx.batch_dims(eqn.outvars[0])
    if dims is None or len(dims) != 1:
        raise Mixes(eqn, "makes two dimensions that grow with the batch")
    (new,) = dims
    before, ahead = math.prod(source[:old]), math.prod(target[:new])
    outer = _outer(val)
    if outer is None:
        if before == ahead and source[old] == target[new]:
            return [_moved(val, new, None)]
        outer = 1 if (before % ahead == 0) else source[old] // ctx.batch_size
    total = before * outer
    if total % ahead:
        raise Mixes(eqn, "tears the batch apart")
    new_outer = total // ahead
    behind = math.prod(source[old + 1 :]) * source[old] // (outer * ctx.batch_size)
    inner, rest = divmod(behind, math.prod(target[new + 1 :]))
    if rest or new_outer * ctx.batch_size * inner != target[new]:
        raise Mixes(eqn, "tears the batch apart")
    if isinstance(val.kind, Position) and (new_outer, inner) != (1, 1):
        return [Val(Batched(new, new_outer))]
    return [_moved(val, new, new_outer)]


def transpose(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    val = vals[0]
    if not val.along_batch:
        return [val]
    permutation = tuple(eqn.params["permutation"])
    return [_moved(val, permutation.index(val.kind.dim), _outer(val))]


def squeeze(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    val = vals[0]
    if not val.along_batch:
        return [val]
    removed = eqn.params["dimensions"]
    if val.kind.dim in removed:
        raise Mixes(eqn, "drops the dimension of the examples")
    return [_moved(val, val.kind.dim - sum(d < val.kind.dim for d in removed), _outer(val))]


def concatenate(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    kind = join_batched(eqn, vals)
    if kind is None:
        return [WHOLE]
    axis, rank = eqn.params["dimension"], len(eqn.outvars[0].aval.shape)
    if kind.dim == axis:
        raise Mixes(eqn, "joins along the batch")
    single = axis == rank - 1 and all(a.aval.shape[-1] == 1 for a in eqn.invars)
    zero = 0 if all(v.zero for v in vals) else None
    return [Val(kind, const=zero, columns=tuple(vals) if single else None)]


def stack(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Joined along a new dimension."""
    del ctx
    kind = join_batched(eqn, vals)
    assert kind is not None
    zero = 0 if all(v.zero for v in vals) else None
    return [Val(Batched(kind.dim + (eqn.params["axis"] <= kind.dim), kind.outer), const=zero)]


def unstack(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """The slices along one dimension, without it."""
    del ctx
    val = vals[0]
    axis = eqn.params["axis"]
    if val.kind.dim == axis:
        raise Mixes(eqn, "takes the examples apart")
    moved = _moved(val, val.kind.dim - (axis < val.kind.dim), _outer(val))
    return [moved for _ in eqn.outvars]


def tile(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Whole copies one after the other: along the batch, each is one more outer repetition."""
    val = vals[0]
    reps = eqn.params["reps"][val.kind.dim]
    if reps == 1:
        return [Val(val.kind, val.factors, val.const)]
    outer = _outer(val)
    return [Val(Batched(val.kind.dim, None if outer is None else outer * reps), val.factors)]


def slice_(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    val = vals[0]
    if not val.along_batch:
        return [val]
    d, params = val.kind.dim, eqn.params
    size = eqn.invars[0].aval.shape[d]
    strides = params["strides"]
    whole = params["start_indices"][d] == 0 and params["limit_indices"][d] == size
    if not whole or (strides is not None and strides[d] != 1):
        raise Mixes(eqn, "takes some of the examples")
    return [Val(val.kind, val.factors, val.const)]


def split(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    val = vals[0]
    if val.along_batch and val.kind.dim == eqn.params["axis"]:
        raise Mixes(eqn, "splits the batch")
    return [Val(val.kind, val.factors, val.const) for _ in eqn.outvars]


def dynamic_slice(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    _require_whole(eqn, vals[1:], "its start")
    val = vals[0]
    if val.along_batch:
        d = val.kind.dim
        if eqn.params["slice_sizes"][d] != eqn.invars[0].aval.shape[d]:
            raise Mixes(eqn, "takes some of the examples")
    return [Val(val.kind, val.factors, val.const)]


def dynamic_update_slice(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    _require_whole(eqn, vals[2:], "its start")
    kind = join_batched(eqn, vals[:2])
    assert kind is not None
    sizes = [a.aval.shape[kind.dim] for a in eqn.invars[:2]]
    if not all(v.along_batch for v in vals[:2]) or sizes[0] != sizes[1]:
        raise Mixes(eqn, "overwrites some of the examples")
    return [Val(kind)]


def pad(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    val = vals[0]
    if val.along_batch and tuple(eqn.params["padding_config"][val.kind.dim]) != (0, 0, 0):
        raise Mixes(eqn, "pads the batch")
    zero = 0 if val.zero and vals[1].zero else None
    return [
        Val(
            val.kind if not isinstance(val.kind, Position) else Batched(val.kind.dim, 1), const=zero
        )
    ]


def rev(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    val = vals[0]
    if val.along_batch and val.kind.dim in eqn.params["dimensions"]:
        raise Mixes(eqn, "reverses the batch")
    return [Val(val.kind, val.factors, val.const)]


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "concatenate": concatenate,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
    "slice": slice_,
    "split": split,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "pad": pad,
    "rev": rev,
}
