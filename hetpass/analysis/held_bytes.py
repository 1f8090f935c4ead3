"""What the stages of a layered step hold in memory: estimates, before it is partitioned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hetpass._jax import Var
from hetpass.ir.program import Accumulated, Layered, LayerSpan, WholeInput

_MADE_AGAIN = frozenset("broadcast_in_dim iota convert_element_type reshape squeeze".split())
"""Cheap to make again from what is there: not held."""


def activation_bytes(layered: Layered, stage_of_layer: Sequence[int]) -> tuple[float, ...]:
    """Per stage, the bytes of one microbatch's forward values that its backward part reads."""
    region = layered.program.region
    maker = {v: i for i, eqn in enumerate(region.eqns) for v in eqn.outvars}
    held: dict[tuple[Var, int], float] = {}
    for i, eqn in enumerate(region.eqns):
        if not layered.backward[i]:
            continue
        for v in eqn.invars:
            j = maker.get(v, -1) if isinstance(v, Var) else -1
            if j < 0 or layered.backward[j] or region.eqns[j].primitive.name in _MADE_AGAIN:
                continue
            for stage, share in _shares(layered.spans[i], stage_of_layer):
                held[v, stage] = max(held.get((v, stage), 0.0), share * _bytes(v))
    return _by_stage(held, stage_of_layer)


def fixed_bytes(layered: Layered, stage_of_layer: Sequence[int]) -> tuple[float, ...]:
    """Per stage, the bytes of its share of the state, and of its gradient accumulators.

    What the region reads tells where parameters live; the rest of the state (an optimizer's) is
    shared out like them.
    """
    program = layered.program
    sources = dict(zip(program.region.invars, program.region_inputs, strict=True))
    read: dict[tuple[Var, int], float] = {}
    sums: dict[tuple[Var, int], float] = {}
    for i, eqn in enumerate(program.region.eqns):
        for v in eqn.invars:
            if isinstance(v, Var) and isinstance(sources.get(v), WholeInput):
                for stage, share in _shares(layered.spans[i], stage_of_layer):
                    read[v, stage] = max(read.get((v, stage), 0.0), share * _bytes(v))
    spans = {v: layered.spans[i] for i, e in enumerate(program.region.eqns) for v in e.outvars}
    for v, output in zip(program.region.outvars, program.region_outputs, strict=True):
        if isinstance(output, Accumulated):
            for stage, share in _shares(spans[v], stage_of_layer):
                sums[v, stage] = share * _bytes(v)
    parameters = sum(read.values())
    state = sum(_size(x.aval) for x in program.traced.inputs if x.batch_dim is None)
    factor = max(1.0, state / parameters) if parameters else 1.0
    return tuple(
        factor * a + b
        for a, b in zip(
            _by_stage(read, stage_of_layer), _by_stage(sums, stage_of_layer), strict=True
        )
    )


def _shares(span: LayerSpan, stage_of_layer: Sequence[int]) -> Iterator[tuple[int, float]]:
    """The stages that an equation runs on, and the share of its layers on each."""
    stages = stage_of_layer[span.first : span.last + 1]
    for stage in sorted(set(stages)):
        yield stage, stages.count(stage) / len(stages)


def _by_stage(
    values: Mapping[tuple[Var, int], float], stage_of_layer: Sequence[int]
) -> tuple[float, ...]:
    totals = [0.0] * (max(stage_of_layer) + 1)
    for (_, stage), value in values.items():
        totals[stage] += value
    return tuple(totals)


def _bytes(var: Var) -> float:
    return _size(var.aval)


def _size(aval: object) -> float:
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return float(getattr(aval, "size", 0) * itemsize)
