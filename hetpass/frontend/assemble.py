"""From the phases of a step to its StepProgram: what is live, what crosses, what is built at b."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from hetpass import _jax
from hetpass._jax import JaxprEqn, Var
from hetpass.frontend.emit import emit
from hetpass.frontend.instantiate import Region
from hetpass.frontend.phases import Phases
from hetpass.frontend.rules.values import Val
from hetpass.ir.kinds import Batched, Kind, Partial, Position
from hetpass.ir.program import (
    Accumulated,
    Joined,
    OffsetInput,
    RegionInput,
    RegionOutput,
    SliceInput,
    StepProgram,
    WholeInput,
)


@dataclass(frozen=True)
class Liveness:
    """Which equations run where.

    Attributes:
      prologue, region, epilogue: indices of equations, in program order.
      results: region variables (at B) whose full value the epilogue or the caller needs.
    """

    prologue: tuple[int, ...]
    region: tuple[int, ...]
    epilogue: tuple[int, ...]
    results: tuple[Var, ...]


@dataclass(frozen=True)
class HeavyLate:
    """The first heavy equation that would run at full batch after the region."""

    index: int
    share: float


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return [a for a in atoms if isinstance(a, Var)]


def liveness(phases: Phases) -> Liveness:
    """Keep what the step's results need, and effects."""
    eqns = phases.traced.jaxpr.eqns
    needed = _needed_full(phases)
    while True:
        region_needed = _region_needed(phases, needed)
        prologue = _prologue(phases, region_needed)
        available = {v for i in prologue for v in eqns[i].outvars}
        epilogue, full = _epilogue(phases, available)
        results = [
            v
            for v in full
            if v in phases.producer and phases.info[v].phase == "region" and v not in available
        ]
        if set(results) <= needed:
            break
        needed |= set(results)
    live = sorted(_ancestors(phases, results))
    return Liveness(tuple(prologue), tuple(live), tuple(epilogue), tuple(results))


def _needed_full(phases: Phases) -> set[Var]:
    _, full = _epilogue(phases, set())
    return {v for v in full if v in phases.producer and phases.info[v].phase == "region"}


def _reads(phases: Phases, index: int) -> list[tuple[Var, bool]]:
    """What the region's equation reads: (variable, whether its value before the region)."""
    skipped = phases.ones.get(index, ())
    early = phases.early_reads.get(index, ())
    return [
        (a, i in early or not _inside(phases, a))
        for i, a in enumerate(phases.traced.jaxpr.eqns[index].invars)
        if isinstance(a, Var) and i not in skipped
    ]


def _inside(phases: Phases, var: Var) -> bool:
    """Whether the region makes the value itself."""
    index = phases.producer.get(var)
    return index is not None and (phases.phase[index] == "region" or index in phases.free)


def _ancestors(phases: Phases, results: Sequence[Var]) -> set[int]:
    """Region equations that the given region variables need."""
    found: set[int] = set()
    pending = list(results)
    while pending:
        index = phases.producer.get(pending.pop())
        if index is None or index in found:
            continue
        found.add(index)
        pending += [v for v, early in _reads(phases, index) if not early]
    return found


def _region_needed(phases: Phases, results: set[Var]) -> set[Var]:
    """Full-batch variables that the live region reads."""
    live = _ancestors(phases, list(results))
    return {v for index in live for v, early in _reads(phases, index) if early}


def _prologue(phases: Phases, wanted: set[Var]) -> list[int]:
    found: set[int] = set()
    pending = list(wanted)
    while pending:
        index = phases.producer.get(pending.pop())
        if index is None or index in found:
            continue
        found.add(index)
        pending += _variables(phases.traced.jaxpr.eqns[index].invars)
    return sorted(found)


def _epilogue(phases: Phases, available: set[Var]) -> tuple[list[int], list[Var]]:
    """Equations to run after the region, and every full-batch value that they or the results
    read, in program order."""
    eqns = phases.traced.jaxpr.eqns
    full: dict[Var, None] = dict.fromkeys(_variables(phases.traced.jaxpr.outvars))
    chosen: list[int] = []
    for index in range(len(eqns) - 1, -1, -1):
        eqn = eqns[index]
        wanted = [v for v in eqn.outvars if v in full and v not in available]
        if phases.phase[index] == "region":
            for var in wanted:  # its scale is applied in the epilogue
                val = phases.info[var].val
                full.update(dict.fromkeys(val.factors if val else ()))
            continue
        if wanted or eqn.effects:
            chosen.append(index)
            full.update(dict.fromkeys(_variables(eqn.invars)))
    chosen.reverse()
    return chosen, list(full)


