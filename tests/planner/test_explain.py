from __future__ import annotations

from dataclasses import replace

from hetpass.cost.analytic import PEAK
from hetpass.ir.plan import Plan
from hetpass.planner.baselines import baseline
from hetpass.planner.evaluate import evaluate
from hetpass.planner.explain import explain
from hetpass.planner.search import Candidate, SearchOptions, search
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


def test_rejected_plans_are_told_apart_by_their_axes():
    facts, machines = equal_layers(), cluster({"fast": 1, "slow": 2})
    result = search(facts, machines, SearchOptions(num_microbatches=(8,), tables=EXACT))
    others = []
    for text in ("fast: 0-3 | slow: 4-5", "fast: 0-3 | slow(data=1,model=2): 4-5"):
        plan = Plan.parse(text, cluster=machines, num_layers=6, num_microbatches=8)
        (pipeline,) = plan.pipelines
        stages = (pipeline.stages[0], replace(pipeline.stages[1], recompute="full"))
        plan = replace(plan, pipelines=(replace(pipeline, stages=stages),), schedule="1f1b")
        others.append(Candidate(plan, 1.0, 1.0))
    evaluation = evaluate(result.plan, facts, machines, PEAK)
    result = replace(result, rejected=tuple(others))
    lines = explain(evaluation, facts, machines, result, assumed=PEAK).splitlines()
    first = lines.index("rejected after simulation:") + 1
    assert [line.partition(": ")[2] for line in lines[first : first + 2]] == [
        "M = 8, fast[1]: 0-3 | slow[2]: 4-5, recomputed",
        "M = 8, fast[1]: 0-3 | slow[2](data=1,model=2): 4-5, recomputed",
    ]


def test_names_idle_devices():
    facts = equal_layers(seconds={"fast": 0.5, "slow": 10.0})
    result = search(facts, cluster(), SearchOptions(num_microbatches=(8,), tables=EXACT))
    evaluation = evaluate(result.plan, facts, cluster(), PEAK)
    assert "idle devices: 1 of slow" in explain(evaluation, facts, cluster(), result)
