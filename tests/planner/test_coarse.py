from __future__ import annotations

import numpy as np
import pytest

from hetpass.cost.tables import cost_tables
from hetpass.ir.cluster import Link
from hetpass.ir.facts import ProgramFacts
from hetpass.planner.coarse import coarse_cuts, coarsened, refined
from hetpass.planner.inter_op import InterOpOptions, inter_op
from hetpass.planner.objective import priced
from hetpass.planner.search import SearchOptions, search
from tests.planner.inter_op_instances import random_tables
from tests.planner.small_clusters import EXACT, cluster


def test_pipelines_of_the_coarse_problem_cost_the_same_in_the_whole_one():
    met = 0
    for seed in range(40):
        chance = np.random.default_rng(seed)
        tables = random_tables(chance)
        cuts = (0, *sorted(set(chance.integers(1, tables.num_layers + 1, 3))), tables.num_layers)
        cuts = tuple(sorted({int(c) for c in cuts}))
        result = inter_op(coarsened(tables, cuts))
        whole = inter_op(tables)
        if result is None:
            continue
        assert whole is not None
        assert whole.best.step_s <= result.best.step_s * (1 + 1e-8)
        for found in (result.best, *result.others):
            again = priced(tables, refined(found.picks, cuts))
            assert again.fill_s == pytest.approx(found.fill_s)
            assert again.picks[-1].end == tables.num_layers
        met += 1
    assert met > 10


def test_cuts_are_of_about_equal_time():
    seconds = [(1.0, 1.0)] * 10 + [(10.0, 10.0)]
    facts = ProgramFacts.synthetic([{"seconds": {"a": pair}} for pair in seconds], 8)
    tables = cost_tables(facts, cluster({"a": 1}), 8, EXACT)
    assert coarse_cuts(tables, 2) == (0, 10, 11)
    assert coarse_cuts(tables, 4) == (0, 5, 10, 11)
    assert coarse_cuts(tables, 100) == tuple(range(12))


def test_a_first_answer_does_not_change_the_last():
    """45 layers, where a coarse search comes first: the same as every program solved in full."""
    chance = np.random.default_rng(7)
    facts = ProgramFacts.synthetic(
        [
            {
                "seconds": {"fast": (0.2 * t, 0.3 * t), "slow": (0.5 * t, 0.6 * t)},
                "parameter_bytes": 4.0 * t,
                "activation_bytes": 3.0 * t,
                "boundary_bytes": b,
                "gradient_boundary_bytes": b,
            }
            for t, b in zip(chance.uniform(0.5, 2, 45), chance.uniform(1, 3, 45), strict=True)
        ],
        16,
    )
    machines = cluster(
        {"fast": 2, "slow": 2}, memory={"fast": 320, "slow": 300}, link=Link(0.01, 4)
    )
    found = search(facts, machines, SearchOptions(tables=EXACT))
    whole = [
        inter_op(cost_tables(facts, machines, m, EXACT), InterOpOptions(tolerance=1e-4))
        for m in (1, 2, 4, 8, 16)
    ]
    best_s = min(result.best.step_s for result in whole if result is not None)
    candidates = [c.objective_s for c in (found.best, *found.rejected)]
    assert min(candidates) == pytest.approx(best_s, rel=2e-4)
