"""Equations with partial results, split over the devices of a data axis.

On a mesh whose `data` axis has D devices, a batched value of b examples is cut along the batch. A
value that sums (or maxes, …) over examples then exists in D parts. Left to the compiler it would
be all-reduced at once, in every microbatch. Instead the equation is *split*: batched operands are
reshaped to [D, …, b / D, …], the equation runs under `vmap` over D, and its partial results keep
the leading D, one part per device. The parts are combined once per step, where the epilogue reads
the accumulator. Only these equations change; all others are left to the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from hetpass._jax import DropVar, Jaxpr, JaxprEqn, Literal, Var
from hetpass.backend.combine import only_first, reduce_leading
from hetpass.backend.layout import batch_layout, join_batch, split_batch
from hetpass.backend.narrow import Part, has_parts, narrowed
from hetpass.backend.rewritten import bind
from hetpass.backend.unpartitioned import (
    Function,
    bind_whole,
    each_its_part,
    everywhere,
    wrong_when_batched,
)
from hetpass.ir.kinds import Kind, Partial

DATA_AXIS = "data"


@dataclass(frozen=True)
class DataSplit:
    """How many parts a stage's data axis makes, and the mesh that holds them.

    Attributes:
      parts: D; 1 means that nothing is split.
      examples: b, in a microbatch; D divides it.
      mesh: the axes of the stage's mesh, without devices, so that equal meshes lower equally.
    """

    parts: int
    examples: int
    mesh: AbstractMesh

    def starts(self, offset: Any) -> Any:
        """[D]: the full-batch index of each part's first example."""
        steps = jnp.arange(self.parts, dtype=offset.dtype) * (self.examples // self.parts)
        return offset + steps

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
      offsets: the invars that hold m * b. The parts of a split equation begin at other examples:
        each gets its own offset. One that reads a scalar computed from m * b is not split.
    """
    values: dict[Var, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
    roles: dict[Var, Kind | _Offset] = {**kinds, **dict.fromkeys(offsets, _Offset(direct=True))}
    last_reads = _last_reads(jaxpr)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for position, eqn in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in eqn.invars]
        if split.parts == 1:
            results = _bound(eqn, operands, split)
        else:
            results = _evaluate_split(eqn, operands, roles, kinds, split)
            if any(isinstance(_role(roles, atom), _Offset) for atom in eqn.invars):
                scalars = (v for v in eqn.outvars if not has_parts(_role(roles, v)))
                roles.update(dict.fromkeys(scalars, _Offset(direct=False)))
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


@dataclass(frozen=True)
class _Offset:
    """The value is m * b (direct), or was computed from it without a batch dimension."""

    direct: bool


_Role = Kind | _Offset | None


def _role(roles: Mapping[Var, Kind | _Offset], atom: Any) -> _Role:
    return None if isinstance(atom, (Literal, DropVar)) else roles.get(atom)


def _evaluate_split(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    roles: Mapping[Var, Kind | _Offset],
    kinds: Mapping[Var, Kind],
    split: DataSplit,
) -> list[Any]:
    operand_roles = [_role(roles, atom) for atom in eqn.invars]
    result_roles = [_role(roles, var) for var in eqn.outvars]
    makes_partial = any(isinstance(role, Partial) for role in result_roles)
    indirect = any(isinstance(role, _Offset) and not role.direct for role in operand_roles)
    if makes_partial and any(map(has_parts, operand_roles)) and not indirect:
        part = narrowed(eqn, kinds, split.parts)
        if part is not None:
            return _in_parts(part, eqn, operands, (operand_roles, result_roles), split)
    return _at_once(eqn, operands, operand_roles, result_roles, split)


def _bound(eqn: JaxprEqn, operands: Sequence[Any], split: DataSplit) -> list[Any]:
    """The equation's results; examples alone may be cut as the partitioner likes."""
    only_data = split.mesh.size == split.parts
    return bind(eqn, operands) if only_data else bind_whole(eqn, operands, split.mesh)


def _runner(part: Part, eqn: JaxprEqn, in_parts: Sequence[bool], split: DataSplit) -> Function:
    """From operands, some with a leading D, to results with a leading D."""
    if wrong_when_batched(eqn, split.mesh):
        return each_its_part(part, split.mesh, DATA_AXIS, in_parts)
    axes = tuple(0 if cut else None for cut in in_parts)
    return jax.vmap(lambda *values: tuple(part(*values)), in_axes=axes)


def _in_parts(
    part: Part,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    roles: tuple[Sequence[_Role], Sequence[_Role]],
    split: DataSplit,
) -> list[Any]:
    operand_roles, result_roles = roles
    cut, in_parts = [], []
    for operand, role in zip(operands, operand_roles, strict=True):
        layout = batch_layout(role)
        if layout is not None:
            operand = split.spread(split_batch(operand, *layout, split.parts))
        elif isinstance(role, _Offset):
            operand = split.starts(operand)
        cut.append(operand)
        in_parts.append(has_parts(role) or isinstance(role, _Offset))
    results = _runner(part, eqn, in_parts, split)(*cut)
    return [_merge(r, k, split) for r, k in zip(results, result_roles, strict=True)]


def _merge(result: Any, role: _Role, split: DataSplit) -> Any:
    if isinstance(role, Partial):
        return split.spread(result)
    layout = batch_layout(role)
    if layout is not None:
        return join_batch(result, *layout)
    return result[0]  # whole: the same in every part


def _at_once(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_roles: Sequence[_Role],
    result_roles: Sequence[_Role],
    split: DataSplit,
) -> list[Any]:
    """The equation on combined operands; a partial result is whole here, so part 0 holds it.

    Exact for any equation: a partial result is linear in (or commutes with the combination of) its
    partial operands. It costs a reduction per microbatch, so it is the way out, not the way.
    """
    whole = [
        reduce_leading(role.op, operand) if isinstance(role, Partial) else operand
        for operand, role in zip(operands, operand_roles, strict=True)
    ]
    makes_partial = any(isinstance(role, Partial) for role in result_roles)
    if makes_partial and wrong_when_batched(eqn, split.mesh):
        results = everywhere(lambda *values: bind(eqn, values), split.mesh)(*whole)
    else:
        results = _bound(eqn, whole, split)
    return [
        split.spread(only_first(role.op, result, split.parts))
        if isinstance(role, Partial)
        else result
        for result, role in zip(results, result_roles, strict=True)
    ]
