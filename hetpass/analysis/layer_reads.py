"""Which layers make and read the values of a layered region.

Partition keeps or sends a value only where it cannot be made again: a value that is cheap to make
(`remade`) is read as the values that it is made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetpass._jax import DropVar, JaxprEqn, Var, scan_counts
from hetpass.ir.program import Layered, LayerSpan


@dataclass(frozen=True)
class Touch:
    """One reader or maker of a value.

    Attributes:
      layers: first and last. Of a scan over layers all read what is constant, and each reads or
        makes its own slice of what is stacked.
      backward: in the backward part.
      sliced: every layer has a part of its own.
    """

    layers: LayerSpan
    backward: bool
    sliced: bool = False


@dataclass(frozen=True, eq=False)
class LayerReads:
    """Makers and readers of every region value; values that are remade are in neither.

    Attributes:
      made: by variable; inputs of the region are not in it.
      read: by variable, inputs too.
      roots: what a value is remade from.
    """

    made: dict[Var, Touch] = field(default_factory=dict)
    read: dict[Var, list[Touch]] = field(default_factory=dict)
    roots: dict[Var, tuple[Var, ...]] = field(default_factory=dict)


def layer_reads(layered: Layered, remade: Sequence[bool] = ()) -> LayerReads:
    """Makers and readers, layer by layer.

    Args:
      remade: per region equation, whether its readers make its result again; (): none does.
    """
    eqns = layered.program.region.eqns
    flags = remade or [False] * len(eqns)
    found = LayerReads()
    roots = found.roots
    for eqn, span, late, again in zip(eqns, layered.spans, layered.backward, flags, strict=True):
        operands = [a for a in eqn.invars if isinstance(a, Var)]
        if again:
            below = dict.fromkeys(r for a in operands for r in roots.get(a, (a,)))
            roots.update(dict.fromkeys(eqn.outvars, tuple(below)))
            continue
        consts, carry = scan_counts(eqn) if span.first < span.last else (len(eqn.invars), 0)
        for position, operand in enumerate(eqn.invars):
            if isinstance(operand, Var):
                touch = _touch(eqn, span, late, position - consts, carry)
                for root in roots.get(operand, (operand,)):
                    found.read.setdefault(root, []).append(touch)
        for position, var in enumerate(eqn.outvars):
            if not isinstance(var, DropVar):
                found.made[var] = _made(eqn, span, late, position, carry)
    return found


def _touch(eqn: JaxprEqn, span: LayerSpan, late: bool, position: int, carry: int) -> Touch:
    """A read of operand `position`, counted from the end of a scan's constants."""
    if position < 0 or span.first == span.last:
        return Touch(span, late)
    if position < carry:
        entered = span.last if _reverse(eqn) else span.first
        return Touch(LayerSpan(entered, entered), late)
    return Touch(span, late, True)


def _made(eqn: JaxprEqn, span: LayerSpan, late: bool, position: int, carry: int) -> Touch:
    if span.first == span.last:
        return Touch(span, late)
    if position < carry:
        left = span.first if _reverse(eqn) else span.last
        return Touch(LayerSpan(left, left), late)
    return Touch(span, late, True)


def _reverse(eqn: JaxprEqn) -> bool:
    return bool(eqn.params["reverse"])
