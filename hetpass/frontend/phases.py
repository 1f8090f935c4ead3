"""Before, inside or after the region: one walk over the step, in program order.

early    full-batch values that the inputs give without the region: whole values, and cheap
         equations on the whole batch (the sum of a loss mask, a permutation of the examples)
region   values of the microbatch program
late     full-batch values that need a result of the region
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp

from hetpass._jax import JaxprEqn, Var
from hetpass._jax import Literal as JaxLiteral
from hetpass.analysis.flops import DATA_MOVEMENT, ELEMENTWISE, equation_flops
from hetpass.frontend.probes import Probes
from hetpass.frontend.rules.apply import apply
from hetpass.frontend.rules.linear import JOINTLY_LINEAR, LINEAR_IN_EACH
from hetpass.frontend.rules.values import (
    WHOLE,
    Context,
    Mixes,
    Val,
    is_partial,
    literal,
    needs_full,
)
from hetpass.ir.kinds import Batched, Partial, Whole
from hetpass.ir.program import Traced

Phase = Literal["early", "region", "late"]

_SCALABLE = {*JOINTLY_LINEAR, *LINEAR_IN_EACH, "select_n", "scan", "while", "cond"}
"""Primitives that may be linear in a scale; bodies of control flow are looked into."""

CHEAP_SHARE = 0.05
"""The largest share of the step's FLOPs that a full-batch value may cost before the region."""


@dataclass
class Info:
    """What the walk knows of a full-batch variable.

    Attributes:
      phase: where its equation runs.
      val: what the region may take it for; None: nothing.
      cost_floor: FLOPs, at least, of computing it from the inputs alone at the full batch
        (the costliest path to it); infinite if that is not possible.
    """

    phase: Phase
    val: Val | None
    cost_floor: float


@dataclass
class Phases:
    """The result of the walk.

    Attributes:
      info: by full-batch variable.
      phase: by equation index.
      ones: equation index -> operands that the region replaces by 1 (their scale waits).
      reasons: equation index -> why it is late.
      early_reads: equation index -> operands that the region takes from the value before the
        region, whatever their phase.
      mixed: full-batch values from before the region that hold no example of their own, and why.
      tails: indices of equations that are linear in parts of sums, and give as much as they read.
      flops: by equation index, at the full batch.
      free: early equations that the region may run for itself: they move whole values about, or
        make them from constants alone (a causal mask). Run before the region, their results
        would be held for the whole step.
      constant: those of them that are made from constants alone.
    """

    traced: Traced
    probes: Probes
    context: Context
    info: dict[Var, Info] = field(default_factory=dict)
    phase: list[Phase] = field(default_factory=list)
    ones: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[int, Mixes] = field(default_factory=dict)
    early_reads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    mixed: dict[Var, Mixes] = field(default_factory=dict)
    tails: list[int] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    free: set[int] = field(default_factory=set)
    constant: set[int] = field(default_factory=set)
    producer: dict[Var, int] = field(default_factory=dict)
    early_cost: dict[Var, float] = field(default_factory=dict)

    def view(self, atom: Any) -> Info:
        if isinstance(atom, JaxLiteral):
            return Info("early", literal(atom), 0.0)
        return self.info[atom]


def walk(traced: Traced, probes: Probes) -> Phases:
    """Find the phase and the kind of every value of the step."""
    size = traced.batch_size
    assert size is not None
    context = Context(probes.growth, size, apply)
    phases = Phases(traced, probes, context)
    for leaf, var in zip(traced.inputs, traced.jaxpr.invars, strict=True):
        view = full_view(var, context, leaf.batch_dim)
        if leaf.zeros and view == WHOLE:
            view = Val(Whole(), const=0)
        phases.info[var] = Info("early", view, 0.0)
    phases.flops = [equation_flops(e) for e in traced.jaxpr.eqns]
    budget = CHEAP_SHARE * sum(phases.flops)
    for index, eqn in enumerate(traced.jaxpr.eqns):
        _place(phases, index, eqn, budget)
    _postpone_tails(phases)
    return phases


def _postpone_tails(phases: Phases) -> None:
    """Linear tails run after the region, unless the region itself reads what they give."""
    tails, read_inside = set(phases.tails), set[Var]()
    for index in range(len(phases.phase) - 1, -1, -1):
        if phases.phase[index] != "region":
            continue
        eqn = phases.traced.jaxpr.eqns[index]
        if index not in tails or any(v in read_inside for v in eqn.outvars):
            skipped = (*phases.ones.get(index, ()), *phases.early_reads.get(index, ()))
            operands = [a for k, a in enumerate(eqn.invars) if k not in skipped]
            read_inside.update(a for a in operands if isinstance(a, Var))
            continue
        phases.phase[index] = "late"
        phases.ones.pop(index, None)
        phases.early_reads.pop(index, None)
        phases.reasons[index] = needs_full(eqn, _known(phases, eqn))
        for var in eqn.outvars:
            phases.info[var] = Info("late", None, phases.info[var].cost_floor)


def _known(phases: Phases, eqn: JaxprEqn) -> list[Val]:
    vals = (phases.view(a).val for a in eqn.invars)
    return [v for v in vals if v is not None]


