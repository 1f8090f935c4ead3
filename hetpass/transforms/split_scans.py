"""Scans over layers that span several stages become one shorter scan per stage.

    h, ys = scan(body, h, (w, r))          # layers 0..5, stages 0..2 | 3..5

becomes, for a forward scan,

    h, ys_0 = scan(body, h, (w_0, r_0))    # stage 0, iterations 0..2
    h, ys_1 = scan(body, h, (w_1, r_1))    # stage 1, iterations 3..5

and for a reversed one the same with the last stage first. Nothing is unrolled. Stacked inputs
come in pieces: a whole one is sliced once per step in the prologue; the stacked output of another
scan is taken piece by piece; anything else is sliced where it is made. Stacked outputs go out in
pieces: to the scans that read them, to accumulators of their own that the epilogue concatenates
once per step, and concatenated in the region only for what else reads the whole.

A carry that only adds up (the gradient of a value that every iteration shares) starts at zero in
every piece and is summed afterwards, so that it need not travel with the microbatch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax import lax

from hetpass._jax import (
    Atom,
    DropVar,
    JaxprEqn,
    Literal,
    ShapedArray,
    Var,
    make_var,
    open_jaxpr,
    scan_counts,
)
from hetpass.ir.kinds import Kind, Partial, Whole, Zero
from hetpass.ir.program import Layered, LayerSpan, RegionInput, WholeInput
from hetpass.transforms.region import Mark, RegionDraft, marks, rename_result, splice_result


@dataclass(frozen=True)
class Piece:
    """Rows lo..hi-1 of a stacked value."""

    lo: int
    hi: int
    var: Var


@dataclass(frozen=True)
class Iterations:
    """Iterations lo..hi-1 of a scan, and the layers that they are."""

    lo: int
    hi: int
    span: LayerSpan


def split_scans(layered: Layered, stage_of_layer: Sequence[int]) -> Layered:
    """The same program with every scan inside one stage.

    Args:
      layered: any; scans that already lie in one stage are left alone.
      stage_of_layer: the stage of every layer, not decreasing.

    Raises:
      ValueError: an equation other than a scan with one iteration per layer spans several stages.
    """
    program = layered.program
    if all(stage_of_layer[s.first] == stage_of_layer[s.last] for s in layered.spans):
        return layered
    inputs = dict(zip(program.region.invars, program.region_inputs, strict=True))
    work = _Work(RegionDraft.of(layered), inputs)
    read_whole = _read_outside_scans(layered, stage_of_layer)
    for eqn, mark in zip(program.region.eqns, marks(layered), strict=True):
        if stage_of_layer[mark.span.first] == stage_of_layer[mark.span.last]:
            work.draft.emit(eqn, mark)
        else:
            work.split(eqn, mark, _cut(eqn, mark.span, stage_of_layer), read_whole)
    for var, output in zip(program.region.outvars, program.region_outputs, strict=True):
        if var in work.pieces:
            work.join_outputs(var, output)
        else:
            work.draft.add_output(var, output)
    return work.draft.finish()


def _read_outside_scans(layered: Layered, stage_of_layer: Sequence[int]) -> set[Var]:
    """The variables that something other than the stacked input of a split scan reads."""
    read: set[Var] = set()
    for eqn, span in zip(layered.program.region.eqns, layered.spans, strict=True):
        operands = eqn.invars
        if stage_of_layer[span.first] != stage_of_layer[span.last]:
            operands = operands[: sum(scan_counts(eqn))] if eqn.primitive.name == "scan" else []
        read.update(v for v in operands if isinstance(v, Var))
    return read


def _cut(eqn: JaxprEqn, span: LayerSpan, stage_of_layer: Sequence[int]) -> list[Iterations]:
    """The scan's iterations by stage, in order of the stacked inputs."""
    if eqn.primitive.name != "scan" or eqn.params["length"] != span.last - span.first + 1:
        raise ValueError(
            f"a {eqn.primitive.name} equation spans layers {span.first} to {span.last}, "
            "which lie on several stages; only a scan with one iteration per layer may"
        )
    cuts = [
        k
        for k in range(span.first + 1, span.last + 1)
        if stage_of_layer[k] != stage_of_layer[k - 1]
    ]
    edges = [span.first, *cuts, span.last + 1]
    return [
        Iterations(a - span.first, b - span.first, LayerSpan(a, b - 1))
        for a, b in itertools.pairwise(edges)
    ]


