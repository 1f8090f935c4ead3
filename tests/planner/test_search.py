"""CASES 18 to 22 and 31 on the planner as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from hetpass.cost.analytic import PEAK, Submesh
from hetpass.cost.tables import TableOptions, cost_tables
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster, DeviceGroup, Link
from hetpass.ir.facts import Amount, ProgramFacts
from hetpass.planner.evaluate import evaluate
from hetpass.planner.inter_op import InterOp, inter_op
from hetpass.planner.search import SearchOptions, microbatch_numbers, search
from tests.planner.inter_op_instances import random_tables
from tests.planner.small_clusters import (
    BATCH,
    EXACT,
    FREE,
    cluster,
    equal_layers,
    kind,
    stages_text,
)

ALL = SearchOptions(num_microbatches=(BATCH,), tables=EXACT)


def found(facts, machines, options=ALL):
    result = search(facts, machines, options)
    result.plan.check(machines, facts.num_layers, batch_size=facts.batch_size)
    return result


# -- 19, 20: speed, memory, links ---------------------------------------------------------------


def test_speeds_two_to_one():
    result = found(equal_layers(), cluster())
    assert stages_text(result.plan) == "fast[1]: 0-3 | slow[1]: 4-5"
    assert result.best.step_s == pytest.approx(18.0)
    assert result.best.objective_s == pytest.approx(18.0)


def test_an_even_cut_costs_more():
    plan = found(equal_layers(), cluster()).plan
    first, second = plan.pipelines[0].stages
    even = replace(
        plan,
        pipelines=(
            replace(
                plan.pipelines[0],
                stages=(replace(first, last_layer=2), replace(second, first_layer=3)),
            ),
        ),
    )
    assert evaluate(even, equal_layers(), cluster(), PEAK).step_s == pytest.approx(25.5)


def test_memory_for_three_layers_on_the_fast_one():
    facts = equal_layers(parameter_bytes=10.0)
    result = found(facts, cluster(memory={"fast": 35}))
    both = {stages_text(c.plan): c for c in (result.best, *result.rejected)}
    fast_first, slow_first = (
        both["fast[1]: 0-2 | slow[1]: 3-5"],
        both["slow[1]: 0-2 | fast[1]: 3-5"],
    )
    for candidate in (fast_first, slow_first):
        assert candidate.objective_s == pytest.approx(25.5)
    assert fast_first.step_s == pytest.approx(25.5)
    # with three in flight the slow one never waits for the fast one behind it
    assert slow_first.step_s == pytest.approx(24.0)
    assert result.best is slow_first


def test_a_device_twenty_times_slower_stays_idle():
    result = found(equal_layers(seconds={"fast": 0.5, "slow": 10.0}), cluster())
    assert stages_text(result.plan) == "fast[1]: 0-5"
    assert result.best.step_s == pytest.approx(24.0)


@pytest.mark.parametrize("roomy", ["a", "b"])
def test_who_holds_more_microbatches_goes_first(roomy):
    facts = equal_layers(seconds={"a": 1.0, "b": 1.0}, activation_bytes=10.0)
    machines = cluster({"a": 1, "b": 1}, memory={"a": 30, "b": 30, roomy: 60})
    result = found(facts, machines)
    stages = result.plan.pipelines[0].stages
    assert [s.replicas[0].group for s in stages] == [roomy, "b" if roomy == "a" else "a"]
    assert [s.in_flight for s in stages] == [2, 1]
    assert result.best.step_s == pytest.approx(3 * (2 + 7))


def test_a_slow_link_is_crossed_where_few_bytes_do():
    record = {"seconds": {"a": (0.4, 0.6), "b": (0.4, 0.6)}}
    wide = {**record, "boundary_bytes": 100.0, "gradient_boundary_bytes": 100.0}
    narrow = {**record, "boundary_bytes": 1.0, "gradient_boundary_bytes": 1.0}
    facts = ProgramFacts.synthetic([wide, wide, wide, narrow, wide, wide, wide], BATCH)
    result = found(facts, cluster({"a": 1, "b": 1}, link=Link(0.0, 50.0)))
    assert stages_text(result.plan) in ("a[1]: 0-3 | b[1]: 4-6", "b[1]: 0-3 | a[1]: 4-6")


def test_a_link_too_slow_is_not_crossed():
    facts = equal_layers(
        seconds={"a": 1.0, "b": 1.0}, boundary_bytes=1.0, gradient_boundary_bytes=1.0
    )
    near = found(facts, cluster({"a": 1, "b": 1}, link=Link(0.0, 1.0)))
    far = found(facts, cluster({"a": 1, "b": 1}, link=Link(0.0, 0.1)))
    assert near.plan.num_stages == 2
    assert far.plan.num_stages == 1


def test_in_flight_microbatches_hide_a_slow_link_where_memory_allows():
    facts = equal_layers(
        2,
        seconds={"a": 1.0, "b": 1.0},
        boundary_bytes=1.0,
        gradient_boundary_bytes=1.0,
        activation_bytes=10.0,
    )
    slow = Link(0.0, 1 / 0.9)
    roomy = found(facts, cluster({"a": 1, "b": 1}, link=slow))
    assert roomy.plan.num_stages == 2
    assert roomy.plan.pipelines[0].stages[0].in_flight >= 3
    tight = found(facts, cluster({"a": 1, "b": 1}, memory={"a": 24, "b": 24}, link=slow))
    assert roomy.best.step_s < tight.best.step_s


# -- 18: groups of 3, 5 and 6; indivisible batches ------------------------------------------------


def test_groups_of_three_five_and_six_devices():
    facts = ProgramFacts.synthetic(30 * [{"seconds": {name: (0.4, 0.6) for name in "abc"}}], 8 * 30)
    machines = cluster({"a": 3, "b": 5, "c": 6})
    result = found(facts, machines, SearchOptions(num_microbatches=(8,), tables=EXACT))
    used = sum(len(s.replicas[0].devices) for s in result.plan.pipelines[0].stages)
    assert used == 14
    per_device_s = 30 * 8 * 30 / 14
    assert per_device_s < result.best.step_s < 1.5 * per_device_s


def test_numbers_of_microbatches_divide_the_batch():
    assert sorted(microbatch_numbers(12, None)) == [1, 2, 3, 4, 6, 12]
    assert microbatch_numbers(12, (5, 7)) == ()
    with pytest.raises(PlanError) as caught:
        search(equal_layers(), cluster(), SearchOptions(num_microbatches=(3, 5)))
    assert caught.value.code == "HP-PLAN-MICROBATCHES"
    assert "1, 2, 4, 8" in str(caught.value)


def test_data_parallel_shares_come_out_whole():
    facts = ProgramFacts.synthetic(4 * [{"seconds": {"a": (0.4, 0.6)}}], 6)
    result = found(facts, cluster({"a": 4}), SearchOptions(tables=EXACT))
    for stage in result.plan.pipelines[0].stages:
        assert 6 // result.plan.num_microbatches % len(stage.replicas[0].devices) == 0


# -- 21: formats, more is never worse, names and places mean nothing ------------------------------


def machines_of_formats(**dtypes):
    groups = tuple(DeviceGroup(n, kind(n, dtypes=d), 1, 1) for n, d in dtypes.items())
    return Cluster(groups, default_link=FREE)


def test_a_format_that_a_kind_lacks_is_never_planned_there():
    flops = {"bfloat16": 1.0}
    facts = ProgramFacts.synthetic(
        [
            {"forward_flops": {"float32": 1.0}, "backward_flops": {"float32": 1.0}},
            {"forward_flops": flops, "backward_flops": flops},
        ],
        BATCH,
    )
    machines = machines_of_formats(old=("float32",), new=("float32", "bfloat16"))
    assert stages_text(found(facts, machines).plan) == "old[1]: 0-0 | new[1]: 1-1"
    with pytest.raises(PlanError) as caught:
        search(facts, machines_of_formats(old=("float32",)), ALL)
    assert caught.value.code == "HP-PLAN-DTYPE"
    assert "bfloat16" in caught.value.what


def richer(tables, chance):
    """More memory, faster links, or more devices; and which it was."""
    what = ("memory", "links", "devices")[int(chance.integers(3))]
    group = int(chance.integers(len(tables.groups)))
    if what == "memory":
        groups = list(tables.groups)
        more = groups[group].memory_bytes * chance.uniform(1.0, 4.0)
        groups[group] = replace(groups[group], memory_bytes=more)
        return replace(tables, groups=tuple(groups))
    if what == "links":
        faster = chance.uniform(0.2, 1.0, tables.link_forward_s.shape)
        return replace(
            tables,
            link_forward_s=tables.link_forward_s * faster,
            link_backward_s=tables.link_backward_s * faster,
            link_latency_s=tables.link_latency_s * chance.uniform(0.2, 1.0),
        )
    groups = list(tables.groups)
    groups[group] = replace(groups[group], devices=groups[group].devices + 1)
    return replace(tables, groups=tuple(groups))


@pytest.mark.parametrize("block", range(5))
def test_more_is_never_worse(block):
    """500 random changes in five blocks."""
    chance = np.random.default_rng(block)
    better = 0
    for _ in range(25):
        tables = random_tables(chance)
        before = inter_op(tables)
        for _ in range(4):
            after = inter_op(richer(tables, chance))
            if before is not None:
                assert after is not None
                assert after.best.step_s <= before.best.step_s * (1 + 1e-8)
                better += after.best.step_s < before.best.step_s * (1 - 1e-8)
    assert better > 5


def three_groups(order, names):
    """The same three groups under other names and in another order."""
    link = {("a", "b"): Link(1e-3, 40.0), ("a", "c"): Link(2e-3, 15.0), ("b", "c"): Link(0.0, 90.0)}
    groups = {
        "a": DeviceGroup(names["a"], kind("ka", 90), 1, 2, FREE),
        "b": DeviceGroup(names["b"], kind("kb", 150), 1, 1, FREE),
        "c": DeviceGroup(names["c"], kind("kc", 60), 1, 3, FREE),
    }
    links = {(names[p], names[q]): value for (p, q), value in link.items()}
    return Cluster(tuple(groups[g] for g in order), links)


def test_renaming_and_reordering_groups_changes_nothing():
    facts = ProgramFacts.synthetic(
        [
            {
                "seconds": {"ka": (0.2, 0.5), "kb": (0.1, 0.2), "kc": (0.3, 0.7)},
                "parameter_bytes": 5.0 + i % 3,
                "activation_bytes": 2.0,
                "boundary_bytes": 1.0 + i % 2,
                "gradient_boundary_bytes": 1.0,
            }
            for i in range(9)
        ],
        24,
    )
    options = SearchOptions(tables=EXACT)
    names = {"a": "a", "b": "b", "c": "c"}
    other = {"a": "zeta", "b": "alpha", "c": "mid"}
    first = found(facts, three_groups("abc", names), options).plan
    for order, called in (("cab", names), ("abc", other), ("bca", other)):
        plan = found(facts, three_groups(order, called), options).plan
        text = plan.to_json()
        for old, new in called.items():
            text = text.replace(f'"{new}"', f'"{old}"')
        assert text == first.to_json()


# -- 22: nothing fits -----------------------------------------------------------------------------


def test_need_and_have_and_the_least_change():
    facts = equal_layers(4, parameter_bytes=10.0)
    with pytest.raises(PlanError) as caught:
        search(facts, cluster(memory={"fast": 12, "slow": 16}), ALL)
    error = caught.value
    assert error.code == "HP-PLAN-MEMORY"
    text = str(error)
    # two layers on each: 20 bytes in 12; three on the slow one would be 30 in 16
    assert "fast: needs 20 B on each device, has 12 B" in text
    assert "1.67 times" in text or "1.68 times" in text
    assert "devices in 'slow' instead of 1" in text
    larger = cluster(memory={"fast": 12 * 1.68, "slow": 16 * 1.68})
    assert found(facts, larger).plan.num_stages == 2


def test_a_schedule_that_holds_too_much():
    facts = equal_layers(activation_bytes=10.0)
    machines = cluster(memory={"fast": 85, "slow": 85})
    assert found(facts, machines, replace(ALL, schedule="1f1b")).plan.num_stages == 2
    two = cluster({"fast": 1, "slow": 1}, memory={"fast": 45, "slow": 45})
    assert found(facts, two, replace(ALL, schedule="auto")).plan.num_stages == 2
    with pytest.raises(PlanError) as caught:
        search(facts, two, replace(ALL, schedule="gpipe"))
    assert caught.value.code == "HP-PLAN-SCHEDULE"


def test_a_layer_larger_than_any_device():
    facts = ProgramFacts.synthetic(
        [{"seconds": {"fast": (1, 1)}}, {"seconds": {"fast": (1, 1)}, "parameter_bytes": 500.0}],
        BATCH,
    )
    with pytest.raises(PlanError) as caught:
        search(facts, cluster({"fast": 1}, memory={"fast": 100}), ALL)
    assert "the largest layer, 1, needs 500 B" in str(caught.value)
    assert "5.00 times" in str(caught.value) or "5.01 times" in str(caught.value)


def test_tensor_parallelism_and_recomputation_are_used_when_memory_asks():
    layer = {
        "seconds": {"fast": (1.0, 2.0)},
        "parameter_bytes": 60.0,
        "activation_bytes": Amount(0.0, 30.0),
        "most_tensor_parallel": 2,
    }
    facts = ProgramFacts.synthetic([layer, layer], 4)
    options = SearchOptions(num_microbatches=(2,), tables=TableOptions(assumed=PEAK))
    plan = found(facts, cluster({"fast": 2}, memory={"fast": 125}), options).plan
    meshes = [stage.replicas[0].mesh for stage in plan.pipelines[0].stages]
    assert Submesh(1, 2).axes in meshes or plan.num_stages == 2
    with pytest.raises(PlanError):
        search(facts, cluster({"fast": 2}, memory={"fast": 60}), options)


# -- 31: determinism ------------------------------------------------------------------------------

_SCRIPT = """
from tests.planner.small_clusters import *
from hetpass.planner.search import SearchOptions, search
facts = equal_layers(12, {"a": 1.0, "b": 0.7, "c": 0.7}, parameter_bytes=3.0)
machines = cluster({"a": 2, "b": 1, "c": 1}, memory={"a": 30})
import sys
sys.stdout.write(search(facts, machines, SearchOptions(tables=EXACT)).plan.to_json())
"""


def test_the_same_bytes_in_another_process():
    texts = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert next(iter(texts)).startswith("{")


@pytest.mark.parametrize(
    ("schedule", "named", "counted"),
    [("auto", "1f1b", True), ("eager-1f1b", "1f1b", True), ("gpipe", "gpipe", False)],
)
def test_the_plan_says_its_schedule(schedule, named, counted):
    plan = found(equal_layers(), cluster(), replace(ALL, schedule=schedule)).plan
    assert plan.schedule == named
    assert all((s.in_flight is not None) == counted for s in plan.pipelines[0].stages)
    again = evaluate(plan, equal_layers(), cluster(), PEAK)
    assert again.step_s == pytest.approx(plan.predictions["step_s"])


def test_an_order_of_tasks_may_be_searched_for_the_winner():
    result = found(equal_layers(), cluster(), replace(ALL, schedule="adaptive"))
    assert result.plan.schedule == "adaptive"
    assert result.best.step_s <= 18.0 + 1e-9


def test_an_interrupted_search_gives_the_best_so_far_and_says_so():
    options = SearchOptions(tables=EXACT)
    seen = []

    def interrupt(m, best_s):
        seen.append(m)
        raise KeyboardInterrupt

    result = search(equal_layers(), cluster(), options, progress=interrupt)
    assert result.interrupted
    assert result.plan.predictions["interrupted"] == 1.0
    assert result.plan.num_microbatches == seen[0]
    assert len(seen) == 1
    whole = search(equal_layers(), cluster(), options)
    assert not whole.interrupted
    assert "interrupted" not in whole.plan.predictions


def test_first_answers_are_kept_when_a_search_is_interrupted(monkeypatch):
    first, seen = InterOp.first, []

    def interrupt(problem, at_most_s=None):
        seen.append(problem.tables.num_microbatches)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return first(problem, at_most_s)

    monkeypatch.setattr(InterOp, "first", interrupt)
    result = search(equal_layers(), cluster(), SearchOptions(tables=EXACT))
    assert result.interrupted
    assert result.plan.num_microbatches == seen[0]
    assert result.gap > 0


def test_an_interrupted_program_gives_the_best_so_far():
    tables = cost_tables(equal_layers(), cluster(), BATCH, EXACT)

    def interrupt(bounds, best_s):
        if bounds == 2:  # the first is outside of what can be interrupted: nothing is known yet
            raise KeyboardInterrupt

    result = inter_op(tables, progress=interrupt)
    assert result.interrupted
    assert result.bounds == 2
    assert result.gap > 0
    assert result.best.step_s >= inter_op(tables).best.step_s


def test_costs_may_come_from_elsewhere():
    """The seam for an intra-op program: any tables in place of the analytic ones."""
    facts, machines = equal_layers(), cluster()

    def halved(m):
        tables = cost_tables(facts, machines, m, EXACT)
        stages = tuple(
            replace(t, forward_s=t.forward_s / 2, backward_s=t.backward_s / 2)
            for t in tables.stages
        )
        return replace(tables, stages=stages)

    result = search(facts, machines, ALL, tables=halved)
    assert result.best.step_s == pytest.approx(9.0)


# -- many layers ----------------------------------------------------------------------------------


def test_numbers_of_microbatches_that_are_left_out_could_not_win():
    """45 layers: the same as every program solved in full."""
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
    result = search(facts, machines, SearchOptions(tables=EXACT))
    whole = [inter_op(cost_tables(facts, machines, m, EXACT)) for m in (1, 2, 4, 8, 16)]
    best_s = min(one.best.step_s for one in whole if one is not None)
    candidates = [c.objective_s for c in (result.best, *result.rejected)]
    assert min(candidates) == pytest.approx(best_s, rel=2e-4)


def changed(machines, chance):
    """Another cluster: a group more or less, or of another size, or with other memory or links."""
    groups = list(machines.groups)
    what = int(chance.integers(4))
    at = int(chance.integers(len(groups)))
    group = groups[at]
    if what == 0 and len(groups) > 1:
        del groups[at]
    elif what == 1:
        groups[at] = replace(group, devices_per_host=int(chance.integers(1, 4)))
    elif what == 2:
        memory_bytes = group.kind.memory_bytes * chance.uniform(0.7, 1.5)
        groups[at] = replace(group, kind=replace(group.kind, memory_bytes=memory_bytes))
    else:
        link = Link(float(chance.uniform(0, 0.1)), float(chance.uniform(1, 20)))
        return Cluster(tuple(groups), default_link=link)
    return Cluster(tuple(groups), default_link=machines.default_link)


def test_a_plan_for_a_changed_cluster_is_as_good_as_one_from_nothing():
    chance = np.random.default_rng(3)
    facts = ProgramFacts.synthetic(
        [
            {
                "seconds": {"a": (0.2, 0.3), "b": (0.5 * t, 0.6 * t), "c": (0.3, 0.9 * t)},
                "parameter_bytes": 4.0 * t,
                "activation_bytes": 3.0,
                "boundary_bytes": 1.0,
                "gradient_boundary_bytes": 1.0,
            }
            for t in (1.0, 2.0, 1.0, 1.0, 1.5, 1.0, 2.0, 1.0)
        ],
        8,
    )
    start = cluster({"a": 2, "b": 2, "c": 1}, memory=dict.fromkeys("abc", 60), link=Link(0.0, 4.0))
    machines, planned, names = start, 0, []
    options = SearchOptions(tables=EXACT)
    for _ in range(24):
        machines = changed(machines if len(machines.groups) > 1 else start, chance)
        whole = [inter_op(cost_tables(facts, machines, m, EXACT)) for m in (1, 2, 4, 8)]
        best_s = min((one.best.step_s for one in whole if one is not None), default=None)
        if best_s is None:
            with pytest.raises(PlanError):
                search(facts, machines, options)
            continue
        result = search(facts, machines, options)
        again = search(ProgramFacts.from_json(facts.to_json()), machines, options)
        assert result.plan.to_json() == again.plan.to_json()
        candidates = [c.objective_s for c in (result.best, *result.rejected)]
        assert min(candidates) <= best_s * (1 + 2e-4)
        names.append(stages_text(result.plan))
        planned += 1
    assert planned > 12
    assert len(set(names)) > 5
