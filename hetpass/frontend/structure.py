"""Hashable keys that tell whether two equations do the same work.

Two equations with equal keys and equal operands compute equal results. Jaxprs among parameters are
compared by structure (variables numbered in order), never by identity; `0.0` and `-0.0`, `1` and
`True` are kept apart and NaN equals itself, which plain `==` would not do.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from hetpass._jax import Atom, Jaxpr, JaxprEqn, Literal, ShapedArray, Var, is_jaxpr, open_jaxpr

Key = Hashable

MAX_COMPARED_BYTES = 4096
"""Constants up to this size are compared by content, larger ones by identity."""


def equation_key(eqn: JaxprEqn) -> Key:
    """Primitive, parameters, result types and compute context; not the operands."""
    results = tuple(aval_key(v.aval) for v in eqn.outvars)
    return (eqn.primitive.name, params_key(eqn.params), results)


def params_key(params: Mapping[str, Any]) -> Key:
    return tuple((name, value_key(params[name])) for name in sorted(params))


def aval_key(aval: Any) -> Key:
    if isinstance(aval, ShapedArray):
        return aval.shape, aval.dtype, aval.weak_type
    return str(aval)


def value_key(value: Any) -> Key:
    """A key for a parameter or a constant."""
    if is_jaxpr(value):
        jaxpr, consts = open_jaxpr(value)
        return jaxpr_key(jaxpr), tuple(value_key(c) for c in consts)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(value_key(v) for v in value)
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return "dict", tuple((str(k), value_key(v)) for k, v in items)
    if isinstance(value, (bool, int, str, bytes, type(None))):
        return type(value).__name__, value
    if isinstance(value, (float, complex)):
        return type(value).__name__, repr(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_key(np.asarray(value), value)
    if isinstance(value, ShapedArray):
        return "aval", aval_key(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _device_array_key(value)
    try:
        hash(value)
    except TypeError:
        return "object", type(value).__name__, id(value)
    return type(value).__name__, value


def _device_array_key(value: Any) -> Key:
    if getattr(value, "nbytes", MAX_COMPARED_BYTES + 1) > MAX_COMPARED_BYTES:
        return "array", id(value)
    try:
        return _array_key(np.asarray(value), value)
    except TypeError:  # PRNG keys are no numpy arrays
        return "array", id(value)


def _array_key(array: np.ndarray, value: Any) -> Key:
    if array.nbytes > MAX_COMPARED_BYTES or array.dtype == object:
        return "array", id(value)
    return "array", str(array.dtype), array.shape, array.tobytes()


def literal_key(literal: Literal) -> Key:
    return "literal", aval_key(literal.aval), value_key(literal.val)


def jaxpr_key(jaxpr: Jaxpr) -> Key:
    """Equal for jaxprs that differ in the names of their variables only."""
    numbers: dict[Var, int] = {}

    def define(var: Var) -> Key:
        numbers[var] = len(numbers)
        return aval_key(var.aval)

    def read(atom: Atom) -> Key:
        return literal_key(atom) if isinstance(atom, Literal) else numbers[atom]

    inputs = tuple(define(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    eqns = []
    for eqn in jaxpr.eqns:
        operands = tuple(read(a) for a in eqn.invars)
        key = equation_key(eqn)
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        eqns.append((key, operands))
    return inputs, tuple(eqns), tuple(read(a) for a in jaxpr.outvars)
