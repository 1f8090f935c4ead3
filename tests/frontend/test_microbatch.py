"""split: every step equals jax.jit after prologue, M times the region, epilogue; or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hetpass.errors import SplitError
from hetpass.frontend.microbatch import split
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.verify import verify
from tests.frontend.evaluate import evaluate

B, D, H, V = 8, 6, 16, 11


def _params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1), 5)
    return {
        "w1": jax.random.normal(keys[0], (D, H)),
        "b": 0.1 * jax.random.normal(keys[1], (H,)),
        "w2": jax.random.normal(keys[2], (H, V)),
        "square": jax.random.normal(keys[3], (3, D, D)),
        "kernel": jax.random.normal(keys[4], (3, 3, 1, 4)),
    }


def _batch() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(2), 2)
    return {
        "x": jax.random.normal(keys[0], (B, D)),
        "y": jax.random.randint(keys[1], (B,), 0, V),
        "m": jnp.array([1.0, 0, 1, 1, 0, 0, 1, 1]),
    }


def _net(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w1"] + p["b"]) @ p["w2"]


def _losses(p: Any, b: Any) -> Any:
    scores = jax.nn.log_softmax(_net(p, b["x"]))
    return -jnp.take_along_axis(scores, b["y"][:, None], 1)[:, 0]


def _training(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(p: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, batch)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value, grads

    return step


def _dropout(p: Any, b: Any) -> Any:
    h = jnp.tanh(b["x"] @ p["w1"])
    h = h * jax.random.bernoulli(jax.random.key(7), 0.5, h.shape)
    h = h + jax.random.normal(jax.random.key(3), (H,))
    return (h @ p["w2"]).mean() + (h**2).sum()


def _dropout_in_scan(p: Any, b: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        h, key = carry
        key, use = jax.random.split(key)
        h = jnp.tanh(h @ w) * jax.random.bernoulli(use, 0.5, h.shape)
        return (h, key), None

    (h, _), _ = lax.scan(layer, (b["x"], jax.random.key(5)), p["square"])
    return (h**2).mean()


def _time_major(p: Any, b: Any) -> Any:
    t = jnp.stack([b["x"]] * 3, 1).transpose(1, 0, 2).reshape(-1, D)
    return (_net(p, t) ** 2).mean()


def _scan_layers(p: Any, b: Any) -> Any:
    h, sums = lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), b["x"], p["square"])
    return (h**2).mean() + sums.sum()


def _scan_tied(p: Any, b: Any) -> Any:
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ p["square"][0]), None), b["x"], None, length=4)
    return (h**2).mean()


def _scan_remat(p: Any, b: Any) -> Any:
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    h, _ = lax.scan(layer, b["x"], p["square"])
    return (h**2).mean()


def _conv(p: Any, b: Any) -> Any:
    images = b["x"].reshape(-1, 2, 3, 1)
    h = lax.conv_general_dilated(
        images, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    return (jax.nn.relu(h) ** 2).mean()


def _class_weights(p: Any, b: Any) -> Any:
    return (_losses(p, b) / jnp.bincount(b["y"], length=V)[b["y"]]).mean()


def _metrics(p: Any, b: Any) -> Any:
    losses = _losses(p, b)
    grads = jax.grad(lambda p: _losses(p, b).mean())(p)
    return jnp.median(losses), losses, losses.max(), jnp.argmax(losses), losses.min() > 0, grads


def _clipped(p: Any, b: Any) -> Any:
    grads = jax.grad(lambda p: _losses(p, b).mean())(p)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda a, g: a - g * jnp.minimum(1.0, 0.1 / norm), p, grads)


def _penalized(p: Any, b: Any) -> Any:
    return _losses(p, b).mean() + 0.1 * sum(jnp.sum(v**2) for v in p.values())


def _per_example_keys(p: Any, b: Any) -> Any:
    keys = jax.random.split(jax.random.key(5), b["x"].shape[0])
    return jax.vmap(lambda k, e: jax.random.normal(k, (D,)) * e)(keys, b["x"])


def _two_losses(p: Any, b: Any) -> Any:
    first = jax.grad(lambda p: _losses(p, b).mean() ** 2)(p)
    second = jax.grad(lambda p: jnp.log((_net(p, b["x"]) ** 2).sum()))(p)
    return jax.tree.map(jnp.add, first, second)


EQUAL: dict[str, Callable[..., Any]] = {
    "mean": _training(lambda p, b: _losses(p, b).mean()),
    "sum": _training(lambda p, b: _losses(p, b).sum()),
    "masked mean": _training(lambda p, b: (_losses(p, b) * b["m"]).sum() / b["m"].sum()),
    "indexed by position": _training(
        lambda p, b: (
            -jax.nn.log_softmax(_net(p, b["x"]))[jnp.arange(b["x"].shape[0]), b["y"]].mean()
        )
    ),
    "mean squared": _training(lambda p, b: _losses(p, b).mean() ** 2),
    "exp of mean, with L2": _training(
        lambda p, b: jnp.exp(_losses(p, b).mean()) + 0.1 * sum(jnp.sum(v**2) for v in p.values())
    ),
    "penalized": _training(_penalized),
    "two nonlinear losses": _two_losses,
    "cumsum of inputs": _training(
        lambda p, b: (jnp.cumsum(b["m"]) * _losses(p, b) * jnp.arange(b["y"].shape[0])).mean()
    ),
    "rolled inputs": _training(
        lambda p, b: _losses(p, dict(b, x=jnp.roll(b["x"], 1, 0), y=b["y"][::-1])).mean()
    ),
    "dropout": _training(_dropout),
    "dropout in a scan": _training(_dropout_in_scan),
    "merged dimensions": _training(lambda p, b: (_net(p, b["x"].reshape(-1, D)) ** 2).mean()),
    "time major": _training(_time_major),
    "scan over layers": _training(_scan_layers),
    "scan with one weight": _training(_scan_tied),
    "scan with checkpoint": _training(_scan_remat),
    "map over examples": _training(
        lambda p, b: lax.map(lambda e: (_net(p, e) ** 2).sum(), b["x"]).mean()
    ),
    "gradient per example": lambda p, b: jax.vmap(
        jax.grad(lambda p, x: (_net(p, x) ** 2).sum()), (None, 0)
    )(p, b["x"]),
    "clipped by global norm": _clipped,
    "cond on a parameter": _training(
        lambda p, b: lax.cond(
            p["b"][0] > 0, lambda x: _net(p, x), lambda x: 2 * _net(p, x), b["x"]
        ).mean()
    ),
    "cond on the batch's inputs": _training(
        lambda p, b: lax.cond(
            b["x"].sum() > 0, lambda x: _net(p, x), lambda x: 2 * _net(p, x), b["x"]
        ).mean()
    ),
    "embedding": _training(lambda p, b: (p["w2"].T[b["y"]] ** 2).mean()),
    "checkpoint": _training(lambda p, b: (jax.checkpoint(_net)(p, b["x"]) ** 2).mean()),
    "convolution": _training(_conv),
    "class weights": _training(_class_weights),
    "metrics of the whole batch": _metrics,
    "per-example keys": _per_example_keys,
    "unchanged and constant": lambda p, b: (p, b, 1.0, None, jnp.zeros(3)),
}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("name", EQUAL)
def test_equals_jit(name: str, count: int) -> None:
    step, args = EQUAL[name], (_params(), _batch())
    program = split(trace(step, args, {}), count)
    verify(program)
    expected = jax.tree.leaves(jax.jit(step)(*args))
    for want, got in zip(expected, evaluate(program, args), strict=True):
        wide = np.asarray(want, np.float64)
        gap = np.linalg.norm(wide - np.asarray(got, np.float64))
        assert gap <= 1e-5 * max(np.linalg.norm(wide), 1e-6)


def _batch_norm(p: Any, b: Any) -> Any:
    h = b["x"] @ p["w1"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return (jnp.tanh(h) @ p["w2"]).mean()


def _contrastive(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    return -jnp.diag(jax.nn.log_softmax(h @ h.T)).mean()


def _pairs(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    half = h.shape[0] // 2
    return ((h[:half] - h[half:]) ** 2).mean()


def _more_at_a_larger_batch(p: Any, b: Any) -> Any:
    losses = _losses(p, b)
    for _ in range(b["x"].shape[0] // B):
        losses = jnp.sin(losses)
    return losses.mean()


def _branches_in_another_order(p: Any, b: Any) -> Any:
    def branch(losses: Any) -> Any:
        pair = jnp.sin(losses), jnp.cos(losses)
        return pair if b["x"].shape[0] == B else pair[::-1]

    one, other = lax.cond(p["b"][0] > 0, branch, branch, _losses(p, b))
    return (one * other * other).mean()


REFUSED = {
    "batch norm": (_training(_batch_norm), "HP-SPLIT-MIXES", "_batch_norm"),
    "contrastive": (_training(_contrastive), "HP-SPLIT-MIXES", "_contrastive"),
    "pairs of examples": (_training(_pairs), "HP-SPLIT-MIXES", "_pairs"),
    "smallest losses": (
        _training(lambda p, b: jnp.sort(_losses(p, b))[:3].mean()),
        "HP-SPLIT-MIXES",
        "test_microbatch.py",
    ),
    "hard-coded batch": (
        _training(lambda p, b: (_net(p, b["x"]).reshape(B, V) ** 2).mean()),
        "HP-SPLIT-PROBE",
        "test_microbatch.py",
    ),
    "more equations at a larger batch": (
        _training(_more_at_a_larger_batch),
        "HP-SPLIT-PROBE",
        "_more_at_a_larger_batch",
    ),
    "branches in another order": (
        _training(_branches_in_another_order),
        "HP-SPLIT-PROBE",
        "_branches_in_another_order",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    step, code, place = REFUSED[name]
    traced = trace(step, (_params(), _batch()), {})
    with pytest.raises(SplitError) as caught:
        split(traced, 2)
    assert caught.value.code == code
    assert place in caught.value.where
    assert ".py:" in caught.value.where
    assert caught.value.ways_out


@pytest.mark.parametrize("name", REFUSED)
def test_refused_steps_run_with_one_microbatch(name: str) -> None:
    step, args = REFUSED[name][0], (_params(), _batch())
    program = split(trace(step, args, {}), 1)
    verify(program)
    for want, got in zip(
        jax.tree.leaves(jax.jit(step)(*args)), evaluate(program, args), strict=True
    ):
        np.testing.assert_allclose(want, got, rtol=2e-5, atol=1e-6)


def test_microbatches_must_divide_the_batch() -> None:
    traced = trace(EQUAL["mean"], (_params(), _batch()), {})
    with pytest.raises(SplitError, match="nearest numbers that do: 1, 2, 4"):
        split(traced, 3)


def test_an_array_of_another_length_is_asked_about() -> None:
    batch = {**_batch(), "weights": jnp.ones(V)}
    step = _training(lambda p, b: (_losses(p, b) * b["weights"][b["y"]]).mean())
    signature = Signature(batch_axes={"b['weights']": None})
    traced = trace(step, (_params(), batch), {}, signature, arg_names=("p", "b"))
    program = split(traced, 4)
    expected = jax.tree.leaves(jax.jit(step)(_params(), batch))
    for want, got in zip(expected, evaluate(program, (_params(), batch)), strict=True):
        np.testing.assert_allclose(want, got, rtol=2e-5, atol=1e-6)


def test_dropout_masks_are_those_of_the_whole_batch() -> None:
    def step(p: Any, b: Any) -> Any:
        keep = jax.random.bernoulli(jax.random.key(7), 0.5, (b["x"].shape[0], H))
        return keep, (jnp.tanh(b["x"] @ p["w1"]) * keep).sum()

    args = (_params(), _batch())
    want = jax.jit(step)(*args)[0]
    for count in (2, 4, 8):
        got = evaluate(split(trace(step, args, {}), count), args)[0]
        assert (np.asarray(want) == np.asarray(got)).all()


def test_sums_are_kept_in_float32_at_least() -> None:
    params = jax.tree.map(lambda v: v.astype(jnp.bfloat16), _params())
    batch = {**_batch(), "x": _batch()["x"].astype(jnp.bfloat16)}
    program = split(trace(EQUAL["mean"], (params, batch), {}), 4)
    kept = [o for o in program.region_outputs if hasattr(o, "dtype")]
    assert kept
    assert all(jnp.dtype(o.dtype).itemsize >= 4 for o in kept)
