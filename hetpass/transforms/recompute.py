"""Recomputation per stage: the backward part runs the stage's forward equations once more.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), a stage at a time: between
forward and backward only the stage's inputs are held. The equations are the same, so results are;
random masks too, since they come from keys and positions, not from a state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hetpass._jax import Atom, DropVar, JaxprEqn, Var, make_var
from hetpass.ir.program import Layered
from hetpass.transforms.region import Mark, RegionDraft, marks


def recompute(layered: Layered, stage_of_layer: Sequence[int], stages: Collection[int]) -> Layered:
    """Backward equations on `stages` read copies of the forward values of their own stage.

    Copies are backward equations; those that nothing reads are not made. What has effects (a
    print) is never run again: its results are kept.

    Args:
      layered: with every equation on one stage.
      stage_of_layer: per layer.
    """
    if not stages:
        return layered
    work = _Work(RegionDraft.of(layered), stage_of_layer, frozenset(stages))
    for eqn, mark in zip(layered.program.region.eqns, marks(layered), strict=True):
        work.visit(eqn, mark)
    program = layered.program
    for var, output in zip(program.region.outvars, program.region_outputs, strict=True):
        work.draft.add_output(var, output)
    return work.draft.finish()


@dataclass
class _Work:
    """The rewrite in progress.

    Attributes:
      forward: the forward equation on one of the stages that makes a variable.
      copies: what a forward variable is called when its own stage makes it again.
    """

    draft: RegionDraft
    stage_of_layer: Sequence[int]
    stages: frozenset[int]
    forward: dict[Var, tuple[JaxprEqn, Mark]] = field(default_factory=dict)
    copies: dict[Var, Var] = field(default_factory=dict)

    def visit(self, eqn: JaxprEqn, mark: Mark) -> None:
        stage = self.stage_of_layer[mark.span.first]
        if stage in self.stages and not mark.backward and not eqn.effects:
            self.forward.update((v, (eqn, mark)) for v in eqn.outvars)
        if stage in self.stages and mark.backward:
            self._copy(eqn, stage)
            eqn = eqn.replace(invars=[self._renamed(v, stage) for v in eqn.invars])
        self.draft.emit(eqn, mark)

    def _own(self, value: Atom, stage: int) -> tuple[JaxprEqn, Mark] | None:
        found = self.forward.get(value) if isinstance(value, Var) else None
        same = found is not None and self.stage_of_layer[found[1].span.first] == stage
        return found if same else None

    def _renamed(self, value: Atom, stage: int) -> Atom:
        return self.copies[value] if self._own(value, stage) else value

    def _copy(self, reader: JaxprEqn, stage: int) -> None:
        """Emits copies of all that `reader` needs of its stage's forward part, first things
        first."""
        pending = [(reader, False)]
        while pending:
            eqn, ready = pending.pop()
            missing = {
                id(found[0]): found[0]
                for v in eqn.invars
                if (found := self._own(v, stage)) and v not in self.copies
            }
            if missing and not ready:
                pending.append((eqn, True))
                pending.extend((e, False) for e in missing.values())
            elif eqn is not reader:
                self._emit_copy(eqn, stage)

    def _emit_copy(self, eqn: JaxprEqn, stage: int) -> None:
        named = [v for v in eqn.outvars if not isinstance(v, DropVar)]
        if all(v in self.copies for v in named):
            return
        mark = self.forward[named[0]][1]
        outs: list[Var] = []
        for var in eqn.outvars:
            if isinstance(var, DropVar):
                outs.append(var)
                continue
            copy = make_var(var.aval)
            self.copies[var] = copy
            if var in self.draft.kinds:
                self.draft.kinds[copy] = self.draft.kinds[var]
            outs.append(copy)
        operands = [self._renamed(v, stage) for v in eqn.invars]
        self.draft.emit(
            eqn.replace(invars=operands, outvars=outs),
            Mark(mark.span, True, mark.origin),
        )
