"""hp.verify: equal steps are equal, a wrong one is caught, and the table says where."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp
from hetpass.backend import combine
from hetpass.comparison import compare

CLUSTER = {"a": 2, "b": 1}


def _step(params, batch):
    def loss_fn(p):
        return ((jnp.tanh(batch["x"] @ p["w1"]) @ p["w2"] - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return new, {"loss": loss, "grads": grads}


def _arguments():
    draw = np.random.default_rng(0)
    shapes = {"w1": (4, 8), "w2": (8, 3)}
    params = {k: jnp.asarray(draw.normal(size=s), jnp.float32) for k, s in shapes.items()}
    batch = {k: jnp.asarray(draw.normal(size=(8, d)), jnp.float32) for k, d in (("x", 4), ("y", 3))}
    return params, batch


def test_a_function_and_a_decorated_step():
    cluster = hp.Cluster.emulated(CLUSTER)
    report = hp.verify(_step, *_arguments(), cluster=cluster, num_microbatches=4)
    assert report
    assert report.plan.num_microbatches == 4
    assert [leaf.path for leaf in report.leaves][-1] == "result[1]['loss']"
    text = str(report)
    assert text.startswith("_step against jax.jit, M = 4: 5 leaves, all equal")
    assert "float32[8,3]" in text
    assert repr(report) == "<Comparison _step against jax.jit, M = 4: 5 leaves, all equal>"
    assert str(report.leaves[-1]).startswith("result[1]['loss']: float32[], equal, relative ")
    assert repr(report.leaves[-1]) == f"<LeafComparison {report.leaves[-1]}>"
    report.raise_if_different()
    params, batch = _arguments()
    decorated = hp.het_parallelize(_step, cluster=cluster, num_microbatches=2)
    assert hp.verify(decorated, params, batch)
    assert not params["w1"].is_deleted()  # nothing was donated


def test_a_wrong_step_is_caught(monkeypatch):
    right = combine.pairwise
    monkeypatch.setattr(combine, "pairwise", lambda op, a, b: right(op, a, b) * 0.5)
    import hetpass.backend.lower as lower

    if hasattr(lower, "pairwise"):
        monkeypatch.setattr(lower, "pairwise", combine.pairwise)
    cluster = hp.Cluster.emulated(CLUSTER)
    report = hp.verify(_step, *_arguments(), cluster=cluster, num_microbatches=4)
    assert not report
    assert report.worst.relative > 1e-2
    assert "of them different" in str(report)
    with pytest.raises(hp.HetpassError, match="HP-RUN-DIFFERS"):
        report.raise_if_different()


def test_the_meaning_per_microbatch_differs_and_is_shown_to():
    def normalized(params, batch):
        x = batch["x"]
        return _step(params, batch | {"x": (x - x.mean(0)) / x.std(0)})

    report = hp.verify(
        normalized,
        *_arguments(),
        cluster=hp.Cluster.emulated(CLUSTER),
        num_microbatches=2,
        options=hp.Options(batch_statistics="per_microbatch"),
    )
    assert {leaf.verdict for leaf in report.leaves} == {"equal"} or not report


@pytest.mark.parametrize(
    ("actual", "expected", "verdict"),
    [
        (jnp.float32([1, 2]), jnp.float32([1, 2 + 1e-6]), "equal"),
        (jnp.float32([1, 2]), jnp.float32([1, 2.001]), "differs"),
        (jnp.float32([1e-8, 0]), jnp.float32([-1e-8, 0]), "noise"),
        (jnp.float32([jnp.nan, 1]), jnp.float32([jnp.nan, 1]), "equal"),
        (jnp.float32([1, jnp.nan]), jnp.float32([jnp.nan, 1]), "differs"),
        (jnp.float32([jnp.inf, 1]), jnp.float32([-jnp.inf, 1]), "differs"),
        (jnp.int32([1, 2]), jnp.int32([1, 3]), "differs"),
        (jnp.array([True]), jnp.array([False]), "differs"),
        (jnp.float32([1]), jnp.bfloat16([1]), "differs"),
        (jnp.zeros((0, 3)), jnp.zeros((0, 3)), "equal"),
        (jnp.complex64([1j]), jnp.complex64([1.1j]), "differs"),
        (jax.random.key(1), jax.random.key(1), "equal"),
        (jax.random.key(1), jax.random.key(2), "differs"),
    ],
)
def test_verdicts(actual, expected, verdict):
    (leaf,) = compare(actual, expected)
    assert leaf.verdict == verdict


def test_results_of_two_structures():
    with pytest.raises(hp.HetpassError, match="HP-RUN-STRUCTURE"):
        compare({"a": jnp.ones(1)}, {"b": jnp.ones(1)})
