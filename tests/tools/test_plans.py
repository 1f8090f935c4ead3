"""Commands on a saved plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hetpass.ir.plan import Plan
from hetpass.tools.bundle import companions, save_bundle


def test_explain_names_stages_and_the_bottleneck(hetpass, saved):
    said = hetpass("explain", str(saved))
    assert said.code == 0
    assert "2 cpu" in said.out
    assert "bounds it" in said.out
    data = hetpass("explain", str(saved), "--json").data
    assert [stage["last_layer"] for stage in data["stages"]] == [3, 5]
    assert data["step_s"] > 0


def test_explain_of_a_plan_that_cannot_run_says_why(hetpass, saved, bundle):
    layers = tuple(replace(layer, parameter_bytes=1e12) for layer in bundle.facts.layers)
    save_bundle(saved, replace(bundle, facts=replace(bundle.facts, layers=layers)))
    said = hetpass("explain", str(saved))
    assert said.code == 1
    assert "cannot run: stage 0: needs" in said.out
    assert hetpass("explain", str(saved), "--json").data["step_s"] is None


def test_a_plan_in_one_line(hetpass, saved):
    facts, cluster = map(str, companions(saved))
    said = hetpass(
        "simulate",
        "slow: 0-5",
        "--facts",
        facts,
        "--cluster",
        cluster,
        "--microbatches",
        "4",
        "--json",
    )
    assert said.code == 0
    assert list(said.data["lanes"]) == ["0 · slow[2]"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_simulate_under_another_schedule(hetpass, saved, schedule):
    said = hetpass("simulate", str(saved), "--schedule", schedule)
    assert said.code == 0
    assert schedule in said.out
    assert "0 · fast[2]" in said.out


@pytest.mark.parametrize("what", ["timeline", "memory", "sharding"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures(hetpass, saved, tmp_path, what, suffix):
    said = hetpass("plot", str(saved), "--what", what, "-o", f"x.{suffix}")
    assert said.code == 0
    written = (tmp_path / f"x.{suffix}").read_bytes()
    assert len(written) > 5000
    assert written.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_trace(hetpass, saved, tmp_path):
    said = hetpass("trace", str(saved), "-o", "t.json", "--json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == said.data["spans"] > 16


def test_diff(hetpass, saved, bundle, tmp_path):
    assert hetpass("diff", str(saved), str(saved)).code == 0
    text = "fast[2]: 0-4 | slow: 5"
    other = Plan.parse(text, cluster=bundle.cluster, num_layers=6, num_microbatches=2)
    save_bundle(tmp_path / "q.json", replace(bundle, plan=other))
    said = hetpass("diff", str(saved), "q.json", "--json")
    assert said.code == 1
    assert said.data["differences"]["microbatches"] == ["4", "2"]
    assert set(said.data["step_s"]) == {str(saved), "q.json"}
    assert "0-4 on fast[2]" in hetpass("diff", str(saved), "q.json").out


def test_refusals_are_told_and_not_traced(hetpass, saved, tmp_path):
    assert "HP-PLAN-FILE" in hetpass("explain", "none.json").err
    (tmp_path / "p.facts.json").unlink()
    said = hetpass("explain", str(saved))
    assert said.code == 2
    assert "HP-TOOL-FACTS" in said.err
    assert "Traceback" not in said.err
    error = hetpass("explain", str(saved), "--json").data["error"]
    assert error["code"] == "HP-TOOL-FACTS"
    assert error["ways_out"]
    assert hetpass("plot", str(saved), "-o", "x.gif").code == 2
    assert hetpass("explode").code == 2


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("explain bad.json", "HP-PLAN-SYNTAX"),
        ("explain bin.json", "HP-PLAN-FILE"),
        ("explain p.json --facts none.json", "HP-TOOL-FACTS"),
        ("explain p.json --facts bin.json", "HP-TOOL-FACTS"),
        ("explain p.json --facts folder", "HP-TOOL-FACTS"),
        ("explain p.json --facts bad.json", "HP-FACTS-SYNTAX"),
        ("explain p.json --cluster bin.json", "HP-CLUSTER-FILE"),
        ("validate none.json", "HP-CLUSTER-FILE"),
        ("validate folder", "HP-CLUSTER-FILE"),
        ("diff p.json bad.json", "HP-PLAN-SYNTAX"),
        ("plot p.json -o folder/none/x.png", "HP-TOOL-WRITE"),
        ("trace p.json -o folder/none/x.json", "HP-TOOL-WRITE"),
        ("simulate p.json --schedule nope", "HP-SCHEDULE-UNKNOWN"),
        ("simulate p.json --microbatches 7", "HP-TOOL-ARGUMENTS"),
        ("cluster show folder", "HP-CLUSTER-FILE"),
        ("devices Z9", "HP-CLUSTER-KIND"),
        ("bench --on nope", "HP-TOOL-CLUSTER"),
        ("explain p.facts.json", "HP-TOOL-SORT"),
        ("plot p.cluster.json", "HP-TOOL-SORT"),
        ("diff p.json c.toml", "HP-TOOL-SORT"),
        ("explain c.toml", "HP-TOOL-SORT"),
        ("explain p.json --facts p.cluster.json", "HP-TOOL-SORT"),
        ("explain p.json --cluster p.facts.json", "HP-TOOL-SORT"),
        ("cluster show p.json", "HP-TOOL-SORT"),
        ("plan gpt-tiny --cluster p.json", "HP-TOOL-SORT"),
        ("explain my_step.py:train_step", "HP-TOOL-PLAN"),
        (
            "explain slow:0-5 --facts p.facts.json --cluster c.toml --microbatches 0",
            "HP-PLAN-VALUE",
        ),
        ("whatif p.json --remove slow --tokens 0", "HP-TOOL-ARGUMENTS"),
        ("whatif p.json --remove slow --price cpu=.", "HP-TOOL-ARGUMENTS"),
        ("", "HP-TOOL-USAGE"),
        ("explode", "HP-TOOL-USAGE"),
        ("cluster", "HP-TOOL-USAGE"),
        ("plan --batch two --cluster c.toml", "HP-TOOL-USAGE"),
        ("plot p.json --what no", "HP-TOOL-USAGE"),
    ],
)
def test_bad_lines_are_refused_by_code(hetpass, saved, cluster_file, tmp_path, line, code):
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bin.json").write_bytes(bytes(range(256)))
    said = hetpass(*line.split())
    assert said.code in (1, 2)
    assert said.err.startswith(f"[{code}]")
    assert "ways out:" in said.err
    data = hetpass(*line.split(), "--json")
    assert (data.code, data.err) == (said.code, "")
    assert data.data["error"]["code"] == code
    assert hetpass("--json", *line.split()) == data


def test_a_file_of_another_sort_names_what_takes_it(hetpass, saved, cluster_file):
    said = hetpass("explain", "p.facts.json")
    assert "p.facts.json holds facts of a program, not a plan" in said.err
    assert "hetpass explain PLAN --facts p.facts.json" in said.err
    assert "hetpass cluster show c.toml" in hetpass("explain", "c.toml").err


def test_the_catalogue_says_its_units(hetpass):
    said = hetpass("devices")
    (row,) = (line for line in said.out.splitlines() if line.split()[:1] == ["A100-40"])
    assert row.split()[1:7] == ["40", "GiB", "1.55", "TB/s", "19.5", "TFLOP/s"]
