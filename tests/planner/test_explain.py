from __future__ import annotations

from hetpass.cost.analytic import PEAK
from hetpass.planner.baselines import baseline
from hetpass.planner.evaluate import evaluate
from hetpass.planner.explain import explain
from hetpass.planner.search import SearchOptions, search
from tests.planner.small_clusters import EXACT, cluster, equal_layers


def test_says_who_does_what_and_why():
    facts, machines = equal_layers(), cluster({"fast": 1, "slow": 2})
    options = SearchOptions(num_microbatches=(8,), tables=EXACT)
    result = search(facts, machines, options)
    evaluation = evaluate(result.plan, facts, machines, PEAK)
    others = [baseline(name, facts, machines, options) for name in ("even", "single_group")]
    text = explain(evaluation, facts, machines, result, others, PEAK)
    for part in (
        "8 microbatches",
        "stage  devices",
        "memory of each device:",
        "<- bottleneck",
        "bounded by stage",
        "gap 0.00%",
        "rejected after simulation",
        "% slower, ",
        ": M = 8",
        "single_group: 24 s",
        "times this step",
        "seconds of layers on fast: 6 measured, 0 from peak rates",
    ):
        assert part in text, part


def test_names_idle_devices():
    facts = equal_layers(seconds={"fast": 0.5, "slow": 10.0})
    result = search(facts, cluster(), SearchOptions(num_microbatches=(8,), tables=EXACT))
    evaluation = evaluate(result.plan, facts, cluster(), PEAK)
    assert "idle devices: 1 of slow" in explain(evaluation, facts, cluster(), result)
