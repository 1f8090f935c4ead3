"""gather and scatter: tables read by the batch, and indices that count examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetpass._jax import JaxprEqn
from hetpass.frontend.rules.values import (
    Context,
    Mixes,
    Rebase,
    Rule,
    Val,
    is_partial,
    join_batched,
)
from hetpass.ir.kinds import Batched, Partial, Position

ADDS = frozenset({"scatter-add", "scatter_add"})
"""Spellings of the scatter that adds: it may add the batch onto a partial table."""


def _layout(eqn: JaxprEqn, *vals: Val) -> int | None:
    """The common `outer`, whatever the dimensions."""
    flat = [Val(Batched(0, getattr(v.kind, "outer", 1))) for v in vals]
    joined = join_batched(eqn, flat)
    assert joined is not None
    return joined.outer


def _position_columns(
    eqn: JaxprEqn, indices: Val, index_map: Sequence[int], dim: int, ctx: Context
) -> tuple[int, ...]:
    """The index column that runs over operand dimension `dim`, if it counts examples exactly."""
    column = list(index_map).index(dim)
    if isinstance(indices.kind, Position) and len(index_map) == 1:
        columns: Sequence[Val] = (indices,)
    else:
        columns = indices.columns or ()
    size = eqn.invars[0].aval.shape[dim]
    if column < len(columns) and size == ctx.batch_size:
        kind = columns[column].kind
        last = len(eqn.invars[1].aval.shape) - 1
        if isinstance(kind, Position) and kind.plus == 0 and kind.dim < last:
            return (column,)
    raise Mixes(eqn, "looks up examples of the batch by an index that is not their own position")


def gather(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    operand, indices = vals
    numbers = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    out_rank = len(eqn.outvars[0].aval.shape)
    out_batch = [d for d in range(out_rank) if d not in numbers.offset_dims]
    if indices.along_batch and indices.kind.dim >= len(eqn.invars[1].aval.shape) - 1:
        raise Mixes(eqn, "reads index vectors along the batch")
    if not operand.along_batch:
        return [Val(Batched(out_batch[indices.kind.dim], getattr(indices.kind, "outer", 1)))]
    d = operand.kind.dim
    batching = tuple(numbers.operand_batching_dims)
    if d in batching:
        _require_same_place(eqn, indices, numbers.start_indices_batching_dims[batching.index(d)])
        return [Val(Batched(out_batch[indices.kind.dim], _layout(eqn, operand, indices)))]
    if d in numbers.start_index_map and eqn.params["slice_sizes"][d] == 1 and indices.along_batch:
        columns = _position_columns(eqn, indices, numbers.start_index_map, d, ctx)
        outer = _layout(eqn, operand, indices)
        ctx.actions[id(eqn)] = Rebase(1, columns)
        return [Val(Batched(out_batch[indices.kind.dim], outer))]
    taken_whole = eqn.params["slice_sizes"][d] == shape[d] and d not in numbers.start_index_map
    if indices.along_batch or not taken_whole or d in numbers.collapsed_slice_dims:
        raise Mixes(eqn, "looks up examples of the batch by index")
    windows = [
        k for k in range(len(shape)) if k not in numbers.collapsed_slice_dims and k not in batching
    ]
    kind = operand.kind
    return [Val(Batched(numbers.offset_dims[windows.index(d)], getattr(kind, "outer", 1)))]


def _require_same_place(eqn: JaxprEqn, indices: Val, dim: int) -> None:
    if not indices.along_batch or indices.kind.dim != dim:
        raise Mixes(eqn, "pairs tables of the batch with indices that are free of it")


def scatter(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    operand, indices, updates = vals
    numbers = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    rank = len(eqn.invars[2].aval.shape)
    scatter_dims = [d for d in range(rank) if d not in numbers.update_window_dims]
    if indices.along_batch and indices.kind.dim >= len(eqn.invars[1].aval.shape) - 1:
        raise Mixes(eqn, "writes index vectors along the batch")
    if not operand.along_batch:
        return [_onto_table(eqn, operand, indices, updates, scatter_dims)]
    d = operand.kind.dim
    batching = tuple(numbers.operand_batching_dims)
    index_map = numbers.scatter_dims_to_operand_dims
    if not updates.along_batch:
        raise Mixes(eqn, "writes one value into every example by index")
    if d in batching:
        _require_same_place(eqn, indices, numbers.scatter_indices_batching_dims[batching.index(d)])
        _require_updates(eqn, updates, scatter_dims[indices.kind.dim])
        return [Val(Batched(d, _layout(eqn, operand, indices, updates)))]
    if d in index_map and indices.along_batch:
        columns = _position_columns(eqn, indices, index_map, d, ctx)
        _require_updates(eqn, updates, scatter_dims[indices.kind.dim])
        outer = _layout(eqn, operand, indices, updates)
        ctx.actions[id(eqn)] = Rebase(1, columns)
        return [Val(Batched(d, outer))]
    windows = [
        k for k in range(len(shape)) if k not in numbers.inserted_window_dims and k not in batching
    ]
    if indices.along_batch or d not in windows or d in index_map:
        raise Mixes(eqn, "writes into examples of the batch by index")
    _require_updates(eqn, updates, numbers.update_window_dims[windows.index(d)])
    if eqn.invars[2].aval.shape[updates.kind.dim] != shape[d]:
        raise Mixes(eqn, "writes into some of the examples")
    return [Val(Batched(d, _layout(eqn, operand, updates)))]


def _require_updates(eqn: JaxprEqn, updates: Val, dim: int) -> None:
    if updates.kind.dim != dim:
        raise Mixes(eqn, "pairs rows of the batch with updates of other rows")


def _onto_table(
    eqn: JaxprEqn, operand: Val, indices: Val, updates: Val, scatter_dims: Sequence[Any]
) -> Val:
    """Rows of the batch added into a table: a part of the sum, if the table starts at zero."""
    adds = eqn.primitive.name in ADDS
    if not indices.along_batch or not updates.along_batch:
        raise Mixes(eqn, "writes rows of the batch by indices that are free of it")
    _require_updates(eqn, updates, scatter_dims[indices.kind.dim])
    _layout(eqn, indices, updates)
    if not adds:
        raise Mixes(eqn, "lets examples overwrite one another")
    if not operand.zero and not is_partial(operand):
        raise Mixes(eqn, "adds the batch onto a value that is free of it", "start")
    return Val(Partial("sum"))


RULES: dict[str, Rule] = {
    "gather": gather,
    **dict.fromkeys(
        "scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min "
        "scatter-max scatter_max scatter-sub scatter_sub".split(),
        scatter,
    ),
}
