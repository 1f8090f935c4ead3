from __future__ import annotations

import random

import numpy as np
import pytest

from hetpass.planner.intra_op.elimination import eliminated
from hetpass.planner.intra_op.linear_program import Effort, slack
from hetpass.planner.intra_op.near_optima import near_optima
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.sparse_elimination import survivors
from tests.planner.intra_op.random_graphs import random_graph, random_setting


def problems(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        yield program(random_graph(rng, 5), random_setting(rng, 1 + seed % 2)).seconds


def test_every_state_within_the_allowance_survives_with_its_least_cost():
    for problem in problems(range(40)):
        kept = sorted({0, len(problem.nodes) // 2})
        table = eliminated(problem, kept)
        assert table is not None
        measured = slack(problem)
        assert measured is not None
        for share in (0.0, 0.01, 0.3):
            allowance = share * measured.bound + 1e-9 * measured.bound + 1e-12
            found = survivors(measured.above, kept, allowance, 10_000_000)
            assert found is not None
            pairs = zip(found.states, found.costs, strict=True)
            known = {tuple(state): cost for state, cost in pairs}
            for state in np.ndindex(*table.costs.shape):
                above = table.costs[state] - measured.bound
                if above < 0.99 * allowance:
                    assert known[state] == pytest.approx(above, abs=1e-6 * measured.bound)
            for k, state in enumerate(found.states):
                choices = found.choices(k)
                assert tuple(choices[n] for n in kept) == tuple(state)
                cost = problem.cost(choices)
                assert cost == pytest.approx(table.costs[tuple(state)], rel=1e-6, abs=1e-11)


def test_a_small_budget_ends_the_search():
    (problem,) = problems([11])
    measured = slack(problem)
    assert measured is not None
    assert survivors(measured.above, [0], np.inf, 3) is None


def test_near_optima_hold_the_optimum_even_where_nothing_can_be_eliminated():
    for problem in problems(range(30)):
        best = eliminated(problem)
        assert best is not None
        for effort in (Effort(), Effort(most_joined=0)):
            found = near_optima(problem, [0], effort)
            assert found is not None
            least = min(problem.cost(choices) for choices in found.choices)
            assert least == pytest.approx(float(best.costs), rel=1e-6, abs=1e-11)
            assert found.bound <= least * (1 + 1e-9)
