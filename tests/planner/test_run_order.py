from __future__ import annotations

import itertools

import numpy as np
import pytest

from hetpass.cost.tables import cost_tables
from hetpass.ir.cluster import Link
from hetpass.planner.judge import judged
from hetpass.planner.objective import Pick
from hetpass.planner.run_order import in_better_order, moved_runs
from tests.planner.small_clusters import EXACT, cluster, equal_layers


def tables(link=None, layers=9, **seconds):
    facts = equal_layers(layers, seconds=seconds, boundary_bytes=1.0, gradient_boundary_bytes=1.0)
    sizes = dict.fromkeys(seconds, 1)
    return cost_tables(facts, cluster(sizes, link=link or Link(0.0, 1e9)), 8, EXACT)


def pipeline(costs, layers):
    """Stages on groups by name, in order, with so many layers each."""
    names = [room.name for room in costs.groups]
    at = {names[table.group]: index for index, table in enumerate(costs.stages)}
    ends = list(itertools.accumulate(layers.values()))
    return tuple(
        Pick(at[name], end - count, end)
        for (name, count), end in zip(layers.items(), ends, strict=True)
    )


def order(costs, picks):
    return "".join(costs.groups[costs.stages[p.table].group].name for p in picks)


def test_every_run_at_every_other_place():
    costs = tables(a=1.0, b=1.0, c=1.0)
    picks = pipeline(costs, {"a": 2, "b": 3, "c": 4})
    found = list(moved_runs(costs, picks))
    assert sorted(order(costs, p) for p in found) == ["acb", "bac", "bca", "cab"]
    for other in found:
        assert other[0].first == 0
        assert other[-1].end == 9
        assert sorted(p.end - p.first for p in other) == [2, 3, 4]


def test_links_that_are_not_there_are_not_crossed():
    costs = tables(a=1.0, b=1.0, c=1.0)
    places = [room.name for room in costs.groups]
    one, other = places.index("a"), places.index("c")
    for values in (costs.link_forward_s, costs.link_latency_s):
        values[one, other] = values[other, one] = np.inf
    beside = pipeline(costs, {"a": 3, "b": 3, "c": 3})
    assert list(moved_runs(costs, beside)) == []
    apart = pipeline(costs, {"a": 3, "c": 3, "b": 3})
    assert sorted(order(costs, p) for p in moved_runs(costs, apart)) == ["abc", "cba"]


def test_the_slowest_stage_comes_to_the_front():
    costs = tables(a=1.0, b=1.0, c=1.0)
    picks = pipeline(costs, {"a": 2, "b": 2, "c": 5})
    own = judged(costs, picks)
    better, judgement = in_better_order(costs, picks, own, lambda p: judged(costs, p))
    assert judgement.step_s < own.step_s * 0.95
    assert order(costs, better)[0] == "c"
    assert judgement.step_s == pytest.approx(judged(costs, better).step_s)
    again, same = in_better_order(costs, better, judgement, lambda p: judged(costs, p))
    assert (again, same) == (better, judgement)
