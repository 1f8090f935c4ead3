"""Equations with partial results, split over the devices of a data axis.

On a mesh whose `data` axis has D devices, a batched value of b examples is cut along the batch. A
value that sums (or maxes, …) over examples then exists in D parts. Left to the compiler it would
be all-reduced at once, in every microbatch. Instead the equation is *split*: batched operands are
reshaped to [D, …, b / D, …], the equation runs under `vmap` over D, and its partial results keep
the leading D, one part per device. The parts are combined once per step, where the epilogue reads
the accumulator. Only these equations change; all others are left to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from hetpass._jax import DropVar, Jaxpr, JaxprEqn, Literal, Var, bind_equation
from hetpass.backend.combine import only_first, reduce_leading
from hetpass.backend.layout import batch_layout, join_batch, split_batch
from hetpass.backend.narrow import narrowed
from hetpass.ir.kinds import Kind, Partial

DATA_AXIS = "data"


@dataclass(frozen=True)
class DataSplit:
    """How many parts a stage's data axis makes, and the mesh that holds them.

    Attributes:
      parts: D; 1 means that nothing is split.
      mesh: the axes of the stage's mesh, without devices, so that equal meshes lower equally.
    """

    parts: int
    mesh: AbstractMesh

    def spread(self, value: Any) -> Any:
        """[D, …] with one part per device of the data axis; other dimensions as they come."""
        free = (PartitionSpec.UNCONSTRAINED,) * (value.ndim - 1)
        spec = PartitionSpec(DATA_AXIS, *free)
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))


def evaluate(
    jaxpr: Jaxpr,
    arguments: Sequence[Any],
    kinds: Mapping[Var, Kind],
    split: DataSplit,
    offsets: Sequence[Var] = (),
) -> list[Any]:
    """The jaxpr's results; values of a Partial variable have a leading D where D > 1.

    Args:
      jaxpr: open, without constants.
      arguments: one per invar; a Partial invar comes with its leading D.
      kinds: of the variables; one that is absent counts as whole.
      split: the data axis; parts = 1 evaluates the jaxpr as it is.
      offsets: the invars that hold m * b. A split equation must not read them, nor scalars made
        of them: its parts begin at other examples.
    """
    values: dict[Var, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
    tainted = set(offsets)
    last_reads = _last_reads(jaxpr)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for position, eqn in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in eqn.invars]
        reads_offset = any(not isinstance(a, Literal) and a in tainted for a in eqn.invars)
        if split.parts == 1:
            results = bind_equation(eqn, operands)
        else:
            results = _evaluate_split(eqn, operands, kinds, split, reads_offset)
        if reads_offset:
            tainted.update(v for v in eqn.outvars if not _has_parts(_kind(kinds, v)))
        values.update(
            (v, r) for v, r in zip(eqn.outvars, results, strict=True) if not isinstance(v, DropVar)
        )
        for var in last_reads.get(position, ()):
            del values[var]
    return [
        jnp.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else values[a]
        for a in jaxpr.outvars
    ]


def _last_reads(jaxpr: Jaxpr) -> dict[int, list[Var]]:
    """Per equation, the variables that no later equation and no result reads."""
    last: dict[Var, int] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        last.update((a, position) for a in eqn.invars if not isinstance(a, Literal))
    kept = {a for a in jaxpr.outvars if not isinstance(a, Literal)}
    by_position: dict[int, list[Var]] = {}
    for var, position in last.items():
        if var not in kept:
            by_position.setdefault(position, []).append(var)
    return by_position


def _kind(kinds: Mapping[Var, Kind], atom: Any) -> Kind | None:
    return None if isinstance(atom, (Literal, DropVar)) else kinds.get(atom)


def _evaluate_split(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    kinds: Mapping[Var, Kind],
    split: DataSplit,
    reads_offset: bool,
) -> list[Any]:
    operand_kinds = [_kind(kinds, atom) for atom in eqn.invars]
    result_kinds = [_kind(kinds, var) for var in eqn.outvars]
    makes_partial = any(isinstance(kind, Partial) for kind in result_kinds)
    if makes_partial and any(map(_has_parts, operand_kinds)):
        part = None if reads_offset else narrowed(eqn, operand_kinds, split.parts)
        if part is not None:
            return _in_parts(part, operands, operand_kinds, result_kinds, split)
    return _at_once(eqn, operands, operand_kinds, result_kinds, split)


def _has_parts(kind: Kind | None) -> bool:
    return isinstance(kind, Partial) or (kind is not None and batch_layout(kind) is not None)


def _in_parts(
    part: Callable[..., list[Any]],
    operands: Sequence[Any],
    operand_kinds: Sequence[Kind | None],
    result_kinds: Sequence[Kind | None],
    split: DataSplit,
) -> list[Any]:
    cut, axes = [], []
    for operand, kind in zip(operands, operand_kinds, strict=True):
        layout = batch_layout(kind) if kind is not None else None
        if layout is not None:
            operand = split.spread(split_batch(operand, *layout, split.parts))
        cut.append(operand)
        axes.append(0 if _has_parts(kind) else None)
    results = jax.vmap(lambda *values: tuple(part(*values)), in_axes=tuple(axes))(*cut)
    return [_merge(r, k, split) for r, k in zip(results, result_kinds, strict=True)]


def _merge(result: Any, kind: Kind | None, split: DataSplit) -> Any:
    if isinstance(kind, Partial):
        return split.spread(result)
    layout = batch_layout(kind) if kind is not None else None
    if layout is not None:
        return join_batch(result, *layout)
    return result[0]  # whole: the same in every part


def _at_once(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_kinds: Sequence[Kind | None],
    result_kinds: Sequence[Kind | None],
    split: DataSplit,
) -> list[Any]:
    """The equation on combined operands; a partial result is whole here, so part 0 holds it.

    Exact for any equation: a partial result is linear in (or commutes with the combination of) its
    partial operands. It costs a reduction per microbatch, so it is the way out, not the way.
    """
    whole = [
        reduce_leading(kind.op, operand) if isinstance(kind, Partial) else operand
        for operand, kind in zip(operands, operand_kinds, strict=True)
    ]
    results = bind_equation(eqn, whole)
    return [
        split.spread(only_first(kind.op, result, split.parts))
        if isinstance(kind, Partial)
        else result
        for result, kind in zip(results, result_kinds, strict=True)
    ]
