"""Compute once what the microbatch region computes twice, and drop what nobody needs.

A metrics pass beside the loss, a generator run for two losses: without this the second forward
pass would run through the pipeline on its own, and cuts in program order would carry both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetpass._jax import Atom, DropVar, JaxprEqn, Literal, Var, make_eqn, make_jaxpr_value
from hetpass.frontend.structure import Key, aval_key, equation_key, literal_key
from hetpass.ir.program import OffsetInput, StepProgram


def merge_common_subexpressions(program: StepProgram, backward: Sequence[bool]) -> StepProgram:
    """The program with equal region equations merged and dead ones dropped.

    Equations are equal if primitive, parameters, operands and result types are. Kept apart are:
    equations with effects; those that `jax.checkpoint` recomputes, since merging them with the
    forward ones would undo the recomputation; a forward and a backward equation, since the merged
    value would have to be held in between; and two whose results the epilogue reads under two
    names.

    Args:
      backward: one per region equation, as `backward_marks` gives it.
    """
    merged = _merge(program, backward)
    eqns, origin, outvars = _live(*merged)
    region = make_jaxpr_value(program.region.invars, outvars, eqns)
    # Kinds of variables inside scans are kept with the rest; those of dropped ones do no harm.
    return replace(program, region=region, origin=tuple(origin))


def _merge(
    program: StepProgram, backward: Sequence[bool]
) -> tuple[list[JaxprEqn], list[int], list[Atom]]:
    region, recomputed = program.region, program.traced.recomputed
    results = {v for v in region.outvars if isinstance(v, Var)}
    renamed = _same_inputs(program)
    seen: dict[Key, int] = {}
    eqns: list[JaxprEqn] = []
    origin: list[int] = []

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    for eqn, source, late in zip(region.eqns, program.origin, backward, strict=True):
        operands = [read(a) for a in eqn.invars]
        new = eqn
        if any(a is not b for a, b in zip(operands, eqn.invars, strict=True)):
            new = make_eqn(eqn, operands, eqn.outvars)
        if not eqn.effects and not recomputed[source]:
            key = (late, equation_key(eqn), tuple(_atom_key(a) for a in operands))
            first = seen.get(key)
            if first is None:
                seen[key] = len(eqns)
            elif _same_results(program, eqns[first], eqn, results):
                eqns[first] = _give_names(eqns[first], eqn)
                for kept, dropped in zip(eqns[first].outvars, eqn.outvars, strict=True):
                    if kept is not dropped:
                        renamed[dropped] = kept
                    if dropped in results:
                        results.add(kept)
                continue
        eqns.append(new)
        origin.append(source)
    return eqns, origin, [read(a) for a in region.outvars]


def _same_inputs(program: StepProgram) -> dict[Var, Var]:
    """Region input -> the first one that is always equal.

    The prologue may cast a parameter once for the loss and once for the metrics. It stays as it is;
    only the region reads one of the two.
    """
    same: dict[Var, Var] = {}
    seen: dict[Key, JaxprEqn] = {}
    for eqn in program.prologue:
        if not eqn.effects:
            operands = tuple(
                literal_key(a) if isinstance(a, Literal) else same.get(a, a) for a in eqn.invars
            )
            first = seen.setdefault((equation_key(eqn), operands), eqn)
            same.update(zip(eqn.outvars, first.outvars, strict=True))
    renamed: dict[Var, Var] = {}
    canonical: dict[Key, Var] = {}
    for var, source in zip(program.region.invars, program.region_inputs, strict=True):
        if isinstance(source, OffsetInput):
            key: Key = source
        else:
            full = replace(source, var=same.get(source.var, source.var))
            key = full, aval_key(var.aval), program.kinds.get(var)
        renamed[var] = canonical.setdefault(key, var)
    return renamed


def _atom_key(atom: Atom) -> Key:
    return literal_key(atom) if isinstance(atom, Literal) else atom


def _same_results(
    program: StepProgram, kept: JaxprEqn, dropped: JaxprEqn, results: set[Var]
) -> bool:
    pairs = list(zip(kept.outvars, dropped.outvars, strict=True))
    return all(
        program.kinds.get(a) == program.kinds.get(b)
        or isinstance(a, DropVar)
        or isinstance(b, DropVar)
        for a, b in pairs
    ) and not any(a in results and b in results for a, b in pairs)


def _give_names(kept: JaxprEqn, dropped: JaxprEqn) -> JaxprEqn:
    """Results that only the dropped equation names are named in the kept one."""
    pairs = list(zip(kept.outvars, dropped.outvars, strict=True))
    if not any(isinstance(a, DropVar) and not isinstance(b, DropVar) for a, b in pairs):
        return kept
    names = [b if isinstance(a, DropVar) else a for a, b in pairs]
    return make_eqn(kept, kept.invars, names)


def _live(
    eqns: Sequence[JaxprEqn], origin: Sequence[int], outvars: list[Atom]
) -> tuple[list[JaxprEqn], list[int], list[Atom]]:
    needed = {v for v in outvars if isinstance(v, Var)}
    kept: list[tuple[JaxprEqn, int]] = []
    for eqn, source in zip(reversed(eqns), reversed(origin), strict=True):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, Var))
            kept.append((eqn, source))
    kept.reverse()
    return [e for e, _ in kept], [s for _, s in kept], outvars
