"""An equation for 1 / D of the examples: what runs in one part of a split equation.

Most equations take their sizes from their operands, so the same equation serves any number of
examples. Equations that hold jaxprs (`scan`, `cond`, `while`) do not: their bodies are typed, so
they are rebuilt with the batch of every batched value divided by D.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from hetpass._jax import (
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    close,
    is_jaxpr,
    make_eqn,
    make_jaxpr_value,
    make_var,
    open_jaxpr,
    scan_counts,
)
from hetpass.backend.layout import batch_layout
from hetpass.backend.rewritten import bind
from hetpass.ir.kinds import Kind, Partial, Whole

Part = Callable[..., list[Any]]
Kinds = Mapping[Var, Kind]


class _Unknown(Exception):
    """The sizes of a part do not follow from what is known."""


def narrowed(eqn: JaxprEqn, kinds: Kinds, parts: int) -> Part | None:
    """A function from the operands of one part to its results; None if none is known.

    Args:
      eqn: an equation of the microbatch program, with a partial result.
      kinds: of its variables, also inside its jaxprs. An operand or result that is absent counts
        as whole; where a kind is missing inside, nothing is known.
      parts: D.
    """
    missing = (v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal))
    kinds = ChainMap({v: Whole() for v in missing if v not in kinds}, kinds)  # type: ignore[arg-type]
    try:
        narrow = _narrowed(eqn, eqn.invars, eqn.outvars, kinds, parts)
    except _Unknown:
        return None

    def part(*operands: Any) -> list[Any]:
        return bind(narrow, operands)

    return part if narrow is eqn or _fits(part, eqn, kinds, parts) else None


def _fits(part: Part, eqn: JaxprEqn, kinds: Kinds, parts: int) -> bool:
    """Whether the part accepts its operands and gives results of the expected shapes."""
    operands = [
        jax.ShapeDtypeStruct(_shape(atom, kinds, parts), atom.aval.dtype) for atom in eqn.invars
    ]
    try:
        results = jax.eval_shape(part, *operands)
        return all(
            isinstance(var, DropVar) or result.shape == _shape(var, kinds, parts)
            for var, result in zip(eqn.outvars, results, strict=True)
        )
    except (TypeError, ValueError, _Unknown):  # JAX's own complaints about shapes
        return False


def _shape(atom: Any, kinds: Kinds, parts: int) -> tuple[int, ...]:
    """The shape in one part, without the leading dimension of parts."""
    shape = tuple(getattr(atom.aval, "shape", ()))
    if isinstance(atom, (Literal, DropVar)):
        return shape
    if atom not in kinds:
        raise _Unknown
    layout = batch_layout(kinds[atom])
    if layout is None:
        return shape
    dim, outer = layout
    if shape[dim] % (outer * parts):
        raise _Unknown
    return (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])


def _narrowed(
    eqn: JaxprEqn, invars: Sequence[Any], outvars: Sequence[Var], kinds: Kinds, parts: int
) -> JaxprEqn:
    """The equation between other variables, with its sizes divided; itself if it has none."""
    holds_typed_jaxpr = any(
        name in ("jaxpr", "branches", "cond_jaxpr", "body_jaxpr") and _holds_jaxpr(value)
        for name, value in eqn.params.items()
    )
    sized = eqn.primitive.name in _SIZES
    if not holds_typed_jaxpr and not sized and invars is eqn.invars:
        return eqn
    params = dict(eqn.params)
    if sized:
        params.update(_SIZES[eqn.primitive.name](eqn, kinds, parts))
    elif holds_typed_jaxpr:
        params = {name: _nested(value, kinds, parts) for name, value in params.items()}
        if eqn.primitive.name == "scan" and _scans_examples(eqn, kinds):
            params["length"] //= parts
    return make_eqn(eqn, invars, outvars, params)


def _holds_jaxpr(value: Any) -> bool:
    return any(map(is_jaxpr, value)) if isinstance(value, tuple) else is_jaxpr(value)


def _nested(value: Any, kinds: Kinds, parts: int) -> Any:
    if isinstance(value, tuple) and any(map(is_jaxpr, value)):
        return tuple(_nested(item, kinds, parts) for item in value)
    if not is_jaxpr(value):
        return value
    jaxpr, consts = open_jaxpr(value)
    if _is_scalar_code(jaxpr):
        return value
    new: dict[Var, Var] = {}

    def renew(variables: Sequence[Var]) -> list[Var]:
        for var in variables:
            new[var] = make_var(var.aval.update(shape=_shape(var, kinds, parts)))
        return [new[var] for var in variables]

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else new[atom]

    constvars, invars = renew(jaxpr.constvars), renew(jaxpr.invars)
    eqns = []
    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        eqns.append(_narrowed(eqn, operands, renew(eqn.outvars), kinds, parts))
    outvars = [read(atom) for atom in jaxpr.outvars]
    return close(make_jaxpr_value(invars, outvars, eqns, constvars), consts)


def _is_scalar_code(jaxpr: Jaxpr) -> bool:
    """What `reduce` and the scatters combine two elements with: free of sizes."""
    variables = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
    return not any(getattr(var.aval, "shape", ()) for var in variables)


def _scans_examples(eqn: JaxprEqn, kinds: Kinds) -> bool:
    """`lax.map` over the batch: one iteration per example."""
    num_consts, num_carry = scan_counts(eqn)
    layouts = [
        batch_layout(kinds[atom])
        for atom in eqn.invars[num_consts + num_carry :]
        if not isinstance(atom, Literal) and atom in kinds
    ]
    return any(layout is not None and layout[0] == 0 for layout in layouts)


# ---------------------------------------------------------------------------------------------
# Parameters that hold the size of a result


def _result_shape(name: str) -> Callable[[JaxprEqn, Kinds, int], dict[str, Any]]:
    return lambda eqn, kinds, parts: {name: _shape(eqn.outvars[0], kinds, parts)}


def _slice_sizes(eqn: JaxprEqn, kinds: Kinds, parts: int) -> dict[str, Any]:
    """A gather takes the whole of a batched dimension, or one row of it."""
    operand, sizes = eqn.invars[0], list(eqn.params["slice_sizes"])
    narrow = _shape(operand, kinds, parts)
    for dim, (before, after) in enumerate(zip(operand.aval.shape, narrow, strict=True)):
        if before != after and sizes[dim] == before:
            sizes[dim] = after
        elif before != after and sizes[dim] != 1:
            raise _Unknown
    return {"slice_sizes": tuple(sizes)}


def _limits(eqn: JaxprEqn, kinds: Kinds, parts: int) -> dict[str, Any]:
    """A slice takes the whole of a batched dimension."""
    operand = eqn.invars[0]
    starts, limits = eqn.params["start_indices"], list(eqn.params["limit_indices"])
    strides = eqn.params["strides"] or (1,) * len(limits)
    narrow = _shape(operand, kinds, parts)
    for dim, (before, after) in enumerate(zip(operand.aval.shape, narrow, strict=True)):
        if before == after:
            continue
        if (starts[dim], limits[dim], strides[dim]) != (0, before, 1):
            raise _Unknown
        limits[dim] = after
    return {"limit_indices": tuple(limits)}


# What makes a batch from nothing (iota, random bits) is not here: its parts differ.
_SIZES: Mapping[str, Callable[[JaxprEqn, Kinds, int], dict[str, Any]]] = {
    "broadcast_in_dim": _result_shape("shape"),
    "reshape": _result_shape("new_sizes"),
    "dynamic_slice": _result_shape("slice_sizes"),
    "gather": _slice_sizes,
    "slice": _limits,
}


def has_parts(kind: object) -> bool:
    """Whether a value of this kind differs from part to part."""
    return isinstance(kind, Partial) or batch_layout(kind) is not None
