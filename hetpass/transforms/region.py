"""A microbatch region under rewriting, and what rewrites share.

Passes over the region (split_scans, defer_partials) read a `Layered` and build another: they emit
equations with their layer span, may add region inputs with prologue equations, and region outputs
with epilogue equations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hetpass._jax import Atom, DropVar, JaxprEqn, Var, make_jaxpr_value, make_var
from hetpass.ir.kinds import Kind
from hetpass.ir.program import (
    Layered,
    LayerSpan,
    RegionInput,
    RegionOutput,
    StepProgram,
    WholeInput,
)
from hetpass.transforms.splice import equations_of


@dataclass(frozen=True)
class Mark:
    """Where a region equation runs, and the traced equation that it came from."""

    span: LayerSpan
    backward: bool
    origin: int


@dataclass
class RegionDraft:
    """The pieces of a `Layered` being rebuilt; `finish` makes the new value.

    Attributes:
      source: the value that is rewritten.
      eqns, marks: of the new region, in order.
      place: the mark of the equation that makes a variable.
      prologue, epilogue_head: equations added after the prologue and before the epilogue.
    """

    source: Layered
    eqns: list[JaxprEqn] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    place: dict[Var, Mark] = field(default_factory=dict)
    kinds: dict[Var, Kind] = field(default_factory=dict)
    invars: list[Var] = field(default_factory=list)
    inputs: list[RegionInput] = field(default_factory=list)
    outvars: list[Var] = field(default_factory=list)
    outputs: list[RegionOutput] = field(default_factory=list)
    prologue: list[JaxprEqn] = field(default_factory=list)
    epilogue_head: list[JaxprEqn] = field(default_factory=list)

    @classmethod
    def of(cls, layered: Layered) -> RegionDraft:
        """A draft with the inputs of `layered`, no equations and no outputs yet."""
        program = layered.program
        return cls(
            layered,
            kinds=dict(program.kinds),
            invars=list(program.region.invars),
            inputs=list(program.region_inputs),
        )

    def emit(self, eqn: JaxprEqn, mark: Mark) -> None:
        self.eqns.append(eqn)
        self.marks.append(mark)
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                self.place[var] = mark

    def emit_call(
        self, function: Callable[..., Any], operands: list[Atom], kind: Kind, mark: Mark
    ) -> Var:
        """Emits what `function` traces to; the variable of its one result."""
        spliced = equations_of(function, *operands)
        for eqn in spliced.eqns:
            self.emit(eqn, mark)
            self.kinds.update((v, kind) for v in eqn.outvars)
        return _result(spliced.outs)

    def add_whole_input(self, full: Var) -> Var:
        """A region variable that reads the full-batch variable `full`."""
        var = make_var(full.aval)
        self.invars.append(var)
        self.inputs.append(WholeInput(full))
        return var

    def add_output(self, var: Var, output: RegionOutput) -> None:
        self.outvars.append(var)
        self.outputs.append(output)

    def finish(self) -> Layered:
        program = self.source.program
        rebuilt: StepProgram = replace(
            program,
            prologue=(*program.prologue, *self.prologue),
            region=make_jaxpr_value(self.invars, self.outvars, self.eqns),
            region_inputs=tuple(self.inputs),
            region_outputs=tuple(self.outputs),
            kinds=self.kinds,
            origin=tuple(mark.origin for mark in self.marks),
            epilogue=(*self.epilogue_head, *program.epilogue),
        )
        return replace(
            self.source,
            program=rebuilt,
            spans=tuple(mark.span for mark in self.marks),
            backward=tuple(mark.backward for mark in self.marks),
        )


def marks(layered: Layered) -> list[Mark]:
    """One per region equation."""
    rows = zip(layered.spans, layered.backward, layered.program.origin, strict=True)
    return [Mark(span, backward, origin) for span, backward, origin in rows]


def splice_result(eqns: list[JaxprEqn], function: Callable[..., Any], operands: list[Atom]) -> Var:
    """Appends what `function` traces to; the variable of its one result."""
    spliced = equations_of(function, *operands)
    eqns.extend(spliced.eqns)
    return _result(spliced.outs)


def rename_result(eqns: list[JaxprEqn], start: int, old: Atom, new: Var) -> None:
    """`old`, a result among `eqns[start:]`, is called `new` from here on."""
    for i in range(start, len(eqns)):
        eqns[i] = eqns[i].replace(
            invars=[new if v is old else v for v in eqns[i].invars],
            outvars=[new if v is old else v for v in eqns[i].outvars],
        )


def _result(outs: tuple[Atom, ...]) -> Var:
    (out,) = outs
    if not isinstance(out, Var):
        raise ValueError("a spliced function returned a constant")
    return out
