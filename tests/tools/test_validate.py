"""`hetpass validate`: every sort of file is told, read, and refused as what it is."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest

from hetpass.ir.device_profile import DeviceProfile, KindProfile

NETWORK = {
    "sizes_MB": [1, 4],
    "inside_node": {"V100-16 x2": [10.0, 20.0]},
    "between_nodes_one_zone": {"V100-16 x2 - A100-40 x4": [1.0, 1.2]},
}


@pytest.fixture
def files(saved, cluster_file, tmp_path):
    kind = KindProfile(MappingProxyType({"float32": 1e12}), 1e11, 1e-5)
    DeviceProfile("2026-11-30", "x86_64, 2 cores", {"jax": "0.10.2"}, {"cpu": kind}).save(
        tmp_path / "profile.json"
    )
    (tmp_path / "network.json").write_text(json.dumps(NETWORK))
    return {
        "plan": saved,
        "facts": saved.with_suffix(".facts.json"),
        "cluster": saved.with_suffix(".cluster.json"),
        "profile": tmp_path / "profile.json",
        "network": tmp_path / "network.json",
    }


@pytest.mark.parametrize(
    ("sort", "words"),
    [
        ("plan", "a plan"),
        ("facts", "facts of a program"),
        ("cluster", "a cluster"),
        ("profile", "a profile"),
        ("network", "a measured network"),
    ],
)
def test_every_sort_is_told(hetpass, files, sort, words):
    said = hetpass("validate", str(files[sort]))
    assert said.code == 0
    assert said.out.startswith(f"{files[sort]}: {words}, and legal\n")
    assert hetpass("validate", str(files[sort]), "--json").data["kind"] == sort


@pytest.mark.parametrize(
    ("sort", "area"),
    [("plan", "PLAN"), ("facts", "FACTS"), ("profile", "PROFILE"), ("cluster", "CLUSTER"),
     ("network", "NETWORK")],
)  # fmt: skip
def test_what_is_wrong_is_said_as_of_that_sort(hetpass, files, sort, area):
    data = json.loads(files[sort].read_text()) | {"speed": 3}
    files[sort].write_text(json.dumps(data))
    said = hetpass("validate", str(files[sort]))
    assert said.code == 1
    assert f"[HP-{area}-KEY] the key 'speed' is not known here" in said.err
    assert "the file was read as " in said.err
    files[sort].write_text(json.dumps(data)[:-1])
    assert "HP-" in hetpass("validate", str(files[sort])).err


def test_a_plan_without_its_format_is_still_read_as_one(hetpass, files):
    data = json.loads(files["plan"].read_text())
    del data["format"]
    files["plan"].write_text(json.dumps(data))
    said = hetpass("validate", str(files["plan"]))
    assert "HP-PLAN-MISSING" in said.err
    assert "it has the key 'pipelines'" in said.err


def test_a_cluster_in_toml(hetpass, cluster_file, tmp_path):
    assert "a cluster, and legal" in hetpass("validate", str(cluster_file)).out
    broken = tmp_path / "broken.toml"
    broken.write_text(cluster_file.read_text().replace("devices_per_host = 4", "devices = 4"))
    said = hetpass("validate", str(broken))
    assert said.code == 1
    assert "HP-CLUSTER-KEY" in said.err


@pytest.mark.parametrize(("name", "code"), [("none.json", "FILE"), ("cut.json", "SYNTAX")])
def test_a_file_that_cannot_be_told(hetpass, tmp_path, name, code):
    (tmp_path / "cut.json").write_text('{"pipelines": [')
    said = hetpass("validate", name)
    assert f"-{code}]" in said.err
    assert "files that are known: a plan, facts of a program, a profile, a measured" in said.err


@pytest.mark.parametrize(
    ("text", "keys"), [('{"lr": 1, "steps": 2}', "'lr', 'steps'"), ("[1]", "no keys")]
)
def test_a_file_of_something_else(hetpass, tmp_path, text, keys):
    (tmp_path / "other.json").write_text(text)
    said = hetpass("validate", "other.json")
    assert said.code == 2
    assert "[HP-TOOL-SORT] this is no file of hetpass" in said.err
    assert keys in said.err
    assert "a cluster: a file with 'groups' or 'kinds'" in said.err
