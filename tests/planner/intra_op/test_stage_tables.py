from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from hetpass.cost.analytic import Assumptions
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster
from hetpass.ir.devices import DeviceGroup, DeviceKind, Link
from hetpass.ir.facts import ProgramFacts
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.intra_op.stage_tables import (
    IntraOpOptions,
    LayerGraphs,
    SolvedTables,
    intra_op_tables,
)
from hetpass.planner.search import SearchOptions, search
from tests.planner.intra_op.layer_graphs import mlp

MICROBATCHES = 4
KINDS = (0, 1, 0, 1, 1)
CROSSING = 2.0 * 256 * 512  # bytes per example
CLUSTER = Cluster(
    (
        DeviceGroup("fast", find_kind("A100-40"), 1, 4),
        DeviceGroup("slow", find_kind("V100-32"), 1, 2, Link(1e-5, 12e9)),
    ),
    {},
    Link(5e-5, 12.5e9),
)
FACTS = ProgramFacts.synthetic(
    [
        {"kind": str(kind), "boundary_bytes": CROSSING, "gradient_boundary_bytes": CROSSING}
        for kind in KINDS
    ],
    8 * MICROBATCHES,
)


def block(mlp_ratio):
    return mlp(2048, 512, 2, mlp_ratio * 512)


@cache
def solved() -> SolvedTables:
    layers = LayerGraphs((block(4), block(2)), KINDS)
    options = IntraOpOptions(Assumptions(launch_s=1e-5), sizes=(1, 2, 4))
    return intra_op_tables(layers, FACTS, CLUSTER, MICROBATCHES, options)


def test_a_table_per_submesh_way_to_recompute_and_price():
    tables = solved().costs
    count = len(KINDS)
    assert tables.num_layers == count
    assert {(t.group, t.devices) for t in tables.stages} == {(0, 1), (0, 2), (0, 4), (1, 1), (1, 2)}
    assert {t.mesh for t in tables.stages} == {
        (("data", 1),),
        (("data", 2),),
        (("data", 4),),
        (("data", 2), ("model", 2)),
    }
    for table in tables.stages:
        for field in ("forward_s", "backward_s", "once_s", "fixed_bytes", "activation_bytes"):
            values = getattr(table, field)
            assert values.shape == (count, count + 1)
            first, end = np.indices(values.shape)
            assert np.isinf(values[first >= end]).all()
            assert np.isfinite(values[first < end]).all()


@pytest.mark.parametrize(("first", "end"), [(0, 5), (1, 4), (3, 4)])
def test_entries_are_what_their_assignments_cost(first, end):
    found = solved()
    for number, table in enumerate(found.costs.stages):
        chain = found.chains[number]
        assignments = found.assignments(number, first, end)
        assert len(assignments) == end - first
        forward = backward = once = state = residual = 0.0
        for layer, assignment in zip(range(first, end), assignments, strict=True):
            made = chain.tables[KINDS[layer]].made
            priced = evaluate(made.graph, made.setting, assignment)
            assert priced.violations == ()
            forward += priced.forward_s
            backward += priced.backward_s
            once += priced.once_s
            state += priced.state_bytes
            residual += priced.residual_bytes
        at = first, end
        assert table.once_s[at] == pytest.approx(once)
        # Beside the layers: what arrives from other stages, and the launch of a task.
        assert 0.999e-5 <= table.forward_s[at] - forward < 1e-3
        assert 0.999e-5 <= table.backward_s[at] - backward < 1e-3
        if table.recompute == "none":
            assert table.activation_bytes[at] == pytest.approx(residual)
            assert table.fixed_bytes[at] >= state
        else:
            assert table.activation_bytes[at] < residual
            assert table.fixed_bytes[at] >= state + residual


def test_more_devices_are_faster_and_prices_of_memory_save_memory():
    stages = solved().costs.stages
    plain = [t for t in stages if t.group == 0 and t.recompute == "none"]
    by_size = {n: min(t.backward_s[0, 5] for t in plain if t.devices == n) for n in (1, 2, 4)}
    assert by_size[4] < by_size[2] < by_size[1]
    for mesh in {t.mesh for t in plain}:
        own = [t for t in plain if t.mesh == mesh]
        held = [t.fixed_bytes[0, 5] + 4 * t.activation_bytes[0, 5] for t in own]
        assert held == sorted(held, reverse=True)
    assert len(plain) > len({t.mesh for t in plain})


def test_the_planner_takes_them():
    tables = solved().costs
    options = SearchOptions(num_microbatches=(MICROBATCHES,))
    result = search(FACTS, CLUSTER, options, tables=lambda _: tables)
    stages = result.plan.pipelines[0].stages
    assert stages[0].first_layer == 0
    assert stages[-1].last_layer == len(KINDS) - 1
    meshes = {table.mesh for table in tables.stages}
    assert {stage.replicas[0].mesh for stage in stages} <= meshes


def test_a_kind_that_lacks_the_number_format_has_no_tables():
    old = DeviceKind("old", {"float32": 1e12}, 1 << 30, 1e11)
    cluster = Cluster((DeviceGroup("o", old, 1, 1), *CLUSTER.groups[1:]), {}, Link(5e-5, 1e10))
    facts = ProgramFacts.synthetic([{"kind": "0"}], 8 * MICROBATCHES)
    options = IntraOpOptions(sizes=(1,), recompute=("none",))
    found = intra_op_tables(LayerGraphs((block(4),), (0,)), facts, cluster, MICROBATCHES, options)
    assert [found.costs.groups[t.group].name for t in found.costs.stages] == ["slow"]
