"""A `cond` over values of several stages becomes one per stage.

`optax.MultiSteps` and `apply_if_finite` choose between two whole states under one predicate. Each
stage gets the same `cond` restricted to the outputs that live there, with the operands that these
need. If a branch itself mixes large values of several stages (it clips by the global norm), the
branches are run both, outside, and each output is selected: the same numbers, and then every
equation of the branch finds its own stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax import lax

from hetpass._jax import Atom, DropVar, Jaxpr, JaxprEqn, Var, is_jaxpr, open_jaxpr
from hetpass.transforms.dead_code import restrict_cond
from hetpass.transforms.placement import Placement
from hetpass.transforms.region import rename_result, splice_result
from hetpass.transforms.sizes import SMALL_BYTES, aval_bytes
from hetpass.transforms.splice import inline

_NOT_SPECULATED = frozenset("while pure_callback io_callback custom_call ffi_call".split())
"""Never run for a branch that is not taken."""


@dataclass(frozen=True)
class SplitConds:
    """The rewritten equations. `changed`: stages must be found anew."""

    eqns: tuple[JaxprEqn, ...]
    changed: bool


def split_conds(eqns: Sequence[JaxprEqn], placement: Placement) -> SplitConds:
    """The same equations with every `cond` inside one stage, where that is possible."""
    result: list[JaxprEqn] = []
    changed = False
    for eqn in eqns:
        groups = _groups(eqn, placement)
        if len(groups) < 2:
            result.append(eqn)
            continue
        changed = True
        parts = [restrict_cond(eqn, keep) for keep in groups.values()]
        if _speculates(eqn) and any(
            _reads_far(part, stage, placement) for stage, part in zip(groups, parts, strict=True)
        ):
            result.extend(_opened(eqn))
        else:
            result.extend(parts)
    return SplitConds(tuple(result), changed)


def _groups(eqn: JaxprEqn, placement: Placement) -> dict[int, list[bool]]:
    """Per stage that holds outputs of a `cond`, which ones; empty for other equations."""
    if eqn.primitive.name != "cond" or eqn.effects:
        return {}
    if any(open_jaxpr(branch)[1] for branch in eqn.params["branches"]):
        return {}
    stages = [None if isinstance(v, DropVar) else placement.stage.get(v, 0) for v in eqn.outvars]
    return {
        stage: [s == stage for s in stages]
        for stage in sorted({s for s in stages if s is not None})
    }


def _reads_far(part: JaxprEqn, stage: int, placement: Placement) -> bool:
    """Whether an operand lives on another stage, small ones aside."""
    return any(
        isinstance(v, Var)
        and aval_bytes(v.aval) > SMALL_BYTES
        and placement.stage.get(v, 0) != stage
        for v in part.invars[1:]
    )


def _speculates(eqn: JaxprEqn) -> bool:
    def plain(jaxpr: Jaxpr) -> bool:
        for inner in jaxpr.eqns:
            if inner.effects or inner.primitive.name in _NOT_SPECULATED:
                return False
            for value in inner.params.values():
                parts = value if isinstance(value, (tuple, list)) else (value,)
                bodies = [open_jaxpr(p)[0] for p in parts if is_jaxpr(p)]
                if not all(plain(body) for body in bodies):
                    return False
        return True

    return all(plain(open_jaxpr(branch)[0]) for branch in eqn.params["branches"])


def _opened(eqn: JaxprEqn) -> list[JaxprEqn]:
    """All branches, one after the other, and a selection for every output."""
    result: list[JaxprEqn] = []
    outs = []
    for branch in eqn.params["branches"]:
        spliced = inline(open_jaxpr(branch)[0], eqn.invars[1:])
        result.extend(spliced.eqns)
        outs.append(spliced.outs)
    for var, *cases in zip(eqn.outvars, *outs, strict=True):
        if isinstance(var, DropVar):
            continue
        start = len(result)
        chosen = splice_result(result, _select, [eqn.invars[0], *cases])
        rename_result(result, start, chosen, var)
    return result


def _select(index: Atom, *cases: Atom) -> Atom:
    """Case `index`, clamped as `cond` clamps it."""
    clamped = lax.clamp(0, index, len(cases) - 1)
    which = clamped.astype(bool) if len(cases) == 2 else clamped
    return lax.select_n(which, *cases)