@dataclass
class _Work:
    """The rewrite in progress: the new region, and the stacked values that exist in pieces."""

    draft: RegionDraft
    inputs: dict[Var, RegionInput]
    pieces: dict[Var, list[Piece]] = field(default_factory=dict)
    sliced: dict[tuple[Var, int, int], Var] = field(default_factory=dict)

    def split(
        self, eqn: JaxprEqn, mark: Mark, parts: list[Iterations], read_whole: set[Var]
    ) -> None:
        num_consts, num_carry = scan_counts(eqn)
        consts = list(eqn.invars[:num_consts])
        carry: list[Atom] = list(eqn.invars[num_consts : num_consts + num_carry])
        stacked = eqn.invars[num_consts + num_carry :]
        body, _ = open_jaxpr(eqn.params["jaxpr"])
        inner_carry = body.invars[num_consts : num_consts + num_carry]
        adds_up = [
            _only_adds_up(eqn, num_consts, i) and self._partial(eqn.outvars[i])
            for i in range(num_carry)
        ]
        sums: list[list[Var]] = [[] for _ in range(num_carry)]
        order = parts[::-1] if eqn.params["reverse"] else parts
        for part in order:
            here = replace(mark, span=part.span)
            if part is not order[0]:
                carry = [
                    self._zeros(v.aval, here) if alone else v
                    for v, alone in zip(carry, adds_up, strict=True)
                ]
            rows = [self._rows(v, part.lo, part.hi, here) for v in stacked]
            last = part is order[-1]
            outs = [
                v if last and not alone else self._carry(v, inner)
                for v, alone, inner in zip(
                    eqn.outvars[:num_carry], adds_up, inner_carry, strict=True
                )
            ]
            ys = [self._piece_of(v, part) for v in eqn.outvars[num_carry:]]
            self.draft.emit(
                eqn.replace(
                    invars=[*consts, *carry, *rows],
                    outvars=[*outs, *ys],
                    params={**eqn.params, "length": part.hi - part.lo},
                ),
                here,
            )
            carry = list(outs)
            for parts_of_sum, out, alone in zip(sums, outs, adds_up, strict=True):
                if alone:
                    parts_of_sum.append(out)
        end = replace(mark, span=order[-1].span)
        self._finish_sums(eqn.outvars[:num_carry], sums, end)
        for var in eqn.outvars[num_carry:]:
            if var in read_whole:
                self._concatenate(var, end)

    def join_outputs(self, var: Var, output: Any) -> None:
        """Every piece of a region output gets its own target; the epilogue joins them."""
        targets = []
        for piece in self.pieces[var]:
            aval = _with_rows(output.target.aval, piece.hi - piece.lo)
            targets.append(make_var(aval))
            self.draft.add_output(piece.var, replace(output, target=targets[-1]))
        head = self.draft.epilogue_head
        start = len(head)
        joined = splice_result(head, _concatenate_rows, list(targets))
        rename_result(head, start, joined, output.target)

    def _partial(self, var: Var) -> bool:
        return self.draft.kinds.get(var) == Partial("sum")

    def _like(self, var: Var, aval: ShapedArray) -> Var:
        """A fresh variable of the same kind as `var`."""
        fresh = make_var(aval)
        self.draft.kinds[fresh] = self.draft.kinds.get(var, Whole())
        return fresh

    def _carry(self, result: Var, inner: Var) -> Var:
        """A carry between two pieces: of the kind that the body's carry has."""
        fresh = make_var(result.aval)
        kinds = self.draft.kinds
        kinds[fresh] = kinds.get(inner, kinds.get(result, Whole()))
        return fresh

    def _zeros(self, aval: ShapedArray, mark: Mark) -> Atom:
        if not aval.shape:
            return Literal(np.zeros((), aval.dtype)[()], aval)
        function = _zeros_of(aval)
        return self.draft.emit_call(function, [], Zero(), mark)

    def _piece_of(self, var: Var, part: Iterations) -> Var:
        if isinstance(var, DropVar):
            return type(var)(_with_rows(var.aval, part.hi - part.lo))
        fresh = self._like(var, _with_rows(var.aval, part.hi - part.lo))
        known = self.pieces.setdefault(var, [])
        known.append(Piece(part.lo, part.hi, fresh))
        known.sort(key=lambda piece: piece.lo)
        return fresh

    def _finish_sums(self, outvars: Sequence[Var], sums: list[list[Var]], mark: Mark) -> None:
        for var, terms in zip(outvars, sums, strict=True):
            if terms:
                start = len(self.draft.eqns)
                kind = self.draft.kinds[var]
                total = self.draft.emit_call(_add_all, list(terms), kind, mark)
                rename_result(self.draft.eqns, start, total, var)
                self.draft.place[var] = mark

    def _concatenate(self, var: Var, mark: Mark) -> None:
        """The whole of a stacked output, made where its last piece is made."""
        start = len(self.draft.eqns)
        kind: Kind = self.draft.kinds.get(var, Whole())
        parts: list[Atom] = [piece.var for piece in self.pieces[var]]
        joined = self.draft.emit_call(_concatenate_rows, parts, kind, mark)
        rename_result(self.draft.eqns, start, joined, var)
        self.draft.place[var] = mark

    def _rows(self, value: Atom, lo: int, hi: int, mark: Mark) -> Atom:
        """Rows lo..hi-1 of a stacked input, for the scan at `mark`."""
        if isinstance(value, Literal):
            return self.draft.emit_call(_slice(lo, hi), [value], Whole(), mark)
        key = (value, lo, hi)
        if key not in self.sliced:
            self.sliced[key] = self._make_rows(value, lo, hi, mark)
        return self.sliced[key]

    def _make_rows(self, var: Var, lo: int, hi: int, mark: Mark) -> Var:
        draft = self.draft
        if var in self.pieces:
            return self._rows_of_pieces(var, lo, hi, mark)
        kind = draft.kinds.get(var, Whole())
        if var in draft.place:  # sliced where it is made: only the rows travel
            return draft.emit_call(_slice(lo, hi), [var], kind, draft.place[var])
        source = self.inputs[var]
        if not isinstance(source, WholeInput):
            return draft.emit_call(_slice(lo, hi), [var], kind, mark)
        rows = draft.add_whole_input(splice_result(draft.prologue, _slice(lo, hi), [source.var]))
        draft.kinds[rows] = kind
        return rows

    def _rows_of_pieces(self, var: Var, lo: int, hi: int, mark: Mark) -> Var:
        kind = self.draft.kinds.get(var, Whole())
        found: list[Atom] = []
        for piece in self.pieces[var]:
            a, b = max(lo, piece.lo), min(hi, piece.hi)
            if a >= b:
                continue
            if (a, b) == (piece.lo, piece.hi):
                found.append(piece.var)
            else:
                function = _slice(a - piece.lo, b - piece.lo)
                at = self.draft.place[piece.var]
                found.append(self.draft.emit_call(function, [piece.var], kind, at))
        if len(found) == 1 and isinstance(found[0], Var):
            return found[0]
        return self.draft.emit_call(_concatenate_rows, found, kind, mark)


