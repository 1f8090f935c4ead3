"""A region at two sizes of the microbatch, so that what depends on it can be told exactly.

The second size is the whole batch, as traced; for one microbatch it is twice the batch, the first
probe. Amounts of bytes and FLOPs of what works example by example are affine in the size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hetpass._jax import DropVar, JaxprEqn, Var
from hetpass.analysis.flops import aval_bytes
from hetpass.ir.facts import Amount
from hetpass.ir.kinds import Batched, Position
from hetpass.ir.program import SliceInput, StepProgram

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class AtSize:
    """The region at one size.

    Attributes:
      examples: in a microbatch.
      eqns: per region equation, the equal one of this size.
      bytes: of every region variable.
    """

    examples: int
    eqns: tuple[JaxprEqn, ...]
    bytes: Mapping[Var, float]


def two_sizes(program: StepProgram) -> tuple[AtSize, AtSize | None]:
    """The region as it is, and at another size; None where nothing is cut along the batch."""
    traced, region = program.traced, program.region
    size, count = traced.batch_size, program.num_microbatches
    one = AtSize(max(1, (size or 1) // count), tuple(region.eqns), _region_bytes(program))
    cut = any(isinstance(source, SliceInput) for source in program.region_inputs)
    if size is None or not cut or (count == 1 and not traced.probes):
        return one, None
    other = traced.jaxpr if count > 1 else traced.probes[0]
    examples = size if count > 1 else 2 * size
    ratio = examples / one.examples
    sizes = dict(one.bytes)
    for var, source in zip(region.invars, program.region_inputs, strict=True):
        if isinstance(source, SliceInput):
            sizes[var] *= ratio
    eqns = []
    for eqn, origin in zip(region.eqns, program.origin, strict=True):
        twin = other.eqns[origin]
        equal = twin.primitive is eqn.primitive and len(twin.outvars) == len(eqn.outvars)
        eqns.append(twin if equal else eqn)
        for k, var in enumerate(eqn.outvars):
            if isinstance(var, DropVar):
                continue
            if equal and len(twin.outvars[k].aval.shape) == len(var.aval.shape):
                sizes[var] = aval_bytes(twin.outvars[k].aval)
            elif isinstance(program.kinds.get(var), (Batched, Position)):
                sizes[var] *= ratio
    return one, AtSize(examples, tuple(eqns), MappingProxyType(sizes))


def _region_bytes(program: StepProgram) -> dict[Var, float]:
    region = program.region
    sizes = {var: aval_bytes(var.aval) for var in region.invars}
    sizes.update((v, aval_bytes(v.aval)) for eqn in region.eqns for v in eqn.outvars)
    return sizes


def amount(one: AtSize, other: AtSize | None, of: Callable[[AtSize], float]) -> Amount:
    """The amount that `of` gives at both sizes.

    What shrinks with the batch counts per microbatch, and what grows faster than the batch per
    example, so that the amount is exact at the first size.
    """
    return fitted(one, other, of(one), of(other) if other is not None else 0.0)


def fitted(one: AtSize, other: AtSize | None, first: float, second: float) -> Amount:
    """The amount that is `first` at one size and `second` at the other."""
    if other is None or second <= first:
        return Amount(first, 0.0)
    slope = (second - first) / (other.examples - one.examples)
    rest = first - slope * one.examples
    if rest <= _ROUNDING * first:
        return Amount(0.0, first / one.examples)
    return Amount(rest, slope)
