"""Readers of other planners' files, on small files of our own in their formats."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hetpass.errors import PlanError
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, Link
from hetpass.ir.facts import ProgramFacts
from third_party import alpa, flagscale, metis, sailor
from third_party.compare import compare, table

LINK = Link(1e-5, 25e9)
CLUSTER = Cluster(
    (
        DeviceGroup("t4", find_kind("T4"), 2, 4, LINK, LINK),
        DeviceGroup("a100", find_kind("A100-80"), 2, 4, LINK, LINK),
    ),
    default_link=Link(1e-4, 1e9),
)


def stages(plan):
    return [
        (s.last_layer, s.replicas[0].group, s.replicas[0].axis_size("data"),
         s.replicas[0].axis_size("model"))
        for s in plan.pipelines[0].stages
    ]  # fmt: skip


def test_metis_plans():
    text = (
        "rank, cost, node_sequence, …\n"
        "1, 9.5, (<DeviceType.A100: 'a100'>, <DeviceType.T4: 't4'>), [16], [(4, 4)], 8, [0, 10]\n"
        "2, 23.7, (<DeviceType.T4: 't4'>, <DeviceType.A100: 'a100'>), [8, 4, 4], "
        "[(4, 2), [4, 1], (2, 2)], 8, [0, 4, 4, 10]\n"
    )
    (plan,) = metis.read_plans(text, CLUSTER)  # the first lies across unlike kinds
    assert stages(plan) == [(3, "t4", 4, 2), (9, "a100", 2, 2)]
    assert plan.pipelines[0].stages[1].replicas[0].devices == (4, 5, 6, 7)
    with pytest.raises(PlanError, match="no line is a plan"):
        metis.read_plans("nothing", CLUSTER)


def test_metis_profiles_and_clusters(tmp_path):
    for device, factor in (("A100", 1), ("T4", 4)):
        for examples in (1, 4):
            data = {
                "model": {"parameters": {"parameters_per_layer_bytes": [1000, 2000]}},
                "execution_time": {
                    "layer_compute_total_ms": [factor * (1 + 2 * examples), factor * examples]
                },
                "execution_memory": {"layer_memory_total_mb": [10 + examples, 20]},
            }
            (tmp_path / f"DeviceType.{device}_tp1_bs{examples}.json").write_text(json.dumps(data))
    facts = metis.read_profiles(tmp_path, 16)
    first = facts.layers[0]
    assert sorted(first.seconds) == ["A100-40", "T4"]
    both = first.seconds["T4"]
    assert both.forward.of(4) + both.backward.of(4) == pytest.approx(0.036)
    assert first.activation_bytes.per_example == pytest.approx(1e6)

    (tmp_path / "hostfile").write_text("10.0.0.1 slots=4\n10.0.0.1 slots=4\n10.0.0.2 2\n")
    (tmp_path / "cluster.json").write_text(
        json.dumps(
            {
                "10.0.0.1": {"instance_type": "T4", "inter_bandwidth": 10, "intra_bandwidth": 50,
                             "memory": 15},
                "10.0.0.2": {"instance_type": "A100", "inter_bandwidth": 312500000.0,
                             "intra_bandwidth": 5312500000.0, "memory": 80},
            }
        )
    )  # fmt: skip
    cluster = metis.read_cluster(tmp_path / "hostfile", tmp_path / "cluster.json")
    assert [(g.name, g.hosts, g.devices_per_host) for g in cluster.groups] == [
        ("t4", 2, 4),
        ("a100", 1, 2),
    ]
    assert cluster.link("t4", "a100").bandwidth == 312500000.0
    assert cluster.group("a100").kind.memory_bytes == 80 * 2**30


def test_flagscale(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(
        "system:\n  hetero:\n    hetero_pipeline_layer_split: [6, 2, 4]\n"
        "    hetero_process_meshes: [2, 1, 1, 2, 1, 1, 1, 1, 4, 2]\n"
        "    hetero_device_types: [t4, A100]\n"
        "micro_batch_size: 2\nglobal_batch_size: 32\n"
    )
    plan = flagscale.read_plan(flagscale.read_settings(path), CLUSTER)
    assert stages(plan) == [(5, "t4", 2, 2), (7, "a100", 4, 1), (11, "a100", 4, 1)]
    assert plan.num_microbatches == 8
    settings = flagscale.read_settings(path) | {"hetero_process_meshes": [1, 2, 1, 1, 3] * 2}
    with pytest.raises(PlanError, match="context and expert"):
        flagscale.read_plan(settings, CLUSTER)


def test_alpa_and_harp():
    log = (
        "Result forward_stage_layer_ids: [[0, 1, 2], [3, 4]]\n"
        "Result mesh_shapes: [(1, (1, 2)), (0, (1, 4))]\n"
        "Result logical_mesh_shapes: [(2, 1), (1, 4)]\n"
    )
    plan = alpa.read_plan(alpa.read_solution(log), CLUSTER, 16)
    assert stages(plan) == [(2, "a100", 2, 1), (4, "t4", 1, 4)]
    solution = {
        "forward_stage_layer_ids": [[0], [1, 2]],
        "submesh_physical_shapes": [[2, 4], [1, 8]],
        "submesh_logical_shapes": [[8, 1], [8, 1]],
        "num_micro_batches": 4,
    }
    plan = alpa.read_plan(alpa.read_solution(json.dumps(solution)), CLUSTER)
    assert stages(plan) == [(0, "t4", 8, 1), (2, "a100", 8, 1)]
    with pytest.raises(PlanError, match="missing"):
        alpa.read_plan({}, CLUSTER)


def test_sailor():
    row = {
        "microbatch": 2,
        "global_batch": 64,
        "stages": [
            {"layers": [0, 4], "replicas": 2 * [{"device": "T4", "tensor_parallel": 4}]},
            {"layers": [4, 6], "replicas": 2 * [{"device": "A100-80", "tensor_parallel": 1}]},
        ],
    }
    plan = sailor.read_plan(row, CLUSTER)
    assert stages(plan) == [(3, "t4", 2, 4), (5, "a100", 2, 1)]
    assert plan.num_microbatches == 16
    row["stages"][0]["replicas"][0] = {"device": "A100-80", "tensor_parallel": 4}
    with pytest.raises(PlanError, match="unlike"):
        sailor.read_plan(row, CLUSTER)


def test_plans_are_compared_by_one_judge(tmp_path):
    layer = {"forward_flops": {"float16": 1e12}, "backward_flops": {"float16": 2e12},
             "most_tensor_parallel": 8}  # fmt: skip
    facts = ProgramFacts.synthetic(6 * [layer], 64)
    ours = alpa.read_plan(
        {"forward_stage_layer_ids": [[0, 1, 2, 3, 4], [5]],
         "submesh_physical_shapes": [[1, [2, 4]], [0, [2, 4]]],
         "submesh_logical_shapes": [[8, 1], [8, 1]]}, CLUSTER, 8,
    )  # fmt: skip
    row = {"microbatch": 1, "global_batch": 64, "stages": [
        {"layers": [0, 6], "replicas": 8 * [{"device": "T4", "tensor_parallel": 1}]}]}  # fmt: skip
    results = compare({"one": ours, "other": sailor.read_plan(row, CLUSTER)}, facts, CLUSTER)
    lines = table(results).splitlines()
    assert [line.split()[0] for line in lines] == ["one", "other"]

    facts.save(tmp_path / "f.json")
    CLUSTER.to_file(tmp_path / "c.json")
    ours.save(tmp_path / "p.json")
    (tmp_path / "row.json").write_text(json.dumps(row))
    line = [sys.executable, "-m", "third_party.compare", "--facts", tmp_path / "f.json",
            "--cluster", tmp_path / "c.json", tmp_path / "p.json",
            f"sailor:{tmp_path / 'row.json'}"]  # fmt: skip
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "balance" in done.stdout


def test_hetpass_does_not_know_this_folder():
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    for path in (root / "hetpass").rglob("*.py"):
        assert "third_party" not in path.read_text(), path
