from __future__ import annotations

import math

import numpy as np
import pytest

from hetpass.planner.inter_op import InterOpOptions, inter_op
from hetpass.planner.objective import Deltas, fits, priced
from tests.planner.inter_op_instances import least_step_s, random_tables


def just_above(result):
    """Enumeration need not look at what is worse than the result; the optimum itself it finds."""
    return result.best.step_s * (1 + 1e-6) if result else math.inf


@pytest.mark.parametrize("block", range(10))
def test_equal_to_enumeration(block):
    infeasible = 0
    for seed in range(30 * block, 30 * block + 30):
        tables = random_tables(np.random.default_rng(seed))
        result = inter_op(tables, InterOpOptions(one_run=False))
        expected = least_step_s(tables, below_s=just_above(result))
        if result is None:
            assert math.isinf(expected), f"seed {seed}: {expected}"
            infeasible += 1
            continue
        assert result.best.step_s == pytest.approx(expected, rel=1e-7), f"seed {seed}"
        assert fits(tables, result.best)
        assert priced(tables, result.best.picks).fill_s == result.best.fill_s
        assert result.gap <= 1e-8
    assert infeasible < 20


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 2), (1, 2)])
def test_schedules_that_fix_in_flight_counts(least, most):
    bound = 0
    for seed in range(2000, 2060):
        tables = random_tables(np.random.default_rng(seed))
        result = inter_op(tables, InterOpOptions(one_run=False, allowed=Deltas(least, most)))
        free = inter_op(tables, InterOpOptions(one_run=False))
        expected = least_step_s(tables, below_s=just_above(result), least=least, most=most)
        found = result.best.step_s if result else math.inf
        assert found == pytest.approx(expected, rel=1e-7), f"seed {seed}"
        bound += free is not None and found > free.best.step_s * (1 + 1e-6)
    assert bound > 0


@pytest.mark.parametrize("block", range(3))
def test_one_run_per_group_equal_to_enumeration(block):
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        tables = random_tables(np.random.default_rng(seed))
        result = inter_op(tables, InterOpOptions(one_run=True))
        expected = least_step_s(tables, below_s=just_above(result), runs=True)
        found = result.best.step_s if result else math.inf
        assert found == pytest.approx(expected, rel=1e-7), f"seed {seed}"
