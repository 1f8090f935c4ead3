"""M = 1 for steps that have no microbatch program: everything is whole.

The region is then the heavy part of the step, forward and backward, run once on the full batch;
the epilogue is the rest. Used where the step mixes examples, or cannot be traced at other sizes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from hetpass import _jax
from hetpass._jax import JaxprEqn, Var
from hetpass.analysis.flops import equation_flops
from hetpass.ir.kinds import Kind, Whole
from hetpass.ir.program import Accumulated, RegionInput, StepProgram, Traced, WholeInput

_HEAVY_SHARE = 0.001


def unsplit(traced: Traced) -> StepProgram:
    """The step as one microbatch.

    The region holds what depends on the batch (on anything, if there is no batch) and leads to a
    heavy or a backward equation; it reads and makes full-batch values only.
    """
    jaxpr = traced.jaxpr
    part = heavy_part(traced)
    made = [v for i in part.region for v in jaxpr.eqns[i].outvars]
    twins: dict[Var, Var] = {v: _jax.make_var(v.aval) for v in (*part.reads, *made)}
    inputs: list[RegionInput] = [WholeInput(v) for v in part.reads]
    kinds: dict[Var, Kind] = {twin: Whole() for twin in twins.values()}
    body = [
        _jax.make_eqn(
            e,
            [twins[a] if isinstance(a, Var) else a for a in e.invars],
            [twins[v] for v in e.outvars],
        )
        for e in (jaxpr.eqns[i] for i in part.region)
    ]
    return StepProgram(
        traced=traced,
        num_microbatches=1,
        prologue=tuple(jaxpr.eqns[i] for i in part.before),
        region=_jax.make_jaxpr_value(
            [twins[v] for v in part.reads], [twins[v] for v in part.results], body
        ),
        region_inputs=tuple(inputs),
        region_outputs=tuple(Accumulated(v, "same", v.aval.dtype) for v in part.results),
        kinds=kinds,
        origin=part.region,
        epilogue=tuple(jaxpr.eqns[i] for i in part.after),
        outvars=tuple(jaxpr.outvars),
    )


@dataclass(frozen=True)
class HeavyPart:
    """A step cut by weight alone.

    Attributes:
      before, region, after: indices of equations, in program order.
      reads: what the region reads of the inputs and of `before`.
      results: what `after` and the caller read of the region.
    """

    before: tuple[int, ...]
    region: tuple[int, ...]
    after: tuple[int, ...]
    reads: tuple[Var, ...]
    results: tuple[Var, ...]


def heavy_part(traced: Traced, of_slice: Set[int] = frozenset()) -> HeavyPart:
    """What depends on the batch and leads to a heavy or a backward equation is the region.

    Args:
      of_slice: equations on a size of the batch. Where some are given, the region also holds
        everything on the batch that no gradient goes into: losses, metrics, statistics.
    """
    jaxpr = traced.jaxpr
    region = _region_indices(traced, of_slice)
    chosen = set(region)
    made = {v for i in region for v in jaxpr.eqns[i].outvars}
    reads = dict.fromkeys(
        a for i in region for a in jaxpr.eqns[i].invars if isinstance(a, Var) and a not in made
    )
    before = _ancestors(jaxpr.eqns, list(reads))
    after = [i for i in range(len(jaxpr.eqns)) if i not in chosen and i not in before]
    results = dict.fromkeys(
        a
        for atoms in (*(jaxpr.eqns[i].invars for i in after), jaxpr.outvars)
        for a in atoms
        if isinstance(a, Var) and a in made
    )
    return HeavyPart(
        tuple(sorted(before)), tuple(region), tuple(after), tuple(reads), tuple(results)
    )


def _region_indices(traced: Traced, of_slice: Set[int]) -> list[int]:
    jaxpr = traced.jaxpr
    tainted = {
        v
        for leaf, v in zip(traced.inputs, jaxpr.invars, strict=True)
        if leaf.batch_dim is not None or traced.batch_size is None
    }
    dependent = []
    for index, eqn in enumerate(jaxpr.eqns):
        reads_batch = any(a in tainted for a in eqn.invars if isinstance(a, Var))
        depends = not eqn.effects and (reads_batch or index in of_slice)
        dependent.append(depends)
        if depends:
            tainted.update(eqn.outvars)
    flops = [equation_flops(e) for e in jaxpr.eqns]
    threshold = _HEAVY_SHARE * sum(flops)
    forward = _forward(jaxpr.eqns) if of_slice else frozenset()
    wanted: set[Var] = set()
    chosen = []
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[index]
        own = (
            index in of_slice
            or index in forward
            or _is_backward(eqn)
            or _is_matrix_work(eqn, flops[index], threshold)
        )
        if dependent[index] and (own or any(v in wanted for v in eqn.outvars)):
            chosen.append(index)
            wanted.update(a for a in eqn.invars if isinstance(a, Var))
    chosen.reverse()
    return chosen


def _forward(eqns: Sequence[JaxprEqn]) -> frozenset[int]:
    """Equations that no gradient goes into."""
    after: set[Var] = set()
    found = []
    for index, eqn in enumerate(eqns):
        if _is_backward(eqn) or any(a in after for a in eqn.invars if isinstance(a, Var)):
            after.update(eqn.outvars)
        else:
            found.append(index)
    return frozenset(found)


def _is_backward(eqn: JaxprEqn) -> bool:
    return "transpose(" in _jax.name_stack(eqn)


def _is_matrix_work(eqn: JaxprEqn, flops: float, threshold: float) -> bool:
    heavy = ("dot_general", "conv_general_dilated", "scan", "while")
    return eqn.primitive.name in heavy and flops >= threshold


def _ancestors(eqns: list[JaxprEqn], variables: list[Var]) -> set[int]:
    producer = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    found: set[int] = set()
    pending = list(variables)
    while pending:
        index = producer.get(pending.pop())
        if index is not None and index not in found:
            found.add(index)
            pending += [a for a in eqns[index].invars if isinstance(a, Var)]
    return found
