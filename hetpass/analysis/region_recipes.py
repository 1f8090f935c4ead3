"""Region equations whose values are cheaper to make again where they are read than to hold or send.

A *recipe* is a chain of cheap equations back to *roots*: values that are to be had anyway. A
broadcast mask is cheaper to broadcast again than to hold between forward and backward; a one-hot
of the labels cheaper to make from the labels than to send. Partition makes them so; the operation
graph prices them so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetpass._jax import JaxprEqn, Var
from hetpass.analysis.flops import aval_bytes

SMALL_BYTES = 1024
"""Up to here a value is cheaper to compute twice than to send: a launch dwarfs it."""

LAYOUT = frozenset(
    "broadcast_in_dim convert_element_type copy expand_dims iota reshape squeeze transpose".split()
)
"""Same numbers, other shape or type: free once fused into what reads them."""

ARITHMETIC = frozenset(
    """abs add add_any and ceil clamp concatenate cos div dynamic_slice eq exp floor ge gt
    integer_pow is_finite le log logistic lt max min mul ne neg nextafter not one_minus_square or
    pad pow rem rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sin slice sqrt square stop_gradient sub tanh xor""".split()
)
"""A few operations per element: cheap on values that hang on the inputs alone."""

_MAX_ROOTS = 8
_MAX_WORK_PER_ELEMENT = 16
_FREE_ELEMENTS = 256


@dataclass(frozen=True)
class _Recipe:
    """How a value comes from its roots. `work`: elements computed on the way; `pure`: the roots
    are inputs alone."""

    roots: tuple[Var, ...]
    work: int
    pure: bool


def region_recipes(eqns: Sequence[JaxprEqn], inputs: Sequence[Var]) -> tuple[bool, ...]:
    """Per equation of a region, whether any fragment may run it again for its own use.

    True for layout equations on any value, and for arithmetic on what hangs on region inputs
    alone, if the roots weigh no more than the result and the work is a few operations per element.
    """
    table: dict[Var, _Recipe] = {v: _Recipe((v,), 0, True) for v in inputs}
    free = []
    for eqn in eqns:
        name = eqn.primitive.name
        recipe = None
        if len(eqn.outvars) == 1 and not eqn.effects and name in LAYOUT | ARITHMETIC:
            recipe = _combine(eqn, table)
            if name not in LAYOUT and not recipe.pure:
                recipe = None
        within = recipe is not None and _within(recipe, eqn.outvars[0], SMALL_BYTES)
        if recipe is not None and within:
            table[eqn.outvars[0]] = recipe
        free.append(within)
    return tuple(free)


def _combine(eqn: JaxprEqn, table: dict[Var, _Recipe]) -> _Recipe:
    roots: dict[Var, None] = {}
    work, pure = _elements(eqn.outvars[0].aval), True
    for v in eqn.invars:
        if isinstance(v, Var):
            known = table.get(v) or _Recipe((v,), 0, False)
            roots.update(dict.fromkeys(known.roots))
            work += known.work
            pure = pure and known.pure
    return _Recipe(tuple(roots), work, pure)


def _within(recipe: _Recipe, result: Var, free_bytes: int) -> bool:
    weight = sum(aval_bytes(v.aval) for v in recipe.roots)
    size = _elements(result.aval)
    return (
        len(recipe.roots) <= _MAX_ROOTS
        and weight
        <= (max(free_bytes, aval_bytes(result.aval)) if recipe.pure else aval_bytes(result.aval))
        and recipe.work <= _MAX_WORK_PER_ELEMENT * max(size, _FREE_ELEMENTS)
    )


def _elements(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))
