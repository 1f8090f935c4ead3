from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from hetpass.ir.operation_graph import Operation, ShardingRule
from hetpass.planner.intra_op.answers import fastest
from hetpass.planner.intra_op.boundary import boundary_table
from hetpass.planner.intra_op.chain import chained
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.intra_op.linear_program import Effort
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.range_assignments import crossings, range_assignments
from tests.planner.intra_op.layer_graphs import random_layer, stacked, transformer_block
from tests.planner.intra_op.random_graphs import random_setting


def chain_of(seed, axes, layers=5, kinds=3):
    rng = random.Random(seed)
    setting = replace(random_setting(rng, axes), alone=False, recompute=False)
    item_bytes = rng.choice((2e4, 2e5))
    graphs = [random_layer(rng, item_bytes) for _ in range(kinds)]
    order = [rng.randrange(kinds) for _ in range(layers)]
    effort = Effort(most_states=100, most_entries=1 << 26)
    tables = [boundary_table(program(graph, setting), effort=effort) for graph in graphs]
    return rng, setting, graphs, order, chained(tables, order)


@pytest.mark.parametrize(("axes", "seeds"), [(1, range(13)), (2, range(13))])
def test_chaining_is_the_program_of_the_whole_range(axes, seeds):
    """52 random ranges on one axis, and 52 on two."""
    for seed in seeds:
        rng, setting, graphs, order, chain = chain_of(seed, axes)
        for _ in range(4):
            first = rng.randrange(5)
            end = rng.randrange(first + 1, 6)
            whole = stacked([graphs[k] for k in order[first:end]])
            answer = fastest(program(whole, replace(setting, alone=True)))
            assert chain.costs[first, end] == pytest.approx(answer.seconds, rel=1e-7)
            assert chain.lower[first, end] <= chain.costs[first, end]


@pytest.mark.parametrize("seed", range(4))
def test_paths_cost_what_their_ranges_do(seed):
    _, setting, graphs, order, chain = chain_of(seed, 1)
    count = len(order)
    microbatches = setting.num_microbatches

    def step_s(kind, left, right):
        made = chain.tables[kind].made
        choices = chain.tables[kind].choices(left, right)
        priced = evaluate(graphs[kind], setting, made.assignment(choices))
        assert priced.violations == ()
        return np.array([priced.step_s(microbatches), 1.0])

    sums = chain.added(step_s, 2).sums
    for first in range(count):
        for end in range(first + 1, count + 1):
            path = chain.path(first, end)
            assert len(path) == end - first == sums[first, end, 1]
            for (_, right), (left, _) in zip(path, path[1:], strict=False):
                assert right == left  # equal lists of states on both sides here
            # What arrives at the two ends comes on top.
            assert sums[first, end, 0] <= chain.costs[first, end] * (1 + 1e-9)
    assert np.isinf(sums[2, 2]).all()
    assert np.isinf(chain.costs[2, 2])


def test_boundary_tables_are_least_for_every_pair_of_states():
    """The states are fixed one by one, and the program solved again."""
    rng = random.Random(1)
    graph = random_layer(rng, 2e4)
    setting = replace(random_setting(rng, 1), alone=False)
    made = program(graph, setting)
    table = boundary_table(made)
    for left, right in np.ndindex(*table.costs.shape):
        nodes = list(made.seconds.nodes)
        for values, state in (
            ((0, *graph.cotangents_out), table.left[left]),
            ((*graph.activations_out, _cotangent(graph)), table.right[right]),
        ):
            for v, layout in zip(values, state, strict=True):
                node = made.boundary[v]
                fixed = [layout == choice for choice in made.nodes[node].choices]
                nodes[node] = np.where(fixed, nodes[node], np.inf)
        answer = fastest(replace(made, seconds=replace(made.seconds, nodes=tuple(nodes))))
        assert table.costs[left, right] == pytest.approx(answer.seconds, rel=1e-9)
        choices = table.choices(left, right)
        assert made.seconds.cost(choices) == pytest.approx(answer.seconds, rel=1e-9)


def _cotangent(graph):
    return next(v for v, value in enumerate(graph.values) if value.role == "cotangent")


