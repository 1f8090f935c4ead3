"""The rule table holds against Shardy: a batch that is treated example by example lies on a factor
that can be sharded, and one that is summed over on a reduction factor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import pytest

from hetpass._jax import JaxprEqn, Var
from hetpass.analysis.sharding_rules import sharding_rules
from hetpass.frontend.microbatch import split
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.kinds import Batched, Kind, Partial
from hetpass.ir.operation_graph import ShardingRule
from hetpass.ir.program import StepProgram
from tests.programs.everything import NUMBERS, PROGRAMS
from tests.programs.program import Program

_LINES = ("A1", "A2", "A3", "A4", "A6", "A7", "A9b", "B10", "B11")
CHOSEN = [p for p in (*NUMBERS, *PROGRAMS) if p.line in _LINES and p.expect == "equal"]
_EXACT_TABLES = ("gather", "scatter", "scatter-add")
"""A batched table looked up by position: Shardy cannot know that row i asks for row i."""


def _program(program: Program, count: int) -> StepProgram:
    run = program.make()
    settings = run.options.get("options")
    signature = Signature(
        batch_argnums=run.batch_argnums,
        static_argnums=tuple(run.options.get("static_argnums", ())),
        batch_axes=settings.batch_axes if settings else {},
    )
    return split(trace(run.step, run.args, run.kwargs, signature), count)


def batch_factor(
    factors: Sequence[Sequence[int]], sizes: Sequence[int], kind: Batched
) -> int | None:
    """The factor that holds the examples; None if the dimension's factors do not show it."""
    outer = kind.outer or 1
    before = 1
    for factor in factors[kind.dim]:
        if before == outer:
            return factor
        before *= sizes[factor]
    return None


def contradictions(eqn: JaxprEqn, rule: ShardingRule, kinds: dict[Var, Kind]) -> list[str]:
    """Where Shardy's rule says that the equation does more than our kinds do."""
    found = []
    operands: set[int] = set()
    for atom, factors in zip(eqn.invars, rule.operands, strict=True):
        kind = kinds.get(atom) if isinstance(atom, Var) else None
        if isinstance(kind, Batched):
            factor = batch_factor(factors, rule.sizes, kind)
            if factor is not None and rule.sizes[factor] > 1:
                operands.add(factor)
    for var, factors in zip(eqn.outvars, rule.results, strict=True):
        kind = kinds.get(var)
        if isinstance(kind, Batched) and operands:
            factor = batch_factor(factors, rule.sizes, kind)
            if factor is not None and math.prod(var.aval.shape) and factor not in operands:
                found.append(f"examples of {kind} do not come from the operands' examples")
        if isinstance(kind, Partial) and operands and not operands <= rule.reduction:
            found.append("a partial result whose batch is not reduced")
    for factor in operands & (rule.whole | rule.permutation):
        found.append(f"factor {factor} moves or mixes examples")
    return found


def _says_nothing(rule: ShardingRule) -> bool:
    """All is kept whole: grouped convolutions are, since XLA's partitioner gets them wrong."""
    return rule.whole == frozenset(range(len(rule.sizes)))


@pytest.mark.parametrize("part", range(4))
def test_kinds_agree_with_shardys_factors(part: int) -> None:
    seen: set[object] = set()
    checked = 0
    for program in CHOSEN[part::4]:
        if program.x64:
            continue
        split_step = _program(program, 2)
        kinds = dict(split_step.kinds)
        eqns = [e for e in split_step.region.eqns if _is_new(e, kinds, seen)]
        for eqn, rule in zip(eqns, sharding_rules(eqns), strict=True):
            if rule is None or eqn.primitive.name in _EXACT_TABLES or _says_nothing(rule):
                continue
            checked += 1
            found = contradictions(eqn, rule, kinds)
            assert not found, f"{program}: {eqn.primitive.name}: {found}\n{eqn}\n{rule}"
    assert checked > 100


def _is_new(eqn: JaxprEqn, kinds: dict[Var, Kind], seen: set[object]) -> bool:
    atoms = (*eqn.invars, *eqn.outvars)
    key = (
        eqn.primitive.name,
        str(eqn.params),
        tuple((a.aval.str_short(), kinds.get(a) if isinstance(a, Var) else None) for a in atoms),
    )
    new = key not in seen
    seen.add(key)
    return new


def test_a_wrong_kind_would_be_found() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.cumsum(jax.lax.sort(x, dimension=1), 0))(
        jax.ShapeDtypeStruct((8, 6), "float32")
    )
    kinds = {v: Batched(0) for e in jaxpr.jaxpr.eqns for v in (*e.invars, *e.outvars)}
    eqn = next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "sort")
    (rule,) = sharding_rules([eqn])
    assert rule is not None
    assert contradictions(eqn, rule, dict(kinds)) == []
    assert contradictions(eqn, rule, {v: Batched(1) for v in kinds}) != []


def test_rules_are_plain_data() -> None:
    jaxpr = jax.make_jaxpr(lambda x, w: (x @ w, x.reshape(2, 4, 6), x.sum(0)))(
        jax.ShapeDtypeStruct((8, 6), "float32"), jax.ShapeDtypeStruct((6, 5), "float32")
    ).jaxpr
    product, reshape, total = sharding_rules(jaxpr.eqns)
    assert product is not None
    assert product.operands[0][1] == product.operands[1][0]
    assert product.reduction == {product.operands[0][1][0]}
    assert reshape is not None
    assert reshape.operands[0][0] == (reshape.results[0][0][0], reshape.results[0][1][0])
    assert total is not None
    assert total.reduction == {total.operands[0][0][0]}
