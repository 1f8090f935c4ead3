"""M = 1 for steps that have no microbatch program: everything is whole.

The region is then the heavy part of the step, forward and backward, run once on the full batch;
the epilogue is the rest. Used where the step mixes examples, or cannot be traced at other sizes.
"""

from __future__ import annotations

from hetpass import _jax
from hetpass._jax import JaxprEqn, Var
from hetpass.analysis.flops import equation_flops
from hetpass.frontend.probes import Probes
from hetpass.ir.kinds import Kind, Whole
from hetpass.ir.program import Accumulated, RegionInput, StepProgram, Traced, WholeInput

_HEAVY_SHARE = 0.001


def unsplit(traced: Traced, probes: Probes) -> StepProgram:
    """The step as one microbatch.

    The region holds what depends on the batch (on anything, if there is no batch) and leads to a
    heavy or a backward equation; it reads and makes full-batch values only.
    """
    del probes
    jaxpr = traced.jaxpr
    region = _region_indices(traced)
    chosen = set(region)
    made = {v for i in region for v in jaxpr.eqns[i].outvars}
    reads = dict.fromkeys(
        a for i in region for a in jaxpr.eqns[i].invars if isinstance(a, Var) and a not in made
    )
    before = _ancestors(jaxpr.eqns, list(reads))
    after = [i for i in range(len(jaxpr.eqns)) if i not in chosen and i not in before]
    needed = dict.fromkeys(
        a
        for atoms in (*(jaxpr.eqns[i].invars for i in after), jaxpr.outvars)
        for a in atoms
        if isinstance(a, Var) and a in made
    )
    twins: dict[Var, Var] = {v: _jax.make_var(v.aval) for v in (*reads, *made)}
    inputs: list[RegionInput] = [WholeInput(v) for v in reads]
    kinds: dict[Var, Kind] = {twin: Whole() for twin in twins.values()}
    body = [
        _jax.make_eqn(
            e,
            [twins[a] if isinstance(a, Var) else a for a in e.invars],
            [twins[v] for v in e.outvars],
        )
        for e in (jaxpr.eqns[i] for i in region)
    ]
    return StepProgram(
        traced=traced,
        num_microbatches=1,
        prologue=tuple(jaxpr.eqns[i] for i in sorted(before)),
        region=_jax.make_jaxpr_value([twins[v] for v in reads], [twins[v] for v in needed], body),
        region_inputs=tuple(inputs),
        region_outputs=tuple(_kept(v) for v in needed),
        kinds=kinds,
        origin=tuple(region),
        epilogue=tuple(jaxpr.eqns[i] for i in after),
        outvars=tuple(jaxpr.outvars),
    )


def _kept(var: Var) -> Accumulated:
    """One microbatch: the largest of one value is the value."""
    dtype = var.aval.dtype
    return Accumulated(var, "or" if dtype == bool else "max", dtype)


def _region_indices(traced: Traced) -> list[int]:
    jaxpr = traced.jaxpr
    tainted = {
        v
        for leaf, v in zip(traced.inputs, jaxpr.invars, strict=True)
        if leaf.batch_dim is not None or traced.batch_size is None
    }
    dependent = []
    for eqn in jaxpr.eqns:
        depends = not eqn.effects and any(a in tainted for a in eqn.invars if isinstance(a, Var))
        dependent.append(depends)
        if depends:
            tainted.update(eqn.outvars)
    flops = [equation_flops(e) for e in jaxpr.eqns]
    threshold = _HEAVY_SHARE * sum(flops)
    wanted: set[Var] = set()
    chosen = []
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[index]
        own = _is_matrix_work(eqn, flops[index], threshold) or "transpose(" in _jax.name_stack(eqn)
        if dependent[index] and (own or any(v in wanted for v in eqn.outvars)):
            chosen.append(index)
            wanted.update(a for a in eqn.invars if isinstance(a, Var))
    chosen.reverse()
    return chosen


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
