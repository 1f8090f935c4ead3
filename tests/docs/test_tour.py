"""The tour runs, equals `jax.jit`, and refuses what its rules do not cover."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[2] / "docs" / "tour.py"


@pytest.fixture(scope="module")
def tour():
    spec = importlib.util.spec_from_file_location("tour", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tour"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tour"]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_it_equals_jit(tour, num_microbatches):
    params, batch = tour.example()
    (new, loss), cuts, order = tour.parallel_step(params, batch, num_microbatches=num_microbatches)
    expected, expected_loss = jax.jit(tour.train_step)(params, batch)
    assert cuts == (0, 4)
    assert len(order) == len(set(order)) == 2 * 2 * num_microbatches
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for a, e, old in zip(new, expected, params, strict=True):
        gradient = np.linalg.norm(np.asarray(e - old))
        assert np.linalg.norm(np.asarray(a - e)) <= 1e-5 * gradient


def test_it_refuses_what_mixes_examples(tour):
    program = tour.trace(lambda x: jnp.cumsum(x, axis=0), jnp.ones((tour.B, 3)))
    with pytest.raises(tour.Refused, match="cumsum"):
        tour.split(program, set(program.inputs))


def test_the_plan_is_the_best_of_all(tour):
    for speeds in ((2.0, 1.0), (1.0, 1.0, 3.0), (1.0, 20.0)):
        cuts = (*tour.plan(6, speeds), 6)
        slowest = max((b - a) / s for a, b, s in zip(cuts, cuts[1:], speeds, strict=False))
        shares = [(i, j) for i in range(7) for j in range(i, 7)]
        ways = (
            [max(i / speeds[0], (6 - i) / speeds[1]) for i in range(7)]
            if len(speeds) == 2
            else [max(i / speeds[0], (j - i) / speeds[1], (6 - j) / speeds[2]) for i, j in shares]
        )
        assert slowest == pytest.approx(min(ways))