def full_view(var: Var, context: Context, dim: int | None = None) -> Val | None:
    """What the region may take a full-batch value for: itself, or its microbatch's slice."""
    dims = context.batch_dims(var)
    if dims == []:
        return WHOLE
    if dims is None or len(dims) != 1 or dim not in (None, dims[0]):
        return None
    growth = context.growth_of(var)
    shape = var.aval.shape
    size = shape[dims[0]]
    if growth is None or growth[dims[0]] != size or size % context.batch_size:
        return None
    return Val(Batched(dims[0], 1))


def _place(phases: Phases, index: int, eqn: JaxprEqn, budget: float) -> None:
    infos = [phases.view(a) for a in eqn.invars]
    own = phases.flops[index] if _touches_batch(phases, eqn) else 0.0
    floor = math.inf if eqn.effects else own + max((i.cost_floor for i in infos), default=0.0)
    grows = any(phases.context.grows(v) for v in eqn.outvars)
    all_early = all(i.phase == "early" and i.val is not None for i in infos)
    if eqn.effects:
        _place_effect(phases, index, eqn, infos)
        return
    if all_early and not grows and all(_plainly_whole(i.val) for i in infos):
        try:
            vals = apply(eqn, [i.val for i in infos if i.val is not None], phases.context)
        except Mixes:
            vals = [WHOLE for _ in eqn.outvars]
        _record(phases, index, eqn, "early", vals, floor)
        _note_free(phases, index, eqn)
        return
    for attempt in (_as_it_is, _with_early_operands, _with_scales_left_for_later):
        try:
            found: _Found | None = attempt(phases, eqn, infos, budget)
        except Mixes as refusal:
            phases.reasons.setdefault(index, refusal)
            continue
        if found is None:
            continue
        vals = found.results
        if _is_linear_tail(eqn, found):
            if _cheap(phases, eqn, floor, budget):
                break
            phases.tails.append(index)
        if found.early:
            phases.early_reads[index] = found.early
        if found.ones:
            phases.ones[index] = found.ones
        whole = all(_plainly_whole(v) for v in found.operands)
        before = all(i.phase == "early" or k in found.early for k, i in enumerate(infos))
        phase: Phase = "early" if whole and before and not grows else "region"
        _record(phases, index, eqn, phase, vals, floor)
        phases.reasons.pop(index, None)
        return
    if _cheap(phases, eqn, floor, budget):
        full = [full_view(v, phases.context) for v in eqn.outvars]
        _record(phases, index, eqn, "early", full, floor)
        reason = phases.reasons.pop(index, None) or _mixed_operand(phases, eqn)
        if reason is not None:
            phases.mixed.update((v, reason) for v in eqn.outvars if phases.info[v].val is None)
        return
    if all(i.phase != "late" for i in infos):
        phases.reasons.setdefault(index, needs_full(eqn, _known(phases, eqn)))
    _inherit_reason(phases, index, eqn)
    _record(phases, index, eqn, "late", [None for _ in eqn.outvars], floor)


_LAYOUT = frozenset("broadcast_in_dim expand_dims reshape squeeze transpose".split())


def _note_free(phases: Phases, index: int, eqn: JaxprEqn) -> None:
    made = [phases.producer.get(a, -1) for a in eqn.invars if isinstance(a, Var)]
    simple = eqn.primitive.name in ELEMENTWISE | DATA_MOVEMENT
    if simple and all(i in phases.constant for i in made):
        phases.constant.add(index)
        phases.free.add(index)
    elif eqn.primitive.name in _LAYOUT:
        phases.free.add(index)


def _place_effect(phases: Phases, index: int, eqn: JaxprEqn, infos: Sequence[Info]) -> None:
    """A callback runs once per step, on full values; on values of the batch it is refused."""
    on_batch = [a for a, i in zip(eqn.invars, infos, strict=True) if phases.context.grows(a)]
    if on_batch and phases.traced.batch_size is not None:
        phases.reasons[index] = Mixes(eqn, "is a callback that takes values of the batch")
    early = all(i.phase == "early" for i in infos)
    _record(phases, index, eqn, "early" if early else "late", [None for _ in eqn.outvars], math.inf)


def _record(
    phases: Phases,
    index: int,
    eqn: JaxprEqn,
    phase: Phase,
    vals: Sequence[Val | None],
    cost_floor: float,
) -> None:
    phases.phase.append(phase)
    for var, val in zip(eqn.outvars, vals, strict=True):
        phases.info[var] = Info(phase, val, cost_floor)
        phases.producer[var] = index


def _plainly_whole(val: Val | None) -> bool:
    return val is not None and isinstance(val.kind, Whole) and not val.factors


@dataclass(frozen=True)
class _Found:
    """A way to take an equation into the region.

    Attributes:
      operands, results: their values.
      early: positions of operands that are wanted before the region.
      ones: operands that the region replaces by 1.
    """

    operands: list[Val]
    results: list[Val]
    early: tuple[int, ...] = ()
    ones: tuple[int, ...] = ()


