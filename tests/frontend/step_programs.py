"""StepPrograms for tests of passes after split: M = 1, the region up to the last backward equation.

Kinds are coarse: what depends on the batch is batched (a scalar: partial), the rest is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from hetpass._jax import Var, make_jaxpr_value, name_stack
from hetpass.frontend.inline import inline
from hetpass.ir.kinds import Batched, Partial, Whole
from hetpass.ir.program import (
    Accumulated,
    InputLeaf,
    SliceInput,
    StepProgram,
    Traced,
    WholeInput,
)


def step_program(step: Callable[..., Any], state: Any, batch: Any) -> StepProgram:
    """Trace `step(state, batch)`; the region is everything up to the last backward equation."""
    closed, shape = jax.make_jaxpr(step, return_shape=True)(state, batch)
    flat = inline(closed)
    leaves, in_tree = jax.tree_util.tree_flatten((state, batch))
    num_state = len(jax.tree_util.tree_leaves(state))
    inputs = tuple(
        InputLeaf(f"input[{i}]", v.aval, *_batch(i, num_state, len(leaves), v.aval), False)
        for i, v in enumerate(flat.jaxpr.invars)
    )
    traced = Traced(
        name="step",
        jaxpr=flat.jaxpr,
        probes=(),
        probe_failure="not probed",
        inputs=inputs,
        constants=flat.constants,
        in_tree=in_tree,
        out_tree=jax.tree_util.tree_structure(shape),
        out_paths=tuple(f"out[{i}]" for i in range(len(flat.jaxpr.outvars))),
        batch_size=1,
        recomputed=flat.recomputed,
    )
    return _split(traced)


def _batch(i: int, num_state: int, num_leaves: int, aval: Any) -> tuple[int | None, int | None]:
    if i >= num_leaves:
        return None, None
    return (0, None) if i < num_state else (1, 0 if aval.shape else None)


def _split(traced: Traced) -> StepProgram:
    jaxpr = traced.jaxpr
    late = [
        i
        for i, (eqn, again) in enumerate(zip(jaxpr.eqns, traced.recomputed, strict=True))
        if again or "transpose(" in name_stack(eqn)
    ]
    end = max(late, default=len(jaxpr.eqns) - 1) + 1
    eqns, epilogue = jaxpr.eqns[:end], jaxpr.eqns[end:]
    made = {v for e in eqns for v in e.outvars}
    wanted: dict[Var, None] = {}
    for atom in [*(a for e in epilogue for a in e.invars), *jaxpr.outvars]:
        if isinstance(atom, Var) and atom in made:
            wanted[atom] = None
    kinds: dict[Var, Any] = {}
    for var, leaf in zip(jaxpr.invars, traced.inputs, strict=True):
        kinds[var] = Whole() if leaf.batch_dim is None else Batched(0)
    for eqn in eqns:
        varies = any(isinstance(a, Var) and not isinstance(kinds[a], Whole) for a in eqn.invars)
        for var in eqn.outvars:
            kinds[var] = Whole() if not varies else Batched(0) if var.aval.shape else Partial("sum")
    return StepProgram(
        traced=traced,
        num_microbatches=1,
        prologue=(),
        region=make_jaxpr_value(jaxpr.invars, list(wanted), eqns),
        region_inputs=tuple(
            WholeInput(v) if isinstance(kinds[v], Whole) else SliceInput(v, Batched(0))
            for v in jaxpr.invars
        ),
        region_outputs=tuple(Accumulated(v, "sum", v.aval.dtype) for v in wanted),
        kinds=kinds,
        origin=tuple(range(end)),
        epilogue=tuple(epilogue),
        outvars=tuple(jaxpr.outvars),
    )
