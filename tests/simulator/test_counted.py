from __future__ import annotations

import numpy as np
import pytest

from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.simulator import makespan_s
from hetpass.simulator.counted import counted_makespan_s


def random_costs(chance, links):
    """`links`: "apart", "shared" wires, or "blocking"."""
    count = int(chance.integers(1, 7))
    stages = tuple(
        StageCost(
            chance.uniform(0.1, 1.0),
            chance.uniform(0.2, 2.0),
            weight_s=chance.choice([0.0, 0.3]),
            update_s=chance.choice([0.0, 0.7]),
        )
        for _ in range(count)
    )
    between = []
    for _ in range(count - 1):
        there, back = chance.choice([0.0, 0.05, 0.8, 2.0], 2) * chance.uniform(0.5, 1.5, 2)
        wire = (f"cable {chance.integers(2)}",) if links == "shared" else ()
        between.append(
            LinkCost(
                there,
                back,
                latency_s=chance.choice([0.0, 0.1]),
                overlaps=links != "blocking",
                forward_wires=wire,
                backward_wires=wire,
            )
        )
    return PipelineCosts(stages, tuple(between))


@pytest.mark.parametrize("links", ["apart", "shared", "blocking"])
def test_as_the_simulator_to_the_last_bit(links):
    for seed in range(120):
        chance = np.random.default_rng(seed)
        costs = random_costs(chance, links)
        microbatches = int(chance.integers(1, 20))
        counts = [1]
        for _ in costs.links:
            counts.append(counts[-1] + int(chance.integers(0, 4)))
        counts = tuple(min(count, microbatches) for count in reversed(counts))
        made = make_schedule(
            "1f1b",
            num_stages=len(costs.stages),
            num_microbatches=microbatches,
            in_flight=counts,
        )
        expected = makespan_s(made, costs)
        assert counted_makespan_s(costs, counts, microbatches) == expected, f"seed {seed}"