def _as_it_is(phases: Phases, eqn: JaxprEqn, infos: Sequence[Info], budget: float) -> _Found | None:
    del budget
    operands = [i.val for i in infos if i.val is not None]
    if len(operands) < len(infos):
        return None
    return _Found(operands, apply(eqn, operands, phases.context))


def _early_views(
    phases: Phases, eqn: JaxprEqn, infos: Sequence[Info], budget: float
) -> tuple[list[Val | None], tuple[int, ...]]:
    """Operands that the region cannot take as they are, replaced by full values if cheap."""
    views: list[Val | None] = []
    early: list[int] = []
    for i, (atom, info) in enumerate(zip(eqn.invars, infos, strict=True)):
        unfit = info.val is None or is_partial(info.val) or bool(info.val.factors)
        if unfit and isinstance(atom, Var) and info.cost_floor <= budget:
            full = full_view(atom, phases.context)
            if full is not None and _cost(phases, atom) <= budget:
                views.append(full)
                early.append(i)
                continue
        views.append(info.val)
    return views, tuple(early)


def _with_early_operands(
    phases: Phases, eqn: JaxprEqn, infos: Sequence[Info], budget: float
) -> _Found | None:
    views, early = _early_views(phases, eqn, infos, budget)
    operands = [v for v in views if v is not None]
    if not early or len(operands) < len(views):
        return None
    return _Found(operands, apply(eqn, operands, phases.context), early)


def _with_scales_left_for_later(
    phases: Phases, eqn: JaxprEqn, infos: Sequence[Info], budget: float
) -> _Found | None:
    """Scalars that are known only after the region become factors of the result."""
    if eqn.primitive.name not in _SCALABLE:
        return None
    views, early = _early_views(phases, eqn, infos, budget)
    ones = []
    for i, (atom, view) in enumerate(zip(eqn.invars, views, strict=True)):
        if view is None or is_partial(view):
            if not isinstance(atom, Var) or not _is_float_scalar(atom):
                return None
            views[i] = Val(Whole(), (atom,))
            ones.append(i)
    operands = [v for v in views if v is not None]
    on_batch = any(v.along_batch for v in operands)
    if not ones or not (on_batch or any(phases.context.grows(v) for v in eqn.outvars)):
        return None
    return _Found(operands, apply(eqn, operands, phases.context), early, tuple(ones))


def _is_float_scalar(var: Var) -> bool:
    aval = var.aval
    shape = getattr(aval, "shape", None)
    if shape is None or any(s != 1 for s in shape):
        return False
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _is_linear_tail(eqn: JaxprEqn, found: _Found) -> bool:
    """Linear work on partial values that does not shrink them: once after the region will do."""
    if any(v.along_batch for v in found.operands):
        return False
    if not any(isinstance(v.kind, Partial) for v in found.results):
        return False
    pairs = zip(eqn.invars, found.operands, strict=True)
    read = sum(a.aval.size for a, v in pairs if is_partial(v))
    return bool(2 * sum(v.aval.size for v in eqn.outvars) > read)


def _cost(phases: Phases, var: Var) -> float:
    """FLOPs of computing `var` from the step's inputs alone, at the full batch."""
    if var not in phases.early_cost:
        seen: set[int] = set()
        pending = [var]
        while pending:
            index = phases.producer.get(pending.pop())
            if index is None or index in seen:
                continue
            seen.add(index)
            eqn = phases.traced.jaxpr.eqns[index]
            pending += [a for a in eqn.invars if isinstance(a, Var)]
        batch = [i for i in seen if _touches_batch(phases, phases.traced.jaxpr.eqns[i])]
        phases.early_cost[var] = sum(phases.flops[i] for i in batch)
    return phases.early_cost[var]


def _touches_batch(phases: Phases, eqn: JaxprEqn) -> bool:
    return any(phases.context.grows(a) for a in [*eqn.invars, *eqn.outvars])


def _cheap(phases: Phases, eqn: JaxprEqn, floor: float, budget: float) -> bool:
    return floor <= budget and _affordable(phases, eqn, budget)


def _affordable(phases: Phases, eqn: JaxprEqn, budget: float) -> bool:
    operands = [a for a in eqn.invars if isinstance(a, Var)]
    own = equation_flops(eqn) if _touches_batch(phases, eqn) else 0.0
    return own + sum(_cost(phases, a) for a in operands) <= budget


def _mixed_operand(phases: Phases, eqn: JaxprEqn) -> Mixes | None:
    reasons = (phases.mixed.get(a) for a in eqn.invars if isinstance(a, Var))
    return next((r for r in reasons if r is not None), None)


def _inherit_reason(phases: Phases, index: int, eqn: JaxprEqn) -> None:
    """An equation is late for the reason of the first operand that has one."""
    mixed = _mixed_operand(phases, eqn)
    if mixed is not None:
        phases.reasons[index] = mixed
        return
    for atom in eqn.invars:
        if isinstance(atom, Var) and phases.info[atom].phase == "late":
            source = phases.producer[atom]
            if source in phases.reasons:
                phases.reasons[index] = phases.reasons[source]
                return
