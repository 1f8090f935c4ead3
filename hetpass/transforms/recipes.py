"""Which values of prologue and epilogue are cheaper to make again where they are read than to send.

The same for the region is `analysis.region_recipes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpass._jax import DropVar, JaxprEqn, Var
from hetpass.analysis.region_recipes import ARITHMETIC, LAYOUT
from hetpass.transforms.sizes import SMALL_BYTES, aval_bytes, elements

_OPAQUE = frozenset(
    "while scan custom_call pure_callback io_callback ffi_call custom_partitioning".split()
)
"""Never run twice, however small their operands."""

_FEW = 4
"""A value of so many elements is as good as a scalar (a key is two words)."""


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
