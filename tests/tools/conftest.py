"""A saved plan without JAX, and the command line in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetpass.ir.cluster import Cluster
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.tools.bundle import Bundle, save_bundle
from hetpass.tools.main import main

SCRIPT = """
import jax, jax.numpy as jnp

def example_arguments():
    weights = [jax.random.normal(k, (8, 8)) for k in jax.random.split(jax.random.key(0), 4)]
    return weights, jnp.ones((16, 8))

def train_step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y ** 2)
    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients)], value
"""


@dataclass(frozen=True)
class Said:
    """What a command line answered."""

    code: int
    out: str
    err: str

    @property
    def data(self):
        return json.loads(self.out)


@pytest.fixture
def hetpass(capsys, monkeypatch, tmp_path):
    """Runs `hetpass …` in a folder of its own, with a cache of its own."""
    monkeypatch.setenv("HETPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*line: str) -> Said:
        try:
            code = main(line)
        except SystemExit as misuse:
            code = misuse.code
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


@pytest.fixture
def bundle() -> Bundle:
    layer = {
        "kind": "block",
        "forward_flops": {"float32": 1e10},
        "backward_flops": {"float32": 2e10},
        "parameter_bytes": 1e6,
        "gradient_bytes": 1e6,
        "activation_bytes": 1e6,
        "boundary_bytes": 1e5,
        "gradient_boundary_bytes": 1e5,
    }
    facts = ProgramFacts.synthetic(6 * [layer], 8)
    cluster = Cluster.emulated({"fast": 4, "slow": 2}, speeds={"slow": 0.5})
    plan = Plan.parse("fast[2]: 0-3 | slow: 4-5", cluster=cluster, num_layers=6, num_microbatches=4)
    return Bundle("p", plan, facts, cluster)


@pytest.fixture
def saved(bundle, tmp_path) -> Path:
    """p.json with its companions."""
    path = tmp_path / "p.json"
    save_bundle(path, bundle)
    return path


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "my_step.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def cluster_file(bundle, tmp_path) -> Path:
    path = tmp_path / "c.toml"
    bundle.cluster.to_file(path)
    return path
