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

from hetpass._jax import (
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    is_jaxpr,
    open_jaxpr,
)
from hetpass.analysis.sharding_rules import REPLACING_SCATTERS
from hetpass.backend.combine import only_first, reduce_leading
from hetpass.backend.layout import batch_layout, join_batch, split_batch
from hetpass.backend.narrow import Part, has_parts, narrowed
from hetpass.backend.pads import bind
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
        if split.mesh.size > split.parts and _is_mistaken(eqn, roles):
            results = _everywhere(lambda *v, eqn=eqn: bind(eqn, v), split)(operands)
        elif split.parts == 1:
            results = bind(eqn, operands)
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


def _is_mistaken(eqn: JaxprEqn, roles: Mapping[Var, Kind | _Offset]) -> bool:
    """Whether it cannot be left to the partitioner: what is scattered into a dimension that an axis
    other than `data` cuts comes out wrong, unless it is added (jaxlib 0.10 to 0.12, CPU)."""
    if any(isinstance(_role(roles, a), (Partial, _Offset)) for a in (*eqn.invars, *eqn.outvars)):
        return False
    return _holds(eqn, REPLACING_SCATTERS)


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
            run = _mapped if _holds_convolution(eqn) else _vectorized
            return _in_parts(run(part, split), operands, operand_roles, result_roles, split)
    return _at_once(eqn, operands, operand_roles, result_roles, split)


Runner = Callable[[Sequence[Any], Sequence[bool]], Sequence[Any]]
"""From operands, and which of them have a leading D, to results with a leading D."""


def _vectorized(part: Part, split: DataSplit) -> Runner:
    """All parts as one batched operation, which the compiler cuts along D."""

    def run(operands: Sequence[Any], in_parts: Sequence[bool]) -> Sequence[Any]:
        axes = tuple(0 if cut else None for cut in in_parts)
        return jax.vmap(lambda *values: tuple(part(*values)), in_axes=axes)(*operands)

    return run


def _mapped(part: Part, split: DataSplit) -> Runner:
    """Each device runs its part as it is; devices along other mesh axes run the same one.

    For convolutions: batching their two operands makes a grouped convolution. XLA's partitioner
    (jaxlib 0.10 to 0.12, CPU) gathers it, gets it wrong where a part has one example or the mesh
    has two axes, or ends the process on a failed check. So it is kept out.
    """

    def run(operands: Sequence[Any], in_parts: Sequence[bool]) -> Sequence[Any]:
        def one(*values: Any) -> tuple[Any, ...]:
            mine = [v[0] if cut else v for v, cut in zip(values, in_parts, strict=True)]
            return tuple(jnp.expand_dims(result, 0) for result in part(*mine))

        along, whole = PartitionSpec(DATA_AXIS), PartitionSpec()
        return jax.shard_map(
            one,
            mesh=split.mesh,
            in_specs=tuple(along if cut else whole for cut in in_parts),
            out_specs=along,
            axis_names=set(split.mesh.axis_names),
            check_vma=False,
        )(*operands)

    return run


def _everywhere(part: Part, split: DataSplit) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Every device runs the whole, for the reason given at `_mapped`."""
    whole = PartitionSpec()

    def run(operands: Sequence[Any]) -> Sequence[Any]:
        return jax.shard_map(
            lambda *values: tuple(part(*values)),
            mesh=split.mesh,
            in_specs=(whole,) * len(operands),
            out_specs=whole,
            check_vma=False,
        )(*operands)

    return run


def _holds_convolution(eqn: JaxprEqn) -> bool:
    return _holds(eqn, ("conv_general_dilated",))


def _holds(eqn: JaxprEqn, names: Sequence[str]) -> bool:
    """Whether it is one of these primitives, or has one inside."""
    if eqn.primitive.name in names:
        return True
    values = (v for p in eqn.params.values() for v in (p if isinstance(p, tuple) else (p,)))
    jaxprs = (open_jaxpr(value)[0] for value in values if is_jaxpr(value))
    return any(_holds(inner, names) for jaxpr in jaxprs for inner in jaxpr.eqns)


def _in_parts(
    run: Runner,
    operands: Sequence[Any],
    operand_roles: Sequence[_Role],
    result_roles: Sequence[_Role],
    split: DataSplit,
) -> list[Any]:
    cut, in_parts = [], []
    for operand, role in zip(operands, operand_roles, strict=True):
        layout = batch_layout(role)
        if layout is not None:
            operand = split.spread(split_batch(operand, *layout, split.parts))
        elif isinstance(role, _Offset):
            operand = split.starts(operand)
        cut.append(operand)
        in_parts.append(has_parts(role) or isinstance(role, _Offset))
    results = run(cut, in_parts)
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
    if makes_partial and _holds_convolution(eqn):
        results = _everywhere(lambda *values: bind(eqn, values), split)(whole)
    else:
        results = bind(eqn, whole)
    return [
        split.spread(only_first(role.op, result, split.parts))
        if isinstance(role, Partial)
        else result
        for result, role in zip(results, result_roles, strict=True)
    ]
