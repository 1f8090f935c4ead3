"""Region equations that any stage may compute again for itself instead of receiving the result.

A causal mask, a rotary table, zeros of a batched shape, a key folded with a constant: cheap, and
made from whole inputs and literals only. Such an equation stands once in the region, in the layer
of its first reader; values it makes are not counted where they cross cuts, and partition may clone
it (with what it is made from, which is duplicable in its turn or a whole input) into every fragment
that reads it.
"""

from __future__ import annotations

from hetpass._jax import JaxprEqn, Literal, Var
from hetpass.analysis.flops import (
    DATA_MOVEMENT,
    ELEMENTWISE,
    aval_bytes,
    equation_flops,
    sub_jaxprs,
)
from hetpass.ir.program import StepProgram, WholeInput

SMALL_BYTES = 4096.0
"""Results no larger than this are duplicable whatever (simple) primitive makes them: keys."""

SMALL_FLOPS = 1e6


def duplicable_equations(program: StepProgram) -> tuple[bool, ...]:
    """One flag per region equation; see the head of this module."""
    whole: set[Var] = {
        var
        for var, source in zip(program.region.invars, program.region_inputs, strict=True)
        if isinstance(source, WholeInput)
    }
    flags = []
    for eqn in program.region.eqns:
        free = all(isinstance(a, Literal) or a in whole for a in eqn.invars)
        flag = free and not eqn.effects and _is_cheap(eqn)
        if flag:
            whole.update(eqn.outvars)
        flags.append(flag)
    return tuple(flags)


def _is_cheap(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name in ELEMENTWISE or name in DATA_MOVEMENT:
        return True
    if any(True for _ in sub_jaxprs(eqn)):
        return False
    written = sum(aval_bytes(v.aval) for v in eqn.outvars)
    return written <= SMALL_BYTES and equation_flops(eqn) <= SMALL_FLOPS
