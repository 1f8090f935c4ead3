from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetpass.cost.tables import cost_tables
from hetpass.ir.cluster import Link
from hetpass.planner.inter_op import inter_op
from hetpass.planner.judge import judged, least_s, pipeline_costs
from hetpass.planner.objective import Pick
from tests.planner.small_clusters import EXACT, cluster, equal_layers


def problem(memory=None, **bytes_):
    facts = equal_layers(
        seconds={"a": 1.0, "b": 1.0},
        boundary_bytes=1.0,
        gradient_boundary_bytes=1.0,
        **bytes_,
    )
    machines = cluster({"a": 1, "b": 1}, memory, Link(0.0, 0.5))
    return cost_tables(facts, machines, 8, EXACT)


PICKS = (Pick(0, 0, 3), Pick(1, 3, 6))


def test_links_between_groups_are_shared_wires():
    costs = pipeline_costs(problem(), PICKS)
    assert (costs.stages[0].forward_s, costs.stages[0].backward_s) == pytest.approx((1.2, 1.8))
    assert (costs.links[0].forward_s, costs.links[0].backward_s) == (2.0, 2.0)
    assert costs.links[0].forward_wires == ("a→b",)
    assert costs.links[0].backward_wires == ("b→a",)


def test_wires_between_groups_are_not_those_of_stages_inside_one():
    """Stages 0 and 1 in the second group, stage 2 in the first: three links, none shared."""
    facts = equal_layers(
        seconds={"a": 1.0, "b": 1.0}, boundary_bytes=1.0, gradient_boundary_bytes=1.0
    )
    steps = set()
    for sizes in ({"a": 1, "b": 2}, {"b": 2, "a": 1}):
        tables = cost_tables(facts, cluster(sizes, link=Link(0.0, 2.0)), 8, EXACT)
        names = [room.name for room in tables.groups]
        tables = replace(tables, link_forward_s=np.full_like(tables.link_forward_s, 0.9),
                         link_backward_s=np.full_like(tables.link_backward_s, 0.9))  # fmt: skip
        first, last = (
            next(i for i, t in enumerate(tables.stages) if names[t.group] == n and t.devices == 1)
            for n in ("b", "a")
        )
        swapped = replace(
            tables,
            groups=tables.groups[::-1],
            stages=tuple(replace(t, group=1 - t.group) for t in tables.stages),
        )
        picks = (Pick(first, 0, 2), Pick(first, 2, 4), Pick(last, 4, 6))
        steps |= {round(judged(t, picks, "eager-1f1b").step_s, 9) for t in (tables, swapped)}
    assert len(steps) == 1


def test_a_bound_that_no_schedule_passes():
    costs = pipeline_costs(problem(), PICKS)
    bound_s = least_s(costs, 8)
    # the second stage: 1.2 s until the first has an activation, 2 s of link, 8 times 3 s of work
    assert bound_s == pytest.approx(1.2 + 2.0 + 8 * 3.0)
    for name in ("1f1b", "eager-1f1b", "h-1f1b", "gpipe"):
        assert bound_s <= judged(problem(), PICKS, name).step_s


def test_the_best_of_the_family_is_taken():
    tables = problem()
    auto = judged(tables, PICKS)
    named = [judged(tables, PICKS, name) for name in ("1f1b", "eager-1f1b", "h-1f1b")]
    assert auto.step_s == min(judgement.step_s for judgement in named)
    assert judged(tables, PICKS, "adaptive").step_s <= auto.step_s
    assert named[0].step_s > auto.step_s


def test_counts_are_cut_to_what_fits():
    tables = problem({"a": 65}, activation_bytes=10.0)  # two microbatches of three layers
    assert judged(tables, PICKS).in_flight == (2, 1)
    assert judged(tables, PICKS, "eager-1f1b") is None
    assert judged(problem({"a": 25}, activation_bytes=10.0), PICKS) is None


def test_close_to_the_objective():
    found = inter_op(problem()).best
    assert judged(problem(), found.picks, in_flight=found.in_flight).step_s == pytest.approx(
        found.step_s, rel=0.1
    )