def _only_adds_up(eqn: JaxprEqn, num_consts: int, index: int) -> bool:
    """Whether carry `index` is only ever added to: body(c, …) = c + f(…)."""
    body, _ = open_jaxpr(eqn.params["jaxpr"])
    carry, result = body.invars[num_consts + index], body.outvars[index]
    if sum(v is result for v in body.outvars) != 1 or any(v is carry for v in body.outvars):
        return False
    readers = [e for e in body.eqns if any(v is carry for v in e.invars)]
    return (
        len(readers) == 1
        and readers[0].primitive.name in ("add", "add_any")
        and readers[0].outvars[0] is result
        and sum(v is carry for v in readers[0].invars) == 1
        and not any(v is result for e in body.eqns for v in e.invars)
    )


def _with_rows(aval: ShapedArray, rows: int) -> ShapedArray:
    return aval.update(shape=(rows, *aval.shape[1:]))


def _slice(lo: int, hi: int) -> Callable[[Any], Any]:
    return lambda x: lax.slice_in_dim(x, lo, hi, axis=0)


def _zeros_of(aval: ShapedArray) -> Callable[[], Any]:
    return lambda: lax.full(aval.shape, 0, aval.dtype)


def _add_all(first: Any, *rest: Any) -> Any:
    for term in rest:
        first = lax.add(first, term)
    return first


def _concatenate_rows(*parts: Any) -> Any:
    return lax.concatenate(parts, 0)
