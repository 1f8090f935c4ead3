"""`plan`, `opt` and `profile` on a script of a user's own, and the plan cache."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hetpass.ir.device_profile import DeviceProfile
from hetpass.ir.plan import Plan
from hetpass.tools.models.names import SIZES
from hetpass.tools.plan_cache import PlanCache
from hetpass.tools.terminal import Terminal


def test_plan_of_a_script(hetpass, script, cluster_file, tmp_path):
    line = ("plan", f"{script}:train_step", "--cluster", str(cluster_file))
    said = hetpass(*line, "-o", "plan.json")
    assert said.code == 0, said.err
    assert "train_step: 4 layers" in said.out
    assert Plan.load("plan.json").num_layers == 4
    assert hetpass("explain", "plan.json").code == 0

    again = hetpass(*line, "--json").data
    assert again["cached"]
    assert again["plan"] == json.loads((tmp_path / "plan.json").read_text())
    folder = tmp_path / "cache"
    (entry,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    # another number of microbatches, a changed step: other entries
    assert not hetpass(*line, "--microbatches", "2", "--json").data["cached"]
    script.write_text(script.read_text().replace("jnp.tanh", "jnp.sin"))
    assert not hetpass(*line, "--json").data["cached"]
    assert len(hetpass("cache", "ls", "--json").data["entries"]) == 3

    entry.write_text("{}")  # an entry that cannot be read is none
    assert PlanCache(folder).find(entry.stem) is None
    assert hetpass("cache", "rm", "nothing").code == 2
    assert hetpass("cache", "rm", entry.stem[:8]).code == 0
    assert hetpass("cache", "rm", "--all", "--json").data["removed"]
    assert not list(folder.iterdir())


def test_what_is_being_done_is_said(hetpass, script, cluster_file, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(Terminal, "progress", lambda self, text: said.append(text))
    line = ("plan", f"{script}:train_step", "--cluster", str(cluster_file), "--microbatches", "2")
    axes = hetpass(*line, "--json").data
    assert said.index("tracing") < said.index("splitting into microbatches")
    assert said.index("splitting into microbatches") < said.index("searching for a plan")
    said.clear()
    solved = hetpass(*line, "--sharding", "solved", "--json").data
    shards = [text for text in said if text.startswith("solving shardings: ")]
    assert shards[0].startswith("solving shardings: 1 of ")
    done, _, of = shards[-1].removeprefix("solving shardings: ").partition(" of ")
    assert done == of.split()[0] == str(len(shards))
    assert said.index(shards[-1]) < max(
        i for i, t in enumerate(said) if t == "searching for a plan"
    )
    assert any(text.startswith("searching: M = 2 done") for text in said)
    stages = [plan["plan"]["pipelines"][0]["stages"] for plan in (axes, solved)]
    assert not solved["cached"]
    assert not any(stage.get("assignments") for stage in stages[0])
    assert all(stage["assignments"] for stage in stages[1])


@pytest.mark.parametrize(
    ("step", "code"),
    [
        ("none.py:step", "HP-TOOL-SCRIPT"),
        ("my_step.py:train", "HP-TOOL-FUNCTION"),
        ("my_step.py:jnp", "HP-TOOL-FUNCTION"),
        ("my_step.py", "HP-TOOL-MODEL"),
        ("gpt-2.7B", "HP-TOOL-MODEL"),
        ("broken.py:step", "HP-TOOL-SCRIPT"),
        ("bare.py:step", "HP-TOOL-ARGUMENTS"),
    ],
)
def test_targets_that_cannot_be_used(hetpass, script, cluster_file, tmp_path, step, code):
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    (tmp_path / "bare.py").write_text("def step(state, batch): return state\n")
    said = hetpass("plan", step, "--cluster", str(cluster_file))
    assert (said.code, code in said.err) == (2, True), said.err
    assert "ways out" in said.err
    if code == "HP-TOOL-SCRIPT" and step.startswith("broken"):
        assert "broken.py:1" in said.err
    if step == "gpt-2.7B":
        assert "gpt-2.6B" in said.err


def test_a_refused_step(hetpass, cluster_file, tmp_path):
    (tmp_path / "mixing.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def example_arguments(): return jnp.ones((8, 8)), jnp.ones((16, 8))\n"
        "def step(w, x):\n"
        "    def loss(w):\n"
        "        y = x @ w\n"
        "        y = (y - y.mean(0)) / (y.std(0) + 1)\n"
        "        return (jnp.tanh(y @ w) ** 2).mean()\n"
        "    return jax.grad(loss)(w)\n"
    )
    line = ("plan", "mixing.py:step", "--cluster", str(cluster_file), "--microbatches", "4")
    said = hetpass(*line)
    assert said.code == 1
    assert "HP-SPLIT-MIXES" in said.err
    assert hetpass(*line, "--per-microbatch").code == 0


def test_opt_prints_every_pass(hetpass, script, cluster_file):
    line = ("opt", f"{script}:train_step", "--cluster", str(cluster_file), "--microbatches", "4")
    said = hetpass(*line)
    assert said.code == 0, said.err
    heads = [text.split()[1] for text in said.out.splitlines() if text.startswith("== ")]
    assert heads[:3] == ["trace", "split", "segment"]
    assert heads[-1] == "partition"
    split = hetpass(*line, "--stop-after", "split", "--only", "--json").data["passes"]
    assert [record["name"] for record in split] == ["split"]
    assert "tanh" in split[0]["value"]


def test_profile_of_devices_and_layers(hetpass, script, cluster_file, tmp_path):
    line = ("profile", f"{script}:train_step", "--microbatches", "4", "--quick", "-o", "f.json")
    said = hetpass(*line)
    assert said.code == 0, said.err
    found = DeviceProfile.load("f.json")
    assert found.kinds["cpu"].rates["float32"] > 1e6
    ((program, devices),) = found.layers.items()
    assert all(s.forward.of(4) > 0 and s.backward.of(4) > 0 for s in devices["cpu"].values())
    plan = ("plan", f"{script}:train_step", "--cluster", str(cluster_file), "--profile", "f.json")
    planned = hetpass(*plan, "-o", "plan.json", "--json")
    assert planned.code == 0, planned.err
    assert planned.data["plan"]["fingerprint"] == program
    facts = json.loads(Path("plan.facts.json").read_text())
    assert any("cpu" in layer["seconds"] for layer in facts["layers"])
    assert hetpass("profile", f"{script}:train_step", "--quick").code == 2


def test_doctor(hetpass):
    data = hetpass("doctor", "--quick", "--json").data
    assert data["faults"] == []
    assert len(data["devices"]) == 8
    assert data["links"][0]["intact"]


def test_every_model_traces():
    """Of the tiny ones: one of each family; sizes are told by their names."""
    from hetpass.tools.models.steps import model_step

    for name in SIZES:
        model = model_step(name, 4)
        family, _, size = name.partition("-")
        if size == "tiny":
            continue
        unit = {"M": 1e6, "B": 1e9}[size[-1]]
        assert model.parameter_count == pytest.approx(float(size[:-1]) * unit, rel=0.09), family


@pytest.mark.parametrize("name", ["llama-tiny", "moe-tiny", "wresnet-tiny"])
def test_models_split_exactly(name):
    """A model by name is cut into microbatches without asking for another meaning."""
    import hetpass as hp
    from hetpass.tools.models.steps import model_step

    model = model_step(name, 8, "float32")
    cluster = hp.Cluster.emulated({"a": 2, "b": 1})
    traced = hp.het_parallelize(model.step, cluster=cluster).trace(model.state, model.batch)
    planned = traced.with_plan(_halves(traced), num_microbatches=4)
    assert planned.num_layers >= 3


def _halves(traced):
    count = traced.plan(num_microbatches=4).num_layers
    return f"a: 0-{count // 2 - 1} | b: {count // 2}-{count - 1}"


def test_deciding_commands_import_no_jax(saved, tmp_path):
    code = (
        "import sys; from hetpass.tools.main import main\n"
        f"assert main(['explain', {str(saved)!r}]) == 0\n"
        "assert main(['devices']) == 0\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dryrun_for_what_nothing_compiles_for(hetpass, script, cluster_file):
    said = hetpass("dryrun", f"{script}:train_step", "--cluster", str(cluster_file))
    assert said.code == 1
    assert "HP-TARGET-" in said.err
