"""Rules: every equation of the zoo has one; composed and written ones say what they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hetpass._jax import Jaxpr, JaxprEqn
from hetpass.analysis.flops import sub_jaxprs
from hetpass.analysis.sharding_rules import holds_program, sharding_rules
from hetpass.errors import SplitError, TraceError
from hetpass.frontend.microbatch import split
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.operation_graph import ShardingRule
from tests.programs.everything import NUMBERS, PROGRAMS
from tests.programs.program import Program


def plain_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """All equations that run no others, also inside loops and branches."""
    found: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if holds_program(eqn):
            for body in sub_jaxprs(eqn):
                found += plain_equations(body)
        else:
            found.append(eqn)
    return found


def rules_of(function: Callable[..., Any], *avals: Any) -> dict[str, ShardingRule]:
    """Primitive name -> the rule of its last equation."""
    eqns = plain_equations(jax.make_jaxpr(function)(*avals).jaxpr)
    found = {}
    for eqn, rule in zip(eqns, sharding_rules(eqns), strict=True):
        assert rule is not None, eqn
        found[eqn.primitive.name] = rule
    return found


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ZOO = [p for p in (*NUMBERS, *PROGRAMS) if p.expect == "equal" and not p.x64]


def test_every_equation_of_the_zoo_has_a_rule(all_plans: bool) -> None:
    """One program in ten; all with --all-plans."""
    checked = 0
    for program in ZOO[:: 1 if all_plans else 10]:
        eqns = _equations(program)
        for eqn, rule in zip(eqns, sharding_rules(eqns), strict=True):
            checked += 1
            assert rule is not None or eqn.effects, f"{program}: {eqn}"
            if rule is not None:
                _check_consistent(eqn, rule)
    assert checked > 500


def _equations(program: Program) -> list[JaxprEqn]:
    run = program.make()
    settings = run.options.get("options")
    signature = Signature(
        batch_argnums=run.batch_argnums,
        static_argnums=tuple(run.options.get("static_argnums", ())),
        batch_axes=settings.batch_axes if settings else {},
    )
    try:
        region = split(trace(run.step, run.args, run.kwargs, signature), 2).region
    except (SplitError, TraceError):
        return []
    return plain_equations(region)


def _check_consistent(eqn: JaxprEqn, rule: ShardingRule) -> None:
    """Factors fill dimensions exactly, and reduced ones are in no result."""
    for atoms, values in ((eqn.invars, rule.operands), (eqn.outvars, rule.results)):
        for atom, dims in zip(atoms, values, strict=True):
            shape = getattr(atom.aval, "shape", ())
            assert len(dims) == len(shape)
            for size, factors in zip(shape, dims, strict=True):
                product = 1
                for factor in factors:
                    product *= rule.sizes[factor]
                assert product == max(size, 1) or set(factors) <= rule.whole or size == 0, eqn
    made = {f for dims in rule.results for dim in dims for f in dim}
    assert not made & (rule.reduction - rule.whole)


def test_products_share_factors_and_reduce_the_contracted_one() -> None:
    rule = rules_of(jnp.matmul, array(8, 6), array(6, 5))["dot_general"]
    assert rule.operands[0][1] == rule.operands[1][0]
    assert rule.reduction == set(rule.operands[0][1])


def test_a_lookup_with_bounds_checks_is_one_rule() -> None:
    rule = rules_of(
        lambda w, i: w.at[i].get(mode="fill"), array(16, 5), array(4, 3, dtype="int32")
    )["gather"]
    ((vocabulary,), (hidden,)) = rule.operands[0]
    assert rule.reduction == {vocabulary}
    assert rule.results[0][2] == (hidden,)
    assert rule.operands[1][:2] == rule.results[0][:2]


def test_reshape_splits_factors_major_to_minor() -> None:
    rule = rules_of(lambda x: x.reshape(4, 2, 6), array(8, 6))["reshape"]
    assert rule.operands[0][0] == (*rule.results[0][0], *rule.results[0][1])
    assert [rule.sizes[f] for f in rule.operands[0][0]] == [4, 2]


def test_draws_are_free_in_every_dimension_and_keys_are_whole() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    rule = rules_of(lambda k: jax.random.bits(k, (8, 6)), key)["random_bits"]
    free = {f for dim in rule.results[0] for f in dim}
    assert len(free) == 2
    assert not free & rule.whole
    assert rule.operands == ((),)


@pytest.mark.parametrize("name", ["erf", "erf_inv", "square", "integer_pow", "logistic"])
def test_what_is_elementwise_is_known(name: str) -> None:
    function = {
        "erf": jax.lax.erf,
        "erf_inv": jax.lax.erf_inv,
        "square": jnp.square,
        "integer_pow": lambda x: jax.lax.integer_pow(x, 3),
        "logistic": jax.lax.logistic,
    }[name]
    (rule,) = rules_of(function, array(8, 6)).values()
    assert rule.operands[0] == rule.results[0]
    assert not rule.whole | rule.reduction | rule.permutation


def test_top_k_and_sort_keep_their_dimension_whole() -> None:
    rules = rules_of(lambda x: (jax.lax.top_k(x, 2), jnp.sort(x, 1)), array(8, 6))
    for rule in (rules["top_k"], rules["sort"]):
        assert rule.operands[0][0] == rule.results[0][0]
        assert not set(rule.operands[0][0]) & rule.whole
        assert set(rule.operands[0][1]) <= rule.whole


def test_what_is_reduced_and_used_again_stays_whole() -> None:
    """argmax reduces pairs, which the compiler gathers; a factor used after its sum is whole."""
    rule = rules_of(lambda x: jnp.argmax(x, 1), array(8, 6))["argmax"]
    assert set(rule.operands[0][1]) <= rule.whole


def test_every_operand_of_a_barrier_is_for_itself() -> None:
    rule = rules_of(lambda x, y: jax.lax.optimization_barrier((x, y)), array(8, 6), array(8, 6))[
        "optimization_barrier"
    ]
    assert rule.operands == rule.results
    assert not {f for d in rule.operands[0] for f in d} & {f for d in rule.operands[1] for f in d}


def test_an_equation_with_effects_has_no_rule() -> None:
    def step(x: Any) -> Any:
        jax.debug.callback(lambda y: None, x)
        return x

    eqns = jax.make_jaxpr(step)(array(8)).jaxpr.eqns
    assert sharding_rules(eqns) == (None,)


@pytest.mark.parametrize(
    ("how", "examples", "whole"),
    [("set", 256, True), ("multiply", 256, True), ("add", 4, True), ("add", 256, False)],
)
def test_what_is_scattered_into_stays_whole_unless_it_is_added_at_many_indices(
    how: str, examples: int, whole: bool
) -> None:
    def place(x: jax.Array, i: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, k: getattr(row.at[k], how)(2.0))(x, i)

    jaxpr = jax.make_jaxpr(place)(jnp.zeros((examples, 12)), jnp.zeros(examples, int))
    (eqn,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name.startswith("scatter")]
    (rule,) = sharding_rules([eqn])
    assert rule is not None
    (features,) = rule.operands[0][1]
    assert (features in rule.whole) == whole
