"""Equations that reduce, order or contract: along the batch they give parts of a sum, or mix."""

from __future__ import annotations

from collections.abc import Sequence

from hetpass._jax import JaxprEqn
from hetpass.frontend.rules.elementwise import counts_in
from hetpass.frontend.rules.values import WHOLE, Context, Draw, Mixes, Rule, Val, join_batched
from hetpass.ir.kinds import Batched, CombineOp, Partial, Position

_REDUCERS: dict[str, CombineOp] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_or": "or",
    "reduce_and": "and",
}


def _batch(eqn: JaxprEqn, vals: Sequence[Val]) -> Batched:
    kind = join_batched(eqn, vals)
    assert kind is not None
    return kind


def _without(kind: Batched, axes: Sequence[int]) -> Batched:
    return Batched(kind.dim - sum(a < kind.dim for a in axes), kind.outer)


def reduce_known(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """A reduction whose operator combines over microbatches."""
    del ctx
    kind, axes = _batch(eqn, vals), eqn.params["axes"]
    if kind.dim in axes:
        zero = 0 if vals[0].zero and eqn.primitive.name == "reduce_sum" else None
        return [Val(Partial(_REDUCERS[eqn.primitive.name]), const=zero)]
    zero = 0 if vals[0].zero and eqn.primitive.name == "reduce_sum" else None
    return [Val(_without(kind, axes), const=zero)]


def reduce_other(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """argmax, xor, a user's own operator: must keep off the batch."""
    del ctx
    kind = _batch(eqn, vals)
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    if kind.dim in axes:
        raise Mixes(eqn, "reduces over the batch in a way that has no sum of parts")
    return [Val(_without(kind, axes)) for _ in eqn.outvars]


def along_axis(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """cumsum, sort, top_k: must keep off the batch."""
    del ctx
    kind = _batch(eqn, vals)
    rank = len(eqn.invars[0].aval.shape)
    params = eqn.params
    axis = params.get("axis", params.get("dimension", rank - 1))
    if kind.dim == (rank - 1 if axis is None else axis % rank):
        raise Mixes(eqn, "works along the batch")
    return [Val(kind) for _ in eqn.outvars]


def window(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Pooling: the window must be 1 along the batch."""
    del ctx
    kind, params = _batch(eqn, vals), eqn.params
    d = kind.dim
    plain = params["window_dimensions"][d] == 1 and params["window_strides"][d] == 1
    plain = plain and tuple(params["padding"][d]) == (0, 0)
    for name in ("base_dilation", "window_dilation"):
        plain = plain and (params.get(name) is None or params[name][d] == 1)
    if not plain:
        raise Mixes(eqn, "slides a window along the batch")
    return [Val(kind) for _ in eqn.outvars]


def fft(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    del ctx
    kind = _batch(eqn, vals)
    if kind.dim >= len(eqn.invars[0].aval.shape) - len(eqn.params["fft_lengths"]):
        raise Mixes(eqn, "transforms along the batch")
    return [Val(kind)]


def dot_general(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Batch dimension: example by example. Contracted on both sides: parts of a sum."""
    del ctx
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    contract = (tuple(lhs_contract), tuple(rhs_contract))
    batch = (tuple(lhs_batch), tuple(rhs_batch))
    sides = [v.kind if v.along_batch else None for v in vals]
    if all(sides):
        dims = [k.dim for k in sides]  # type: ignore[union-attr]
        outer = join_batched(
            eqn, [Val(Batched(0, k.outer if isinstance(k, Batched) else 1)) for k in sides]
        )
        assert outer is not None
        for group, result in ((batch, "batched"), (contract, "partial")):
            if dims[0] in group[0] and group[1][group[0].index(dims[0])] == dims[1]:
                if result == "partial":
                    return [Val(Partial("sum"))]
                return [Val(Batched(group[0].index(dims[0]), outer.outer))]
        raise Mixes(eqn, "pairs every example with every other")
    side = 0 if sides[0] is not None else 1
    kind = _batch(eqn, vals)
    if kind.dim in contract[side] or kind.dim in batch[side]:
        raise Mixes(eqn, "contracts the batch with a value that is free of it")
    free = [
        d
        for d in range(len(eqn.invars[side].aval.shape))
        if d not in contract[side] and d not in batch[side]
    ]
    ahead = len(batch[0])
    if side == 1:
        ahead += len(eqn.invars[0].aval.shape) - len(contract[0]) - len(batch[0])
    return [Val(Batched(ahead + free.index(kind.dim), kind.outer))]


def conv(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Batch as images: example by example. Batch as features on both sides: a weight gradient."""
    del ctx
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs = vals[0], vals[1]
    groups = eqn.params["feature_group_count"]
    if lhs.along_batch and rhs.along_batch:
        kind = [v.kind.dim for v in (lhs, rhs)]
        join_batched(eqn, [Val(Batched(0, getattr(v.kind, "outer", 1))) for v in (lhs, rhs)])
        if kind == [numbers.lhs_spec[1], numbers.rhs_spec[1]] and groups == 1:
            return [Val(Partial("sum"))]
        raise Mixes(eqn, "convolves over the batch")
    layout = _batch(eqn, vals)
    if lhs.along_batch and layout.dim == numbers.lhs_spec[0]:
        if eqn.params["batch_group_count"] == 1:
            return [Val(Batched(numbers.out_spec[0], layout.outer))]
    if rhs.along_batch and layout.dim == numbers.rhs_spec[0] and groups == 1:
        if eqn.params["batch_group_count"] == 1:
            return [Val(Batched(numbers.out_spec[1], layout.outer))]
    raise Mixes(eqn, "convolves over the batch")


def iota(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Positions along the batch, or equal rows."""
    del vals
    out = eqn.outvars[0]
    dims = ctx.batch_dims(out)
    if not dims:
        return [WHOLE]
    if len(dims) > 1:
        raise Mixes(eqn, "makes two dimensions that grow with the batch")
    (dim,) = dims
    if eqn.params["dimension"] != dim:
        return [Val(Batched(dim, None))]
    ctx.actions[id(eqn)] = Draw(Batched(dim, 1))
    exact = out.aval.shape[dim] == ctx.batch_size and counts_in(out, dim)
    return [Val(Position(dim) if exact else Batched(dim, 1))]


def random_draw(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    """Random numbers with a batch dimension: the full draw, sliced."""
    dims = ctx.batch_dims(eqn.outvars[0])
    key = eqn.invars[0].aval.dtype
    if dims is None or len(dims) != 1:
        raise Mixes(eqn, "draws an array with two dimensions that grow with the batch")
    if "fry" not in str(key):
        raise Mixes(eqn, f"draws from {key} keys, whose numbers depend on the shape drawn")
    del vals
    kind = Batched(dims[0], 1)
    ctx.actions[id(eqn)] = Draw(kind)
    return [Val(kind)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCERS, reduce_known),
    **dict.fromkeys("argmax argmin reduce_xor reduce".split(), reduce_other),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp sort top_k".split(), along_axis),
    **dict.fromkeys(
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min "
        "select_and_scatter_add select_and_gather_add".split(),
        window,
    ),
    "fft": fft,
    "dot_general": dot_general,
    "conv_general_dilated": conv,
}

PRODUCERS: dict[str, Rule] = {
    "iota": iota,
    "random_bits": random_draw,
    "random_split": random_draw,
}
"""Rules for equations that make a batch dimension from whole operands."""
