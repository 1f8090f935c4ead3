from __future__ import annotations

import json

import pytest

from benchmarks.measured import DATA, cluster
from hetpass.ir.plan import Plan


@pytest.fixture
def mixed(tmp_path):
    path = tmp_path / "mixed.toml"
    cluster({"A100-40": 1, "V100-16": 1}).to_file(path)
    return str(path)


def test_a_plan_from_measured_layers(hetpass, mixed, tmp_path):
    line = ["plan", "OPT-350", "--facts", str(DATA), "--batch", "64", "--cluster", mixed]
    said = hetpass(*line, "-o", "plan.json", "--json")
    assert said.code == 0, said.err
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.num_layers == 26
    assert plan.predictions["step_s"] == pytest.approx(said.data["step_s"])
    assert said.data["plan"] == json.loads(plan.to_json())
    assert {s.replicas[0].group for p in plan.pipelines for s in p.stages} == {"A100-40", "V100-16"}
    text = hetpass(*line).out
    assert "sum of gradients" in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("more", "code", "exit_code"),
    [
        (("OPT-350",), "HP-TOOL-ARGUMENTS", 2),
        (("OPT-351", "--batch", "64"), "HP-PROFILE-FILE", 1),
    ],
)
def test_what_is_missing_is_named(hetpass, mixed, more, code, exit_code):
    said = hetpass("plan", *more, "--facts", str(DATA), "--cluster", mixed)
    assert said.code == exit_code
    assert code in said.err
