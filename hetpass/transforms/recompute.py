"""Recomputation per stage: the backward part runs the stage's forward equations once more; and what
a model recomputes itself is done no earlier than it is needed.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), a stage at a time: between
forward and backward only the stage's inputs are held. The equations are the same, so results are;
random masks too, since they come from keys and positions, not from a state.

A model that recomputes blocks itself (`jax.checkpoint`) has backward equations that equal forward
ones, or their copies. A compiler would merge equals of one program, and run all blocks as soon as
what they read is there, since nothing else keeps them, and hold for the whole stage what each block
makes anew. So their operands pass a fence, together with what the backward part made last: a block
is recomputed when its turn has come.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

import jax

from hetpass._jax import Atom, DropVar, JaxprEqn, Literal, Var, make_var
from hetpass.ir.kinds import Batched
from hetpass.ir.program import Layered
from hetpass.transforms.region import Mark, RegionDraft, marks


def recompute(layered: Layered, stage_of_layer: Sequence[int], stages: Collection[int]) -> Layered:
    """Backward equations on `stages` read copies of the forward values of their own stage; on every
    stage those that compute what a forward equation does wait for their turn.

    Copies are backward equations; those that nothing reads are not made. What has effects (a
    print) is never run again: its results are kept.

    Args:
      layered: with every equation on one stage.
      stage_of_layer: per layer.
    """
    work = _Work(RegionDraft.of(layered), stage_of_layer, frozenset(stages))
    for eqn, mark in zip(layered.program.region.eqns, marks(layered), strict=True):
        work.visit(eqn, mark)
    if not stages and not work.fences:
        return layered
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
      made: what copies, and forward equations on other stages, compute, on what.
      fences: by stage and variable that is read, the one that hides it from the compiler.
      latest: per stage, what its backward part made last of the examples.
    """

    draft: RegionDraft
    stage_of_layer: Sequence[int]
    stages: frozenset[int]
    forward: dict[Var, tuple[JaxprEqn, Mark]] = field(default_factory=dict)
    copies: dict[Var, Var] = field(default_factory=dict)
    made: set[Hashable] = field(default_factory=set)
    fences: dict[tuple[int, Var], Var] = field(default_factory=dict)
    latest: dict[int, Var] = field(default_factory=dict)

    def visit(self, eqn: JaxprEqn, mark: Mark) -> None:
        stage = self.stage_of_layer[mark.span.first]
        if not mark.backward and stage not in self.stages:
            self.made.add(_computes(eqn, eqn.invars))
        elif not mark.backward and not eqn.effects:
            self.forward.update((v, (eqn, mark)) for v in eqn.outvars)
        if mark.backward:
            operands = list(eqn.invars)
            if stage in self.stages:
                self._copy(eqn, stage)
                operands = [self._renamed(v, stage) for v in eqn.invars]
            if _computes(eqn, operands) in self.made:
                operands = self._fenced(operands, mark, stage)
            eqn = eqn.replace(invars=operands)
            self.latest.update(
                (stage, v) for v in eqn.outvars if isinstance(self.draft.kinds.get(v), Batched)
            )
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
        self.made.add(_computes(eqn, operands))
        self.draft.emit(
            eqn.replace(invars=operands, outvars=outs),
            Mark(mark.span, True, mark.origin),
        )

    def _fenced(self, operands: Sequence[Atom], mark: Mark, stage: int) -> list[Atom]:
        """The same values, one of them by a name that the compiler takes for another's and makes no
        earlier than what the stage's backward part made last: one of the examples, if there is
        one."""
        hideable = [v for v in operands if isinstance(v, Var) and not _is_key(v)]
        batched = [v for v in hideable if isinstance(self.draft.kinds.get(v), Batched)]
        value = next(iter([*batched, *hideable]), None)
        if value is None:
            return list(operands)
        if (stage, value) not in self.fences:
            after = self.latest.get(stage)
            waits = [after] if after is not None and not _is_key(after) else []
            self.fences[stage, value] = self.draft.emit_call(
                lambda *values: jax.lax.optimization_barrier(values)[0],
                [value, *waits],
                self.draft.kinds[value],
                mark,
            )
        return [self.fences[stage, value] if v is value else v for v in operands]


def _is_key(value: Var) -> bool:
    return bool(jax.dtypes.issubdtype(value.aval.dtype, jax.dtypes.extended))


def _computes(eqn: JaxprEqn, operands: Sequence[Atom]) -> Hashable:
    """Equal where two equations may compute the same."""
    read = tuple(str(v.val) if isinstance(v, Literal) else id(v) for v in operands)
    return eqn.primitive.name, read, tuple(str(v.aval) for v in eqn.outvars)