def test_pruned_tables_are_upper_bounds_with_a_true_optimum():
    """With too few entries allowed, choices are left out by the dual of the linear program."""
    graph = transformer_block(8, 16, 64, 4)
    setting = replace(random_setting(random.Random(5), 2), alone=False, recompute=False)
    made = program(graph, setting)
    exact = boundary_table(made, effort=Effort(most_entries=1 << 26))
    pruned = boundary_table(made, effort=Effort(most_entries=0, allowances=(2e-2,)))
    assert np.array_equal(exact.lower, exact.costs)
    assert pruned.costs.min() == pytest.approx(exact.costs.min(), rel=1e-7)
    assert np.all(pruned.costs >= exact.costs * (1 - 1e-9))
    assert np.all(pruned.lower <= exact.costs * (1 + 1e-7))
    assert np.any(pruned.costs > exact.costs * (1 + 1e-7))
    state = np.unravel_index((pruned.costs / exact.costs).argmax(), exact.costs.shape)
    refined = pruned.refined(*state)
    assert refined.costs[state] == pytest.approx(exact.costs[state], rel=1e-7)
    assert refined.lower[state] == pytest.approx(exact.costs[state], rel=1e-7)
    assert np.all(refined.costs <= pruned.costs)


def test_refining_brings_a_chain_of_upper_bounds_near_the_optimum():
    graphs = [transformer_block(8, 16, 64, 4), transformer_block(8, 16, 64, 4, mlp_ratio=1)]
    setting = replace(random_setting(random.Random(5), 2), alone=False, recompute=False)
    made = [program(graph, setting) for graph in graphs]
    order = (0, 1, 0, 1, 1)
    best = chained([boundary_table(m, effort=Effort(most_entries=1 << 26)) for m in made], order)
    few = Effort(most_entries=0, allowances=(), chain_gap=1e-6)
    tables = [boundary_table(m, effort=few) for m in made]
    rough = chained(tables, order, replace(few, refinements=0))
    fine = chained(tables, order, replace(few, refinements=8))
    assert rough.costs[0, 5] > best.costs[0, 5] * (1 + 1e-6)
    assert best.costs[0, 5] * (1 - 1e-7) <= fine.costs[0, 5] <= best.costs[0, 5] * 1.01
    assert rough.lower[0, 5] < fine.lower[0, 5] <= best.costs[0, 5] * (1 + 1e-7)
    exact = chained(tables, order, replace(few, refinements=40, chain_gap=1e-9))
    known = np.isfinite(best.costs)
    assert known.sum() == 15
    assert np.allclose(exact.costs[known], best.costs[known], rtol=1e-7)
    assert np.allclose(exact.lower[known], best.costs[known], rtol=1e-6)


def test_what_crosses_more_than_one_boundary_arrives():
    """A layer that reads what an earlier one gave, beside its neighbour's activation."""
    graph = random_layer(random.Random(3), 2e5)
    extra = replace(graph.values[0], shape=(4, 12))
    number = len(graph.values)
    reader = Operation(
        "far",
        "forward",
        (number,),
        (number + 1,),
        ShardingRule((4, 12), (((0,), (1,)),), (((0,), (1,)),)),
    )
    far = replace(
        graph,
        values=(*graph.values, extra, replace(extra, role="inner")),
        operations=(reader, *graph.operations),
    )
    setting = replace(random_setting(random.Random(2), 1), alone=False, recompute=False)
    near = chained([boundary_table(program(graph, setting))] * 2, (0, 1, 0))
    found = chained([boundary_table(program(far, setting))], (0, 0, 0))
    assert len(found.tables[0].left[0]) == len(near.tables[0].left[0]) + 1
    assert np.isfinite(found.costs[0, 3])
    assert found.costs[0, 3] >= near.costs[0, 3] * (1 - 1e-9)
    assert len(found.path(0, 3)) == 3


@pytest.mark.parametrize("seed", range(4))
def test_what_crosses_layers_lies_alike_and_no_worse_than_the_states_have_it(seed):
    _, setting, graphs, order, chain = chain_of(seed, 2, layers=4)
    tables = [chain.tables[kind] for kind in order]
    own = range_assignments(chain, 0, len(order))
    found = [evaluate(graphs[kind], setting, a) for kind, a in zip(order, own, strict=True)]
    assert not any(priced.violations for priced in found)
    total = sum(p.step_s(setting.num_microbatches) for p in found)
    assert total <= chain.costs[0, -1] * (1 + 1e-9)
    crossing = crossings(tables)
    assert crossing
    for value in crossing:
        numbers = {k: {n: v for v, n in tables[k].made.boundary.items()}[n] for k, n in value}
        assert len({own[k].stored[v] for k, v in numbers.items()}) == 1
