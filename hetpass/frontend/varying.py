"""Which region values vary from microbatch to microbatch.

Kinds say it where the batch was found. A step that could not be split (M = 1) has whole values
only; there, what depends on an argument with a batch dimension varies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetpass._jax import Atom, Literal, Var
from hetpass.ir.kinds import Kind, Whole, Zero
from hetpass.ir.program import StepProgram, WholeInput


@dataclass(frozen=True)
class Varying:
    """The values that vary.

    Attributes:
      variables: region inputs and results that depend on the batch.
      known: the program has a batch. If not, nothing tells data from parameters, and `may_vary`
        says yes to every variable.
    """

    variables: frozenset[Var]
    known: bool

    def varies(self, atom: Atom) -> bool:
        return not isinstance(atom, Literal) and atom in self.variables

    def may_vary(self, atom: Atom) -> bool:
        return not isinstance(atom, Literal) and (not self.known or atom in self.variables)


def varying_values(program: StepProgram) -> Varying:
    """Follow the batch through the region."""
    batched = {
        var
        for var, leaf in zip(program.traced.jaxpr.invars, program.traced.inputs, strict=True)
        if leaf.batch_dim is not None
    }
    variables: set[Var] = set()
    for var, source in zip(program.region.invars, program.region_inputs, strict=True):
        if not isinstance(source, WholeInput) or source.var in batched:
            variables.add(var)
    for eqn in program.region.eqns:
        depends = any(not isinstance(a, Literal) and a in variables for a in eqn.invars)
        if depends:
            variables.update(eqn.outvars)
        else:
            variables.update(v for v in eqn.outvars if _is_of_batch(program.kinds, v))
    return Varying(frozenset(variables), bool(variables))


def _is_of_batch(kinds: Mapping[Var, Kind], var: Var) -> bool:
    return not isinstance(kinds.get(var, Whole()), (Whole, Zero))
