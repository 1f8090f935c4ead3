"""The steps of partition, each on its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from hetpass._jax import make_jaxpr_value, open_jaxpr
from hetpass.analysis.region_recipes import region_recipes
from hetpass.ir.kinds import Partial
from hetpass.ir.program import Accumulated, InputLeaf
from hetpass.transforms.dead_code import live_equations, restrict_cond
from hetpass.transforms.defer_partials import defer_partials
from hetpass.transforms.pairing import pair_leaves
from hetpass.transforms.phases import Demand, Node, phases
from hetpass.transforms.recipes import once_recipes
from tests.transforms.build import layered
from tests.transforms.test_once_per_step import TRANSFORMS, optimized
from tests.transforms.test_partition import check, tied

F32 = jax.typeof(jnp.zeros(3, jnp.float32))
INT = jax.typeof(jnp.zeros((), jnp.int32))


def jaxpr_of(function, *args):
    return open_jaxpr(jax.make_jaxpr(function)(*args))[0]


# -- pairing ----------------------------------------------------------------------------------


def leaf(path, argnum=0, aval=F32, donated=True):
    return InputLeaf(path, aval, argnum, None, donated)


@pytest.mark.parametrize(
    ("inputs", "outputs", "pairs"),
    [
        (["state.params['w']", "state.step"], ["result[0].params['w']", "result[0].step"],
         ((0, 0), (1, 1))),
        (["state['w']"], ["result['w']"], ((0, 0),)),
        (["args[0]['w']"], ["result[0]['w']"], ((0, 0),)),
        (["state['w']"], ["result[1]['v']"], ()),
        (["w"], ["result"], ((0, 0),)),
    ],
)  # fmt: skip
def test_leaves_pair_by_their_path_below_the_argument(inputs, outputs, pairs):
    assert pair_leaves([leaf(p) for p in inputs], outputs, [F32] * len(outputs)) == pairs


def test_each_argument_comes_back_under_its_own_prefix():
    inputs = [leaf("params['w']"), leaf("opt.mu['w']", 1), leaf("opt.nu['w']", 1)]
    outputs = ["result[0]['w']", "result[1].mu['w']", "result[1].nu['w']", "result[2]['w']"]
    assert pair_leaves(inputs, outputs, [F32] * 4) == ((0, 0), (1, 1), (2, 2))


def test_other_avals_and_kept_arguments_do_not_pair():
    assert pair_leaves([leaf("s['w']", aval=INT)], ["result['w']"], [F32]) == ()
    assert pair_leaves([leaf("s['w']", donated=False)], ["result['w']"], [F32]) == ()


# -- phases -----------------------------------------------------------------------------------


def nodes_of(function, args, homes, free):
    jaxpr = jaxpr_of(function, *args)
    nodes = [
        Node(e, tuple(e.invars), tuple(e.outvars), "epilogue", home, cheap)
        for e, home, cheap in zip(jaxpr.eqns, homes, free, strict=True)
    ]
    return nodes, jaxpr.outvars


def test_a_value_that_crosses_is_written_one_phase_earlier():
    def function(a, b):
        x = jnp.sin(a)  # stage 0, for stage 1
        y = jnp.cos(b)  # stage 1, waits for x: made late
        return x * y

    nodes, (out,) = nodes_of(function, (1.0, 2.0), (0, 1, 1), (False,) * 3)
    phased = phases(nodes, [Demand(out, 1, False)])
    assert [(i.stage, i.phase) for i in phased.instances] == [(0, 0), (1, 1), (1, 1)]


def test_a_cheap_node_runs_where_it_is_read_and_dead_ones_nowhere():
    def function(a, b):
        x = jnp.sin(a)  # cheap
        jnp.tan(b)  # dead
        return x * b, x + a

    nodes, outs = nodes_of(function, (1.0, 2.0), (0, 0, 1, 2), (True, False, False, False))
    phased = phases(nodes, [Demand(outs[0], 1, False), Demand(outs[1], 2, False)])
    assert {(i.node, i.stage) for i in phased.instances} == {(0, 1), (0, 2), (2, 1), (3, 2)}
    assert {i.phase for i in phased.instances} == {0}


# -- dead code and recipes --------------------------------------------------------------------


def test_effects_are_live():
    def function(a):
        jnp.sin(a)
        jax.debug.print("{}", jnp.cos(a))
        return a * 2

    jaxpr = jaxpr_of(function, 1.0)
    live = live_equations(jaxpr.eqns, jaxpr.outvars)
    names = [e.primitive.name for e, alive in zip(jaxpr.eqns, live, strict=True) if alive]
    assert "sin" not in names
    assert "cos" in names
    assert "mul" in names


def test_a_cond_keeps_the_operands_of_the_outputs_it_keeps():
    def function(p, a, b):
        return jax.lax.cond(p, lambda a, b: (a + 1, b * 2), lambda a, b: (a, b), a, b)

    jaxpr = jaxpr_of(function, True, 1.0, jnp.ones(3))
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == "cond")
    smaller = restrict_cond(eqn, [False, True])
    assert len(smaller.invars) == 2
    body = make_jaxpr_value(smaller.invars, smaller.outvars, [smaller])
    (result,) = jax.core.eval_jaxpr(body, (), jnp.int32(1), jnp.ones(3))
    assert result.tolist() == [2.0, 2.0, 2.0]


def names_of_free(jaxpr, free):
    return [e.primitive.name for e, again in zip(jaxpr.eqns, free, strict=True) if again]


def test_what_a_region_may_run_again():
    def function(table, x):
        shifted = x + 1.0  # arithmetic on an input: again
        h = jnp.dot(x, table)  # heavy
        g = jnp.tanh(h)  # arithmetic on a heavy value: kept
        wide = jax.lax.broadcast_in_dim(g, (7, *g.shape), (1, 2))  # layout, small to large: again
        return shifted - g, jnp.sum(wide, 0)

    jaxpr = jaxpr_of(function, jnp.ones((32, 32)), jnp.ones((64, 32)))
    free = names_of_free(jaxpr, region_recipes(jaxpr.eqns, jaxpr.invars))
    assert "add" in free
    assert "broadcast_in_dim" in free
    assert not {"dot_general", "tanh", "reduce_sum"} & set(free)


def test_what_every_stage_may_run_once_per_step():
    def function(step, big, bias):
        rate = 1.0 / (1.0 + step)
        return big * jnp.broadcast_to(rate, big.shape), jnp.sum(bias * bias), jnp.sqrt(step)

    jaxpr = jaxpr_of(function, 1.0, jnp.ones((64, 64)), jnp.ones(8))
    free = names_of_free(jaxpr, once_recipes(jaxpr.eqns))
    assert {"div", "add", "sqrt", "broadcast_in_dim"} <= set(free)
    assert "reduce_sum" not in free  # its result is what to send


# -- partial values ---------------------------------------------------------------------------


def test_the_sum_of_two_stages_gradients_moves_to_the_epilogue():
    source = layered(tied(), 2)
    region = source.program.region
    deferred = defer_partials(source, (0, 0, 1))
    added = len(deferred.program.epilogue) - len(source.program.epilogue)
    assert added == len(region.eqns) - len(deferred.program.region.eqns) > 0
    kinds = deferred.program.kinds
    for var, output in zip(
        deferred.program.region.outvars, deferred.program.region_outputs, strict=True
    ):
        assert isinstance(output, Accumulated)
        assert isinstance(kinds[var], Partial)
    assert defer_partials(source, (0, 0, 0)) is source


# -- packing ----------------------------------------------------------------------------------


def test_norms_of_many_leaves_travel_in_one_transfer_per_pair_of_stages():
    staged = check(optimized(TRANSFORMS["clipped adam"]), 1, 1, 1, num_microbatches=2)
    slots = staged.slots
    floats = [
        (slots[t.source].stage, slots[t.target].stage)
        for t in staged.transfers
        if slots[t.source].scope == "step" and slots[t.source].aval.shape == (2,)
    ]
    assert sorted(floats) == [(a, b) for a in range(3) for b in range(3) if a != b]
