from __future__ import annotations

import random

import numpy as np
import pytest

from hetpass.planner.intra_op.limited_relaxation import LimitedRelaxation
from hetpass.planner.intra_op.linear_program import slack
from hetpass.planner.intra_op.pbqp import Problem
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.sparse_elimination import Limit, survivors
from hetpass.planner.intra_op.tree_bounds import pruned
from tests.planner.intra_op.brute_force import brute_force
from tests.planner.intra_op.random_graphs import random_graph, random_setting


def programs(seeds, most_operations=3):
    for seed in seeds:
        rng = random.Random(seed)
        yield program(random_graph(rng, most_operations), random_setting(rng, 1 + seed % 2))


def with_choice(problem, node, choice):
    nodes = list(problem.nodes)
    nodes[node] = np.where(np.arange(len(nodes[node])) == choice, nodes[node], np.inf)
    return Problem(tuple(nodes), problem.edges)


def test_only_what_cannot_be_near_is_taken_away():
    """Every choice that is gone is tried with all choices of the others."""
    gone = kept = 0
    for made in programs(range(30)):
        above = slack(made.seconds).above
        allowance = 0.05 * max(brute_force(made.seconds), 1e-9)
        found = pruned(above, allowance)
        for node, costs in enumerate(found.nodes):
            for choice in range(len(costs)):
                least = brute_force(with_choice(above, node, choice))
                if np.isinf(costs[choice]) and np.isfinite(above.nodes[node][choice]):
                    gone += 1
                    assert least > allowance * (1 - 1e-9)
                kept += least <= allowance
    assert gone > 100
    assert kept > 100


def test_under_a_limit_nothing_is_lost_that_keeps_it_and_is_near():
    compared = 0
    for made in programs(range(100, 150)):
        if np.prod([float(len(c)) for c in made.seconds.nodes]) > 3e5:
            continue
        fast = brute_force(made.seconds)
        most = sum(float(c.max()) for c in made.memory.nodes)
        for share in (0.3, 0.6):
            limit = share * most + (1 - share) * brute_force(made.memory)
            best = brute_force(made.seconds, made.memory, limit)
            relaxed = LimitedRelaxation(made.seconds, made.memory).within(limit)
            if not np.isfinite(best):
                continue
            bound, price = relaxed.slack.bound, relaxed.price
            assert bound <= best * (1 + 1e-7) + 1e-12
            gap = best - bound + 1e-7 * best + 1e-12
            second = Limit(made.memory, limit, price)
            left = pruned(relaxed.slack.above, gap, second)
            found = survivors(left, (), gap, 1_000_000, second)
            seconds = bound + found.costs + price * (limit - found.weights)
            assert seconds.min() == pytest.approx(best, rel=1e-6, abs=1e-11)
            choices = found.choices(int(seconds.argmin()))
            assert made.seconds.cost(choices) == pytest.approx(best, rel=1e-6, abs=1e-11)
            assert made.memory.cost(choices) <= limit * (1 + 1e-9)
            compared += best > fast * (1 + 1e-9)
    assert compared >= 10