def heavy_late(phases: Phases, live: Liveness, share: float) -> HeavyLate | None:
    """Whether more than `share` of the batch's FLOPs would run at full batch in the epilogue."""
    eqns = phases.traced.jaxpr.eqns

    def on_batch(index: int) -> float:
        eqn = eqns[index]
        touches = any(phases.context.grows(a) for a in [*eqn.invars, *eqn.outvars])
        return phases.flops[index] if touches else 0.0

    late = [(i, on_batch(i)) for i in live.epilogue]
    total = sum(on_batch(i) for i in (*live.region, *live.epilogue, *live.prologue))
    work = sum(w for _, w in late)
    if total == 0 or work <= share * total:
        return None
    heaviest = max(w for _, w in late)
    first = next(i for i, w in late if w >= 0.5 * heaviest)
    return HeavyLate(first, work / total)


def assemble(
    phases: Phases, live: Liveness, num_microbatches: int, *, accumulate_dtype: str | None
) -> StepProgram:
    """Build the StepProgram.

    Raises:
      Mixes: a size cannot be had at b.
    """
    traced = phases.traced
    eqns = traced.jaxpr.eqns
    values = {v: info.val for v, info in phases.info.items() if info.val is not None}
    region = Region(phases.probes, phases.context, num_microbatches, values)
    body: list[JaxprEqn] = []
    origin: list[int] = []
    read: dict[Var, None] = {}
    for index in live.region:
        made = region.equation(
            eqns[index], phases.ones.get(index, ()), phases.early_reads.get(index, ())
        )
        body += made
        origin += [index] * len(made)
        read.update((v, None) for v, early in _reads(phases, index) if early)
    inputs, invars = _inputs(phases, region, read)
    outputs: list[RegionOutput] = []
    outvars: list[Var] = []
    renamed: dict[Var, Var] = {}
    epilogue = [(i, 1, eqns[i]) for i in live.epilogue]
    for var in live.results:
        val = values[var]
        target = var if not val.factors else _jax.make_var(var.aval)
        outputs.append(_output(target, val, accumulate_dtype))
        outvars.append(region.variable(var))
        if val.factors:
            renamed[var] = target
            scale = scaled(eqns[phases.producer[var]], target, val.factors, var)
            epilogue += [(phases.producer[var], 0, e) for e in scale]
    epilogue.sort(key=lambda item: item[:2])
    return StepProgram(
        traced=traced,
        num_microbatches=num_microbatches,
        prologue=tuple(eqns[i] for i in live.prologue),
        region=_jax.make_jaxpr_value(invars, outvars, body),
        region_inputs=inputs,
        region_outputs=tuple(outputs),
        kinds=region.kinds,
        origin=tuple(origin),
        epilogue=tuple(e for _, _, e in epilogue),
        outvars=tuple(traced.jaxpr.outvars),
    )


def _inputs(
    phases: Phases, region: Region, read: dict[Var, None]
) -> tuple[tuple[RegionInput, ...], list[Var]]:
    inputs: list[RegionInput] = []
    invars: list[Var] = []
    for var in read:
        inside = phases.info[var].phase != "early"
        kind = region.full_kind(var) if inside else region.values[var].kind
        inputs.append(SliceInput(var, kind) if isinstance(kind, Batched) else WholeInput(var))
        invars.append(region.full_variable(var) if inside else region.variable(var))
    if region.offset is not None:
        inputs.append(OffsetInput())
        invars.append(region.offset)
    return tuple(inputs), invars


def _output(target: Var, val: Val, accumulate_dtype: str | None) -> RegionOutput:
    kind: Kind = val.kind
    if isinstance(kind, Position):
        return Joined(target, Batched(kind.dim, 1))
    if isinstance(kind, Batched):
        return Joined(target, Batched(kind.dim, kind.outer or 1))
    dtype = target.aval.dtype
    if isinstance(kind, Partial):
        return Accumulated(target, kind.op, accumulator_dtype(dtype, accumulate_dtype))
    return Accumulated(target, "same", dtype)


def accumulator_dtype(dtype: Any, at_least: str | None = None) -> Any:
    """At least float32 for floats, and never below the value's own type."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return jnp.promote_types(dtype, jnp.dtype(at_least or "float32"))


def scaled(eqn: JaxprEqn, source: Var, by: Sequence[Var] | float, result: Var) -> list[JaxprEqn]:
    """Equations for `result = source * by`: a number, or the product of scalar variables.

    They count as the source of `eqn`.
    """
    factors = [] if isinstance(by, float) else list(by)

    def multiply(value: Any, *scalars: Any) -> Any:
        if isinstance(by, float):
            return value * jnp.asarray(by, value.dtype)
        for scalar in scalars:
            value = value * jnp.reshape(scalar, ()).astype(value.dtype)
        return value

    return emit(eqn, multiply, [source, *factors], [result])[0]
