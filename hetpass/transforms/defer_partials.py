"""Region equations that would carry partial values between stages act on the sums instead.

A partial value (a microbatch's share of a gradient) should leave its stage once per step, not once
per microbatch. An equation that reads partial values made elsewhere commutes with their
combination, or the split would not have left it in the region, so it can run

  - where its one producer runs, if everything else that it reads is there in time; or
  - in the epilogue, on the accumulated values (the sum of a tied parameter's two gradients).

What fits neither stays where it is: its operands then travel with the microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax.dtypes import issubdtype

from hetpass._jax import Atom, DropVar, JaxprEqn, Literal, Var, make_var
from hetpass.ir.kinds import CombineOp, Partial, Whole, Zero
from hetpass.ir.program import Accumulated, Layered, RegionOutput, WholeInput
from hetpass.transforms.region import Mark, RegionDraft, marks


def defer_partials(layered: Layered, stage_of_layer: Sequence[int]) -> Layered:
    """The same program, in which partial values are read where they are made, if at all possible.

    Args:
      layered: every equation inside one stage (see `split_scans`).
      stage_of_layer: the stage of every layer, not decreasing.
    """
    work = _Work(layered, RegionDraft.of(layered), stage_of_layer)
    for eqn, mark in zip(layered.program.region.eqns, marks(layered), strict=True):
        work.visit(eqn, mark)
    if not work.changed:
        return layered
    rows = zip(layered.program.region.outvars, layered.program.region_outputs, strict=True)
    for var, output in rows:
        if var not in work.deferred:
            work.draft.add_output(var, output)
    return work.draft.finish()


@dataclass
class _Work:
    """The rewrite in progress.

    Attributes:
      deferred: region variables that the epilogue makes now, and what they are called there.
      full: further region variables that have a full-batch name already.
      maker: the region equation that makes a variable.
      outputs, readers: what becomes of a region variable.
    """

    layered: Layered
    draft: RegionDraft
    stage_of_layer: Sequence[int]
    changed: bool = False
    deferred: dict[Var, Var] = field(default_factory=dict)
    full: dict[Var, Var] = field(default_factory=dict)
    maker: dict[Var, JaxprEqn] = field(default_factory=dict)
    outputs: dict[Var, list[RegionOutput]] = field(default_factory=dict)
    readers: dict[Var, list[JaxprEqn]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.layered.program
        for var, source in zip(program.region.invars, program.region_inputs, strict=True):
            if isinstance(source, WholeInput):
                self.full[var] = source.var
        for var, output in zip(program.region.outvars, program.region_outputs, strict=True):
            self.outputs.setdefault(var, []).append(output)
        for eqn in program.region.eqns:
            for v in eqn.invars:
                if isinstance(v, Var):
                    self.readers.setdefault(v, []).append(eqn)

    def visit(self, eqn: JaxprEqn, mark: Mark) -> None:
        partial = [v for v in eqn.invars if isinstance(v, Var) and self._partial(v)]
        if any(v in self.deferred for v in partial):
            self._defer(eqn)
            return
        makers = {self._where(self.draft.place[v]): v for v in partial if v in self.draft.place}
        if not makers or set(makers) == {self._where(mark)}:
            self._keep(eqn, mark)
        elif len(makers) == 1 and self._can_move(eqn, *makers.values()):
            home = self.draft.place[next(iter(makers.values()))]
            self._keep(eqn, replace(home, origin=mark.origin))
            self.changed = True
        elif all(self._has_full(v) for v in eqn.invars) and self._commutes(eqn):
            self._defer(eqn)
        else:
            self._keep(eqn, mark)

    def _keep(self, eqn: JaxprEqn, mark: Mark) -> None:
        self.draft.emit(eqn, mark)
        self.maker.update((v, eqn) for v in eqn.outvars)

    def _where(self, mark: Mark) -> tuple[int, bool]:
        return self.stage_of_layer[mark.span.first], mark.backward

    def _partial(self, var: Var) -> bool:
        return isinstance(self.draft.kinds.get(var), Partial)

    def _commutes(self, eqn: JaxprEqn) -> bool:
        """Whether all partial values, in and out, combine in the same way, and none is read by
        an equation that must stay in the region."""
        kinds = self.draft.kinds
        ops = {
            kind.op
            for v in [*eqn.invars, *eqn.outvars]
            if not isinstance(v, Literal) and isinstance(kind := kinds.get(v), Partial)
        }
        outs = [v for v in eqn.outvars if not isinstance(v, DropVar)]
        return (
            len(ops) == 1
            and not eqn.effects
            and all(self._partial(v) for v in outs)
            and all(self._readers_follow(v) for v in outs)
        )

    def _readers_follow(self, var: Var) -> bool:
        """Whether every reader of `var`, and of what they make, can be deferred as well."""
        if len(self.outputs.get(var, ())) > 1:
            return False
        pending, seen = [var], {var}
        while pending:
            for eqn in self.readers.get(pending.pop(), ()):
                read = [v for v in eqn.invars if not isinstance(v, Literal)]
                if eqn.effects or not all(v in seen or self._has_full(v) for v in read):
                    return False
                for out in eqn.outvars:
                    if isinstance(out, DropVar):
                        continue
                    if not self._partial(out) or len(self.outputs.get(out, ())) > 1:
                        return False
                    if out not in seen:
                        seen.add(out)
                        pending.append(out)
        return True

    def _can_move(self, eqn: JaxprEqn, partial: Var) -> bool:
        """Whether `eqn` may run where `partial` is made: all else that it reads is there in time.
        (What reads its results ran later than it before, so it does now.)"""
        stage, backward = self._where(self.draft.place[partial])
        if eqn.effects or not all(isinstance(v, DropVar) or self._partial(v) for v in eqn.outvars):
            return False
        for v in eqn.invars:
            if isinstance(v, Literal) or v not in self.draft.place:
                continue
            there, from_backward = self._where(self.draft.place[v])
            if from_backward and (not backward or there < stage):
                return False
            if not from_backward and not backward and there > stage:
                return False
        return True

    def _has_full(self, value: Atom) -> bool:
        """Whether the epilogue can have the full-batch value of a region operand."""
        if isinstance(value, Literal) or value in self.full or value in self.deferred:
            return True
        kind = self.draft.kinds.get(value)
        if isinstance(kind, Partial):
            return value not in self.layered.program.region.invars
        if isinstance(kind, (Whole, Zero)) and value in self.maker:
            return all(self._has_full(v) for v in self.maker[value].invars)
        return False

    def _full(self, value: Atom) -> Atom:
        """The full-batch value of a region operand; accumulates or recomputes it if need be."""
        if isinstance(value, Literal):
            return value
        if value in self.deferred:
            return self.deferred[value]
        if value not in self.full:
            kind = self.draft.kinds.get(value)
            if isinstance(kind, Partial):
                self.full[value] = self._accumulate(value, kind.op)
            else:
                self._replay(self.maker[value])
        return self.full[value]

    def _accumulate(self, var: Var, op: CombineOp) -> Var:
        """The full-batch variable that `var` adds up to: an output that there is, or a new one."""
        for output in self.outputs.get(var, ()):
            if isinstance(output, Accumulated):
                return output.target
        target = make_var(var.aval)
        wide = var.aval.dtype
        if issubdtype(wide, jnp.floating):
            wide = jnp.promote_types(wide, jnp.float32)
        self.draft.add_output(var, Accumulated(target, op, wide))
        return target

    def _replay(self, eqn: JaxprEqn) -> None:
        """The (whole) equation once more, in the epilogue."""
        operands = [self._full(v) for v in eqn.invars]
        outs = [v if isinstance(v, DropVar) else make_var(v.aval) for v in eqn.outvars]
        self.full.update(zip(eqn.outvars, outs, strict=True))
        self.draft.epilogue_head.append(eqn.replace(invars=operands, outvars=outs))

    def _defer(self, eqn: JaxprEqn) -> None:
        self.changed = True
        operands = [self._full(v) for v in eqn.invars]
        outs = []
        for var in eqn.outvars:
            if isinstance(var, DropVar):
                outs.append(var)
                continue
            known = self.outputs.get(var)
            self.deferred[var] = known[0].target if known else make_var(var.aval)
            outs.append(self.deferred[var])
        self.draft.epilogue_head.append(eqn.replace(invars=operands, outvars=outs))
