"""Which values are cheaper to make again where they are read than to send or to keep.

A *recipe* is a chain of cheap equations back to *roots*: values that are to be had anyway. A
broadcast mask is cheaper to broadcast again than to hold between forward and backward; a one-hot
of the labels cheaper to make from the labels than to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpass._jax import DropVar, JaxprEqn, Var
from hetpass.transforms.sizes import SMALL_BYTES, aval_bytes, elements

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

_OPAQUE = frozenset(
    "while scan custom_call pure_callback io_callback ffi_call custom_partitioning".split()
)
"""Never run twice, however small their operands."""

_FEW = 4
"""A value of so many elements is as good as a scalar (a key is two words)."""

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


def once_recipes(eqns: Sequence[JaxprEqn]) -> tuple[bool, ...]:
    """Per prologue or epilogue equation, whether every stage may run it for its own use.

    True if all operands and results are small, and for cheap chains from small values to large
    ones (a learning rate, broadcast). Not for an equation that makes less of a vector (the sum of
    squares of a bias): its result is what to send.
    """
    cheap: set[Var] = set()
    vectors: set[Var] = set()  # cheap, and made from values of more than a few elements
    free = []
    for eqn in eqns:
        name = eqn.primitive.name
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        light = all(v in cheap or aval_bytes(v.aval) <= SMALL_BYTES for v in operands)
        results_small = all(
            isinstance(v, DropVar) or aval_bytes(v.aval) <= SMALL_BYTES for v in eqn.outvars
        )
        small = (
            light
            and results_small
            and not any(v in cheap and aval_bytes(v.aval) > SMALL_BYTES for v in operands)
        )
        spread = any(v in vectors or (v not in cheap and elements(v.aval) > _FEW) for v in operands)
        again = (
            not eqn.effects
            and not (spread and _shrinks(eqn))
            and name not in _OPAQUE
            and light
            and (small or (name in LAYOUT | ARITHMETIC and len(eqn.outvars) == 1))
        )
        if again:
            cheap.update(eqn.outvars)
            if spread:
                vectors.update(eqn.outvars)
        free.append(again)
    return tuple(free)


def _shrinks(eqn: JaxprEqn) -> bool:
    """Whether the result is much smaller than what is read: then the result is what to send."""
    read = sum(aval_bytes(v.aval) for v in eqn.invars if isinstance(v, Var))
    made = sum(aval_bytes(v.aval) for v in eqn.outvars)
    return read > 2 * made


def _combine(eqn: JaxprEqn, table: dict[Var, _Recipe]) -> _Recipe:
    roots: dict[Var, None] = {}
    work, pure = elements(eqn.outvars[0].aval), True
    for v in eqn.invars:
        if isinstance(v, Var):
            known = table.get(v) or _Recipe((v,), 0, False)
            roots.update(dict.fromkeys(known.roots))
            work += known.work
            pure = pure and known.pure
    return _Recipe(tuple(roots), work, pure)


def _within(recipe: _Recipe, result: Var, free_bytes: int) -> bool:
    weight = sum(aval_bytes(v.aval) for v in recipe.roots)
    size = elements(result.aval)
    return (
        len(recipe.roots) <= _MAX_ROOTS
        and weight
        <= (max(free_bytes, aval_bytes(result.aval)) if recipe.pure else aval_bytes(result.aval))
        and recipe.work <= _MAX_WORK_PER_ELEMENT * max(size, _FREE_ELEMENTS)
    )
