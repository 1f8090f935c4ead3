"""A backward scan over layers, cut in two: cotangents first, weight gradients in a scan of its own.

    c, dws = scan(body, c, (w, r))         # dws: stacked, summed over the examples

becomes

    c, kept = scan(body_b, c, (w, r))      # what leads to the carry
    dws = scan(body_w, (), (r, kept))      # the rest of the body

so that the second one may wait (`split_weights`). What `body_w` reads of `body_b` is stacked and
kept, and so are carries that it reads; cheap layout is done again instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetpass._jax import (
    Jaxpr,
    JaxprEqn,
    Var,
    close,
    make_jaxpr_value,
    make_var,
    open_jaxpr,
    scan_counts,
    scan_params,
)
from hetpass.analysis.region_recipes import region_recipes
from hetpass.ir.kinds import Batched, Kind, Partial, Whole, Zero
from hetpass.ir.program import Layered
from hetpass.transforms.dead_code import live_equations
from hetpass.transforms.localize import LocalCode, localize
from hetpass.transforms.region import RegionDraft, marks

_B, _W = (0, "backward"), (0, "weight")


def defer_scan_weights(layered: Layered) -> Layered:
    """The same program with every backward scan over several layers cut, where that can be."""
    draft = RegionDraft.of(layered)
    for eqn, mark in zip(layered.program.region.eqns, marks(layered), strict=True):
        cut = _cut(eqn, draft.kinds) if mark.backward and _over_layers(eqn) else None
        for part in [eqn] if cut is None else cut.eqns:
            draft.emit(part, mark)
        if cut is not None:
            draft.kinds.update(cut.kinds)
    program = layered.program
    for var, output in zip(program.region.outvars, program.region_outputs, strict=True):
        draft.add_output(var, output)
    return draft.finish()


def _over_layers(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and not eqn.effects


@dataclass(frozen=True)
class _Cut:
    """The two scans, and the kinds of the stacked values between them and inside."""

    eqns: tuple[JaxprEqn, JaxprEqn]
    kinds: Mapping[Var, Kind]


@dataclass(frozen=True)
class _Body:
    """A scan's body, by groups of its inputs and outputs.

    Attributes:
      late: per stacked output, whether the second scan makes it: a sum over examples (a weight
        gradient) that the first has no part in.
    """

    eqn: JaxprEqn
    jaxpr: Jaxpr
    num_consts: int
    num_carry: int
    late: tuple[bool, ...]

    @property
    def carries(self) -> list[Var]:
        return list(self.jaxpr.invars[self.num_consts : self.num_consts + self.num_carry])

    def operands(self, wanted: Sequence[Var]) -> tuple[list[Var], list[object], int]:
        """Those constants and rows of the body that are wanted, in order; what the scan is given
        for them; how many are constants."""
        rows = self.num_consts + self.num_carry
        pairs = list(zip(self.jaxpr.invars, self.eqn.invars, strict=True))
        consts = [p for p in pairs[: self.num_consts] if p[0] in wanted]
        chosen = consts + [p for p in pairs[rows:] if p[0] in wanted]
        return [v for v, _ in chosen], [given for _, given in chosen], len(consts)


def _cut(eqn: JaxprEqn, kinds: Mapping[Var, Kind]) -> _Cut | None:
    """None if the scan has no weight gradients, or what would be kept is of no simple kind."""
    num_consts, num_carry = scan_counts(eqn)
    jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
    maker = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    sums = [isinstance(kinds.get(v), Partial) for v in eqn.outvars]
    sums[:num_carry] = [False] * num_carry
    soon = live_equations(
        jaxpr.eqns, [v for v, is_sum in zip(jaxpr.outvars, sums, strict=True) if not is_sum]
    )
    late = tuple(
        is_sum and isinstance(v, Var) and v in maker and not soon[maker[v]]
        for v, is_sum in zip(jaxpr.outvars[num_carry:], sums[num_carry:], strict=True)
    )
    if consts or not any(late):
        return None
    body = _Body(eqn, jaxpr, num_consts, num_carry, late)
    homes = [_B if early else _W for early in soon]
    made = [v for v in jaxpr.outvars if isinstance(v, Var) and v in maker]
    localized = localize(jaxpr.eqns, homes, region_recipes(jaxpr.eqns, jaxpr.invars), made)
    first = localized.code.get(_B, LocalCode((), (), ()))
    second = localized.code.get(_W)
    if second is None or first.imports:
        return None
    carried = [v for v in second.inputs if v in body.carries]
    kept = list(dict.fromkeys([*second.imports, *carried]))
    found = [_stacked(kinds.get(v)) for v in kept]
    if any(kind is None for kind in found):
        return None
    length = eqn.params["length"]
    stacks = [make_var(v.aval.update(shape=(length, *v.aval.shape))) for v in kept]
    return _Cut(
        (_first(body, first, kept, stacks), _second(body, second, kept, stacks)),
        {s: k for s, k in zip(stacks, found, strict=True) if k is not None},
    )


def _results(body: _Body, late: bool) -> list[object]:
    """The body's results that belong to the first scan (carries among them) or to the second."""
    outs = list(body.jaxpr.outvars)
    rows = [
        v for v, is_late in zip(outs[body.num_carry :], body.late, strict=True) if is_late == late
    ]
    return rows if late else [*outs[: body.num_carry], *rows]


def _stacked(kind: Kind | None) -> Kind | None:
    """The kind of a value that is stacked over the iterations; None where that is not simple."""
    if isinstance(kind, Batched):
        return replace(kind, dim=kind.dim + 1)
    return kind if isinstance(kind, (Whole, Zero)) else None


def _first(body: _Body, code: LocalCode, kept: Sequence[Var], stacks: Sequence[Var]) -> JaxprEqn:
    eqn, early = body.eqn, _results(body, late=False)
    wanted = [*code.inputs, *(v for v in early if isinstance(v, Var))]
    inner, given, num_consts = body.operands(wanted)
    carries = body.carries
    invars = [*inner[:num_consts], *carries, *inner[num_consts:]]
    start = list(eqn.invars[body.num_consts : body.num_consts + body.num_carry])
    rows = [v for v, late in zip(eqn.outvars[body.num_carry :], body.late, strict=True) if not late]
    jaxpr = make_jaxpr_value(invars, [*early, *kept], code.eqns)
    return eqn.replace(
        invars=[*given[:num_consts], *start, *given[num_consts:]],
        outvars=[*eqn.outvars[: body.num_carry], *rows, *stacks],
        params=scan_params(
            eqn,
            close(jaxpr),
            length=eqn.params["length"],
            num_consts=num_consts,
            num_carry=body.num_carry,
            num_xs=len(inner) - num_consts,
            num_ys=len(rows) + len(stacks),
        ),
    )


def _second(body: _Body, code: LocalCode, kept: Sequence[Var], stacks: Sequence[Var]) -> JaxprEqn:
    eqn, results = body.eqn, _results(body, late=True)
    wanted = [*code.inputs, *(v for v in results if isinstance(v, Var))]
    inner, given, num_consts = body.operands([v for v in wanted if v not in kept])
    outs = [v for v, late in zip(eqn.outvars[body.num_carry :], body.late, strict=True) if late]
    return eqn.replace(
        invars=[*given, *stacks],
        outvars=outs,
        params=scan_params(
            eqn,
            close(make_jaxpr_value([*inner, *kept], results, code.eqns)),
            length=eqn.params["length"],
            num_consts=num_consts,
            num_carry=0,
            num_xs=len(inner) - num_consts + len(kept),
            num_ys=len(outs),
        ),
    )
