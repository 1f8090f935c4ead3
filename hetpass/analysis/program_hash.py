"""A hash of a traced step, whole: what plans are cached by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hetpass._jax import DropVar, Jaxpr, Literal, is_jaxpr, open_jaxpr
from hetpass.ir.program import Traced


def program_hash(traced: Traced) -> str:
    """Equal for equal programs in every process; of a captured array's values only whether all are
    zero.

    Unlike the fingerprint, which names what a plan refers to, it covers every equation: a plan that
    is found by it is the plan that would be made again.
    """
    digest = hashlib.sha256()

    def add(text: str) -> None:
        digest.update(text.encode())
        digest.update(b"\0")

    add(f"{traced.name} {traced.batch_size}")
    for leaf in traced.inputs:
        add(f"{leaf.path} {leaf.aval.str_short()}{' zeros' if leaf.zeros else ''}")
    for path in traced.out_paths:
        add(path)
    for jaxpr in (traced.jaxpr, *traced.probes):
        _add_jaxpr(jaxpr, add, {})
    return digest.hexdigest()[:32]


def _add_jaxpr(jaxpr: Jaxpr, add: Callable[[str], None], numbers: dict[Any, int]) -> None:
    """Variables by the order of their first appearance."""

    def name(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{atom.val!r}:{atom.aval.str_short()}"
        return str(numbers.setdefault(atom, len(numbers)))

    add(" ".join(name(v) for v in (*jaxpr.constvars, *jaxpr.invars)))
    for eqn in jaxpr.eqns:
        reads = " ".join(name(atom) for atom in eqn.invars)
        makes = " ".join(
            "_" if isinstance(v, DropVar) else f"{name(v)}:{v.aval.str_short()}"
            for v in eqn.outvars
        )
        add(f"{eqn.primitive.name} {reads} > {makes} {eqn.source_info.name_stack}")
        for key in sorted(eqn.params):
            add(key)
            _add_value(eqn.params[key], add)
    add(" ".join(name(atom) for atom in jaxpr.outvars))


def _add_value(value: Any, add: Callable[[str], None]) -> None:
    """A parameter of an equation. Functions are told by their names: what they do is traced."""
    if is_jaxpr(value):
        _add_jaxpr(open_jaxpr(value)[0], add, {})
    elif isinstance(value, (tuple, list)):
        add("(")
        for part in value:
            _add_value(part, add)
        add(")")
    elif isinstance(value, np.ndarray):
        add(f"{value.dtype}{value.shape}")
        add(hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest())
    elif callable(value) and not isinstance(value, type):
        add(getattr(value, "__name__", type(value).__name__))
    else:
        text = repr(value)
        add(type(value).__name__ if " at 0x" in text else text)
