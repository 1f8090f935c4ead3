"""Which of the step's inputs a whole input of the region is, or is made from.

The prologue casts, transposes and reverses parameters; they are the same parameters still.
"""

from __future__ import annotations

from hetpass._jax import Var
from hetpass.ir.program import StepProgram, WholeInput


def parameter_leaves(program: StepProgram) -> dict[Var, tuple[Var, ...]]:
    """Whole region input -> inputs of the step (variables of `traced.jaxpr`); scalars left out."""
    leaves: dict[Var, tuple[Var, ...]] = {
        var: (var,)
        for var, leaf in zip(program.traced.jaxpr.invars, program.traced.inputs, strict=True)
        if leaf.batch_dim is None and var.aval.shape
    }
    for eqn in program.prologue:
        read = [a for a in eqn.invars if isinstance(a, Var)]
        made_of = tuple(dict.fromkeys(leaf for a in read for leaf in leaves.get(a, ())))
        leaves.update(dict.fromkeys(eqn.outvars, made_of))
    return {
        var: leaves.get(source.var, ())
        for var, source in zip(program.region.invars, program.region_inputs, strict=True)
        if isinstance(source, WholeInput) and var.aval.shape
    }
