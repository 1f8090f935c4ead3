import dataclasses
import random

import pytest

from benchmarks.optimal_schedule import cp_sat, exhaustive_s
from hetpass.errors import ScheduleError
from hetpass.planner.adaptive import AdaptiveProblem, adaptive
from hetpass.schedules import LinkCost, PipelineCosts, StageCost
from hetpass.schedules.zero_bubble import v_shape
from hetpass.simulator import makespan_s, simulate


def _random_problem(chance, num_stages, num_microbatches, split_weights):
    stages = tuple(
        StageCost(
            chance.uniform(0.3, 1.5),
            chance.uniform(0.5, 2.5),
            chance.uniform(0.2, 1.2) if split_weights else 0.0,
            weight_bytes=chance.uniform(0.0, 0.6) if split_weights else 0.0,
        )
        for _ in range(num_stages)
    )
    links = tuple(
        LinkCost(c := chance.choice([0.0, 0.1, 1.0, 2.0]) * chance.random(), c, chance.random() / 4)
        for _ in range(num_stages - 1)
    )
    limits = None
    if chance.random() < 0.7:
        limits = tuple(float(chance.randint(1, num_stages + 1)) for _ in range(num_stages))
    return AdaptiveProblem(
        PipelineCosts(stages, links), num_microbatches, None, limits, split_weights, max_plays=200
    )


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "split_weights"),
    [(2, 3, True), (3, 2, True), (2, 5, False), (3, 4, False), (4, 3, False)],
)
def test_within_two_percent_of_the_optimum_on_average(num_stages, num_microbatches, split_weights):
    chance = random.Random(20)
    gaps = []
    for _ in range(8):
        problem = _random_problem(chance, num_stages, num_microbatches, split_weights)
        optimum_s, found = exhaustive_s(problem), adaptive(problem)
        assert found.bound_s <= optimum_s * (1 + 1e-9)
        assert found.makespan_s >= optimum_s * (1 - 1e-9)
        gaps.append(found.makespan_s / optimum_s - 1)
    assert sum(gaps) / len(gaps) <= 0.02


def test_within_two_percent_of_proved_optima_on_average():
    pytest.importorskip("ortools")
    chance = random.Random(4)
    gaps = []
    for _ in range(10):
        sizes = chance.randint(2, 4), chance.randint(2, 5)
        problem = _random_problem(chance, *sizes, chance.random() < 0.5)
        solved, found = cp_sat(problem, limit_s=2.0), adaptive(problem)
        assert found.makespan_s >= solved.bound_s * (1 - 1e-9)
        if solved.proved:
            gaps.append(found.makespan_s / solved.makespan_s - 1)
    assert len(gaps) >= 5
    assert sum(gaps) / len(gaps) <= 0.02


def test_never_slower_than_a_named_schedule_with_the_same_memory():
    chance = random.Random(7)
    compared = 0
    for _ in range(40):
        sizes = chance.randint(1, 6), chance.randint(1, 16)
        problem = _random_problem(chance, *sizes, chance.random() < 0.5)
        problem = dataclasses.replace(problem, max_plays=20)
        found = adaptive(problem)
        assert makespan_s(found.schedule, problem.costs) == pytest.approx(found.makespan_s)
        assert found.bound_s <= found.makespan_s * (1 + 1e-9)
        for seconds in found.named_s.values():
            compared += 1
            assert found.makespan_s <= seconds * (1 + 1e-9)
        if problem.limits_bytes is not None:
            memory = simulate(found.schedule, problem.costs).memory
            for curve, limit in zip(memory, problem.limits_bytes, strict=True):
                assert curve.peak_bytes <= limit + 1e-6
    assert compared > 100


def test_chooses_the_counts_that_a_threshold_misses():
    costs = PipelineCosts.equal(2, StageCost(1 / 3, 2 / 3), LinkCost(0.09, 0.09))
    found = adaptive(AdaptiveProblem(costs, 64))
    assert found.named_s["h-1f1b"] == pytest.approx(70.8, abs=0.1)
    assert found.makespan_s == pytest.approx(65.2, abs=0.1)
    assert found.schedule.in_flight == (3, 1)


def test_the_same_answer_every_time():
    problem = _random_problem(random.Random(3), 4, 9, True)
    assert adaptive(problem) == adaptive(problem)


@pytest.mark.parametrize("split_weights", [False, True])
def test_several_stages_per_lane(split_weights):
    costs = PipelineCosts.equal(6, StageCost(1.0, 1.0, 1.0), LinkCost(0.2, 0.2))
    lane_of = v_shape(6) if split_weights else (0, 1, 2, 0, 1, 2)
    found = adaptive(AdaptiveProblem(costs, 6, lane_of, split_weights=split_weights, max_plays=100))
    name = "zb-v" if split_weights else "interleaved"
    assert found.makespan_s <= found.named_s[name]
    assert found.schedule.lane_of == lane_of


def test_too_little_memory_says_what_is_needed():
    costs = PipelineCosts.equal(2, StageCost(1.0, 1.0, activation_bytes=4.0, fixed_bytes=3.0))
    with pytest.raises(ScheduleError, match="lane 1 needs 7 B and has 6 B") as caught:
        adaptive(AdaptiveProblem(costs, 3, limits_bytes=(7.0, 6.0)))
    assert caught.value.code == "HP-SCHEDULE-MEMORY"


def test_sizes_that_do_not_fit_together_are_refused():
    costs = PipelineCosts.equal(2, StageCost(1.0, 1.0))
    for arguments in ((0,), (2, (0, 2)), (2, (0,)), (2, None, (1.0,))):
        with pytest.raises(ScheduleError) as caught:
            AdaptiveProblem(costs, *arguments)
        assert caught.value.code == "HP-SCHEDULE-SIZES"
