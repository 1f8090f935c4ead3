"""Every example runs, and says what it is for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", NAMES)
def test_it_is_listed(name):
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("name", ["mlp", "gpt_linen", "gpt_nnx", "eval_companion"])
def test_losses_fall(example, name):
    losses = example(name).main(3)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["tied_embedding", "masked_loss", "moe", "lora"])
def test_it_equals_jit(example, name):
    report = example(name).main()
    assert report, report
    assert report.plan.num_stages == 2


def test_three_groups(example, tmp_path):
    planned = example("three_groups").main("gpt-tiny", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "plan.json",
        "timeline.png",
        "sharding.png",
    }
    assert planned.num_layers >= 4


def test_own_planner(example):
    step_s, loss = example("own_planner").main(10)
    assert 0 < step_s < 1
    assert loss > 0
