from __future__ import annotations

import random

import numpy as np
import pytest

from hetpass.planner.intra_op import limited_relaxation
from hetpass.planner.intra_op.answers import fastest
from hetpass.planner.intra_op.elimination import eliminated
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.intra_op.linear_program import EXACT, Effort, solved
from hetpass.planner.intra_op.memory_limits import MemoryLimits
from hetpass.planner.intra_op.memory_sweep import pareto
from hetpass.planner.intra_op.pbqp import reduced
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.solve import solve
from tests.planner.intra_op.brute_force import brute_force
from tests.planner.intra_op.random_graphs import random_graph, random_setting

NEAR = {"rel": 1e-7, "abs": 1e-11}


def problems(seeds, most_operations=8):
    for seed in seeds:
        rng = random.Random(seed)
        graph = random_graph(rng, most_operations)
        setting = random_setting(rng, 1 + seed % 2)
        yield graph, setting, program(graph, setting)


@pytest.mark.parametrize("block", range(6))
def test_reduction_linear_program_and_trying_everything_agree(block):
    """300 graphs of up to 8 operations, on one and on two axes."""
    compared = 0
    for graph, setting, made in problems(range(50 * block, 50 * block + 50)):
        answer = fastest(made)
        assert answer is not None
        assert answer.gap < 1e-9
        whole = solved(made.seconds)
        assert whole.choices is not None
        assert made.seconds.cost(whole.choices) == pytest.approx(answer.seconds, **NEAR)
        tried = brute_force(made.seconds, most_entries=2_000_000)
        if tried is not None:
            compared += 1
            assert tried == pytest.approx(answer.seconds, **NEAR)
        priced = evaluate(graph, setting, answer.assignment)
        assert priced.violations == ()
        counted = priced.step_s(setting.num_microbatches)
        counted += setting.num_microbatches * priced.repeated_s
        assert counted == pytest.approx(answer.seconds, **NEAR)
        assert priced.memory_bytes(setting.held) == pytest.approx(answer.memory_bytes, rel=1e-9)
    assert compared >= 45


def limits_of(made):
    memories = sorted({a.memory_bytes for a in pareto(made)})
    between = [(a + b) / 2 for a, b in zip(memories, memories[1:], strict=False)]
    return memories, [*memories, *between]


def test_under_memory_limits_answers_are_the_best_of_all():
    """Every combination is tried."""
    compared = 0
    for graph, setting, made in problems(range(1000, 1120), most_operations=4):
        combinations = float(np.prod([float(len(c)) for c in made.seconds.nodes]))
        if combinations > 3e5:
            continue
        memories, limits = limits_of(made)
        for limit in limits:
            best = brute_force(made.seconds, made.memory, limit * (1 + 1e-12))
            answer = solve(graph, setting, limit * (1 + 1e-12), EXACT)
            assert answer is not None
            assert answer.memory_bytes <= limit * (1 + 1e-12)
            assert answer.seconds == pytest.approx(best, **NEAR)
            assert answer.gap < 1e-9
            quick = solve(graph, setting, limit * (1 + 1e-12))
            assert quick.memory_bytes <= limit * (1 + 1e-12)
            assert quick.bound <= best * (1 + 1e-7) + 1e-12
            assert quick.seconds >= best * (1 - 1e-9)
            compared += 1
        least = brute_force(made.memory)
        assert memories[0] == pytest.approx(least)
        if least:
            assert solve(graph, setting, 0.99 * least) is None
    assert compared >= 60


@pytest.mark.parametrize(
    ("way", "effort"),
    [
        ("solved anew", EXACT),
        ("divided", Effort(most_limited=0, most_boxes=10_000)),
        ("a few boxes", Effort(most_limited=0, most_boxes=3)),
    ],
)
def test_limits_are_kept_in_whichever_way(monkeypatch, way, effort):
    """Without warm starts, and where no elimination is possible."""
    if way == "solved anew":
        monkeypatch.setattr(limited_relaxation, "_highspy", lambda: False)
    open_gaps = 0
    for _, _, made in problems(range(1000, 1008), most_operations=3):
        best, found = MemoryLimits(made, EXACT), MemoryLimits(made, effort)
        for limit in reversed(limits_of(made)[1]):
            exact, other = best.fastest(limit * (1 + 1e-12)), found.fastest(limit * (1 + 1e-12))
            assert exact.gap < 1e-9
            assert exact.bound <= other.seconds * (1 + 1e-9)
            assert other.bound <= exact.seconds * (1 + 1e-7) + 1e-12
            assert other.memory_bytes <= limit * (1 + 1e-12)
            open_gaps += other.gap > 1e-7
            if way != "a few boxes":
                assert other.seconds == pytest.approx(exact.seconds, **NEAR)
    assert (open_gaps > 0) == (way == "a few boxes")


def test_pareto_answers_trade_time_for_memory():
    for _, _, made in problems(range(40)):
        answers = pareto(made)
        for fast, small in zip(answers, answers[1:], strict=False):
            assert fast.seconds <= small.seconds
            assert fast.memory_bytes > small.memory_bytes


def test_reduction_keeps_the_cost_of_what_it_completes():
    for _, _, made in problems(range(60)):
        rest = reduced(made.seconds)
        core = eliminated(rest.core)
        assert core is not None
        choices = rest.complete(core.choices(()))
        expected = rest.cost + float(core.costs)
        assert made.seconds.cost(choices) == pytest.approx(expected, **NEAR)


def test_elimination_gives_the_best_for_every_state_of_kept_nodes():
    for _, _, made in problems(range(30), most_operations=4):
        kept = [0, len(made.nodes) - 1]
        if len(set(kept)) < 2:
            continue
        found = eliminated(made.seconds, kept)
        assert found is not None
        rest = reduced(made.seconds, kept)
        again = eliminated(rest.core, [rest.nodes.index(k) for k in kept])
        assert again is not None
        assert np.allclose(again.costs + rest.cost, found.costs, rtol=1e-9, atol=1e-12)
        for state in np.ndindex(*found.costs.shape):
            if np.isfinite(found.costs[state]):
                choices = found.choices(state)
                assert made.seconds.cost(choices) == pytest.approx(found.costs[state], **NEAR)


def test_too_large_an_elimination_is_not_begun():
    (_, _, made), *_ = problems([7])
    assert eliminated(made.seconds, most_entries=1) is None


def test_answers_are_the_same_every_time():
    for graph, setting, made in problems(range(20)):
        one, other = fastest(made), solve(graph, setting)
        assert one == other
        assert MemoryLimits(made).fastest(one.memory_bytes) == one
