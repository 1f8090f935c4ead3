"""What a refused step is told: the cause, the user's line, and ways out, each of which is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import hetpass as hp
from hetpass.errors import SplitError
from hetpass.frontend.microbatch import SplitOptions, split
from hetpass.frontend.trace import trace
from hetpass.ir.verify import verify
from tests.equality import assert_equal, differences
from tests.frontend.evaluate import evaluate

B, D, M = 8, 8, 4

Step = Callable[[Any, Any], Any]


def _state() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    state = {n: jax.random.normal(k, (D, D)) / 2 for n, k in zip("abc", keys[:3], strict=True)}
    return state | {"queue": jax.random.normal(keys[3], (2 * B, D)), "last": jnp.full((D,), 0.3)}


def _batch() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "x": jax.random.normal(keys[0], (B, D)),
        "y": jax.random.normal(keys[1], (B, D)),
        "rounds": jnp.array([1, 3, 0, 2, 4, 1, 2, 3]),
    }


def _net(p: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]


def _losses(p: Any, b: Any) -> Any:
    return ((_net(p, b["x"]) - b["y"]) ** 2).mean(1)


def _gradient(loss: Callable[[Any, Any], Any]) -> Step:
    return lambda p, b: jax.value_and_grad(loss)(p, b)


# ---------------------------------------------------------------------------------------------
# Refused: the loss, what is said of it, and of the way out


def _product(p: Any, b: Any) -> Any:
    return jnp.prod(jax.nn.sigmoid(_losses(p, b)) * 2)


def _views_joined(p: Any, b: Any) -> Any:
    one, other = jnp.split(_net(p, jnp.concatenate([b["x"], b["x"] + 0.1])), 2)
    return ((one - other) ** 2).mean()


def _contrastive(p: Any, b: Any) -> Any:
    h = _net(p, jnp.concatenate([b["x"], b["x"] + 0.1]))
    return jax.nn.logsumexp(h @ h.T, axis=1).mean()


def _while_under_vmap(p: Any, b: Any) -> Any:
    def one(x: Any, rounds: Any) -> Any:
        start = (jnp.zeros_like(rounds), x)
        return lax.while_loop(
            lambda s: s[0] < rounds,
            lambda s: (s[0] + 1, jnp.tanh(s[1] @ lax.stop_gradient(p["a"]))),
            start,
        )[1]

    return ((jax.vmap(one)(b["x"], b["rounds"]) @ p["b"] - b["y"]) ** 2).mean()


def _two_scales(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    weights = jax.nn.sigmoid(h[:, 0])
    return (weights * _losses(p, b)).sum() / weights.sum() + (h**2).mean()


def _product_of_means(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    return ((h - b["y"]) ** 2).mean() * jnp.abs(h).mean()


def _logsumexp(p: Any, b: Any) -> Any:
    return jax.nn.logsumexp(_losses(p, b))


def _noisy(name: str) -> Callable[[Any, Any], Any]:
    def loss(p: Any, b: Any) -> Any:
        key = jax.random.key(3)
        if name == "poisson":
            noise = jax.random.poisson(key, jnp.abs(b["y"]))
        else:
            noise = jax.random.binomial(key, 9.0, jax.nn.sigmoid(b["y"]))
        return ((_net(p, b["x"]) - noise) ** 2).mean()

    return loss


def _hardest(p: Any, b: Any) -> Any:
    return lax.top_k(_losses(p, b), 3)[0].mean()


def _median(p: Any, b: Any) -> Any:
    return jnp.median(_losses(p, b))


def _batch_norm(p: Any, b: Any) -> Any:
    h = b["x"] @ p["a"]
    return (((h - h.mean(0)) @ p["b"] - b["y"]) ** 2).mean()


def _by_the_largest(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    return ((h / jnp.max(jnp.abs(h)) @ p["a"]) ** 2).mean()


def _by_the_smallest(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    return (((h - jnp.min(h, axis=0)) @ p["a"]) ** 2).mean()


def _if_any(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    return ((jnp.where(jnp.any(h > 1, axis=0), h, 0.0) @ p["a"]) ** 2).mean()


def _if_all(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    return ((jnp.where(jnp.all(h > -9), h, 0.0) @ p["a"]) ** 2).mean()


def _started_elsewhere(p: Any, b: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        h, total = carry
        h = jnp.tanh(h @ w)
        return (h, total + h.T @ h), None

    (h, total), _ = lax.scan(layer, (b["x"], p["a"]), jnp.stack([p["b"], p["c"]]))
    return (h**2).mean() + total.mean()


def _own_accumulation(p: Any, b: Any) -> Any:
    def add(total: Any, part: Any) -> Any:
        grads = jax.grad(lambda q: ((_net(q, part[0]) - part[1]) ** 2).mean())(p)
        return jax.tree.map(jnp.add, total, grads), None

    cut = [v.reshape(4, v.shape[0] // 4, D) for v in (b["x"], b["y"])]
    return lax.scan(add, jax.tree.map(jnp.zeros_like, p), tuple(cut))[0]


def _own_accumulation_by_slices(p: Any, b: Any) -> Any:
    n = b["x"].shape[0] // 4
    parts = [slice(i * n, (i + 1) * n) for i in range(4)]
    grads = [
        jax.grad(lambda q, part=part: ((_net(q, b["x"][part]) - b["y"][part]) ** 2).mean())(p)
        for part in parts
    ]
    return jax.tree.map(lambda *g: sum(g), *grads)


def _rolled(p: Any, b: Any) -> Any:
    return ((jnp.roll(jnp.tanh(b["x"] @ p["a"]), 1, 0) @ p["b"] - b["y"]) ** 2).mean()


REFUSED: dict[str, tuple[Step, str, str]] = {
    "product": (_gradient(_product), "becomes", "jnp.exp(jnp.log(x).sum())"),
    "views joined": (_gradient(_views_joined), "`split` splits the batch", "f(p, a) and f(p, b)"),
    "contrastive": (_gradient(_contrastive), "pairs every example", "a queue of earlier results"),
    "while under vmap": (_gradient(_while_under_vmap), "`while` loops until", "jax.lax.map"),
    "two scales": (_gradient(_two_scales), "wait for different sums", "jax.jacrev(sums)(p)"),
    "product of means": (_gradient(_product_of_means), "different sums", "jax.jacrev(sums)(p)"),
    "logsumexp": (
        _gradient(_logsumexp),
        "`is_finite` of `logsumexp` needs the full maximum over the batch",
        "jnp.log(jnp.exp(x - c).sum()) + c",
    ),
    "poisson": (_gradient(_noisy("poisson")), "of `poisson` needs", "jax.random.poisson(*a)"),
    "binomial": (_gradient(_noisy("binomial")), "of `binomial` needs", "draw before the step"),
    "hard mining": (_gradient(_hardest), "`top_k` works along the batch", "loss > threshold"),
    "median": (_gradient(_median), "`sort` works along the batch", "keep it as a metric"),
    "batch norm": (_gradient(_batch_norm), "needs the full sum over the batch", "layer norm"),
    "maximum": (_gradient(_by_the_largest), "`div` needs the full maximum", "of each example"),
    "minimum": (_gradient(_by_the_smallest), "`sub` needs the full minimum", "last step's value"),
    "any": (_gradient(_if_any), "needs the full logical or over", "each example by itself"),
    "all": (_gradient(_if_all), "needs the full logical and over", "each example by itself"),
    "start": (_gradient(_started_elsewhere), "a value that is free of it", "start it at zeros"),
    "own loop": (_own_accumulation, "`reshape` tears the batch apart", "num_microbatches cuts"),
    "own slices": (_own_accumulation_by_slices, "takes some of the", "num_microbatches cuts"),
    "rolled": (_gradient(_rolled), "`slice` of `roll` takes some", "before the model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cause_line_and_way_out(name: str) -> None:
    step, cause, way = REFUSED[name]
    with pytest.raises(SplitError) as caught:
        split(trace(step, (_state(), _batch()), {}), M)
    refusal = caught.value
    assert cause in refusal.what
    assert "test_refusal.py:" in refusal.where
    assert any(way in text for text in refusal.ways_out)
    assert any(text.startswith("num_microbatches=1") for text in refusal.ways_out)
    assert all(len(text) < 230 for text in refusal.ways_out)


@pytest.mark.parametrize("name", ["views joined", "while under vmap", "two scales", "poisson"])
def test_the_ways_out_that_fit_all(name: str) -> None:
    """One microbatch, and every microbatch for itself."""
    step, _, _ = REFUSED[name]
    traced, args = trace(step, (_state(), _batch()), {}), (_state(), _batch())
    one = jax.tree.unflatten(traced.out_tree, evaluate(split(traced, 1), args, compiled=True))
    assert_equal(one, jax.jit(step)(*args))
    program = split(traced, M, SplitOptions(per_microbatch=True))
    means = jax.tree.unflatten(traced.out_tree, evaluate(program, args, compiled=True))
    parts = [
        jax.jit(step)(
            args[0], jax.tree.map(lambda v, i=i: v[i * B // M : (i + 1) * B // M], args[1])
        )
        for i in range(M)
    ]
    assert_equal(means, jax.tree.map(lambda *p: sum(p) / M, *parts))


def test_sizes_below_zero_have_no_slice() -> None:
    step = _gradient(lambda p, b: jnp.sort(_losses(p, b))[-4:].mean())
    traced = trace(step, (_state(), _batch()), {})
    with pytest.raises(SplitError, match="4 at B would be -2 at B / M") as caught:
        split(traced, M, SplitOptions(per_microbatch=True))
    assert caught.value.code == "HP-SPLIT-SLICE"


# ---------------------------------------------------------------------------------------------
# The ways out


WAYS: dict[str, Step] = {}


def way(step: Step) -> Step:
    WAYS[step.__name__] = step
    return step


@way
def product_by_logarithms(p: Any, b: Any) -> Any:
    return _gradient(lambda p, b: jnp.exp(jnp.log(jax.nn.sigmoid(_losses(p, b)) * 2).sum()))(p, b)


@way
def views_one_by_one(p: Any, b: Any) -> Any:
    return _gradient(lambda p, b: ((_net(p, b["x"]) - _net(p, b["x"] + 0.1)) ** 2).mean())(p, b)


@way
def views_beside_each_other(p: Any, b: Any) -> Any:
    def loss(p: Any, b: Any) -> Any:
        h = _net(p, jnp.stack([b["x"], b["x"] + 0.1], axis=1))
        return ((h[:, 0] - h[:, 1]) ** 2).mean()

    return _gradient(loss)(p, b)


@way
def a_queue_of_earlier_results(p: Any, b: Any) -> Any:
    def loss(p: Any, b: Any) -> Any:
        h = _net(p, b["x"])
        other = h @ lax.stop_gradient(p["queue"]).T
        own = (h * _net(p, b["x"] + 0.1)).sum(1, keepdims=True)
        return -jax.nn.log_softmax(jnp.concatenate([own, other], 1))[:, 0].mean(), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(p, b)
    return value, grads, jnp.concatenate([p["queue"][h.shape[0] :], h])


@way
def while_over_examples(p: Any, b: Any) -> Any:
    def one(pair: Any) -> Any:
        x, rounds = pair
        return lax.while_loop(
            lambda s: s[0] < rounds,
            lambda s: (s[0] + 1, jnp.tanh(s[1] @ lax.stop_gradient(p["a"]))),
            (jnp.zeros_like(rounds), x),
        )[1]

    def loss(p: Any, b: Any) -> Any:
        return ((lax.map(one, (b["x"], b["rounds"])) @ p["b"] - b["y"]) ** 2).mean()

    return _gradient(loss)(p, b)


@way
def rounds_with_a_mask(p: Any, b: Any) -> Any:
    def loss(p: Any, b: Any) -> Any:
        def one(x: Any, rounds: Any) -> Any:
            return lax.fori_loop(
                0, 5, lambda i, h: jnp.where(i < rounds, jnp.tanh(h @ p["a"]), h), x
            )

        return ((jax.vmap(one)(b["x"], b["rounds"]) @ p["b"] - b["y"]) ** 2).mean()

    return _gradient(loss)(p, b)


@way
def several_sums(p: Any, b: Any) -> Any:
    def sums(p: Any) -> Any:
        h = _net(p, b["x"])
        weights = jax.nn.sigmoid(h[:, 0])
        return jnp.stack([(weights * _losses(p, b)).sum(), weights.sum(), (h**2).mean()])

    def combine(s: Any) -> Any:
        return s[0] / s[1] + s[2]

    s, jacobian = sums(p), jax.jacrev(sums)(p)
    weights = jax.grad(combine)(s)
    return combine(s), jax.tree.map(lambda j: jnp.tensordot(weights, j, 1), jacobian)


def test_several_sums_are_the_gradient_of_the_loss() -> None:
    args = _state(), _batch()
    results = several_sums(*args), _gradient(_two_scales)(*args)
    assert_equal(
        *(jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype), tree) for tree in results)
    )


@way
def logsumexp_from_a_number(p: Any, b: Any) -> Any:
    return _gradient(lambda p, b: jnp.log(jnp.exp(_losses(p, b) - 3.0).sum()) + 3.0)(p, b)


@way
def draws_with_a_key_per_example(p: Any, b: Any) -> Any:
    def loss(p: Any, b: Any) -> Any:
        keys = jax.random.split(jax.random.key(3), b["x"].shape[0])
        counts = lax.map(lambda a: jax.random.poisson(*a), (keys, jnp.abs(b["y"])))
        more = lax.map(
            lambda a: jax.random.binomial(a[0], 9.0, a[1]), (keys, jax.nn.sigmoid(b["y"]))
        )
        return ((_net(p, b["x"]) - counts - more) ** 2).mean()

    return _gradient(loss)(p, b)


@way
def losses_above_a_threshold(p: Any, b: Any) -> Any:
    def loss(p: Any, b: Any) -> Any:
        losses = _losses(p, b)
        return jnp.where(losses > p["last"][0], losses, 0.0).mean(), lax.top_k(losses, 3)[0].mean()

    return jax.value_and_grad(loss, has_aux=True)(p, b)


@way
def the_last_steps_value(p: Any, b: Any) -> Any:
    def loss(p: Any, b: Any) -> Any:
        h = _net(p, b["x"])
        scaled = (h - lax.stop_gradient(p["last"])) / lax.stop_gradient(p["last"].max() + 1)
        return ((scaled @ p["a"]) ** 2).mean(), (h.mean(0), jnp.abs(h).max(), jnp.any(h > 1))

    return jax.value_and_grad(loss, has_aux=True)(p, b)


@way
def a_branch_by_the_last_steps_value(p: Any, b: Any) -> Any:
    def loss(p: Any, b: Any) -> Any:
        h = lax.cond(p["last"][0] > 0, lambda x: _net(p, x), lambda x: 2 * x, b["x"])
        return (h**2).mean(), (h**2).sum()

    return jax.value_and_grad(loss, has_aux=True)(p, b)


@way
def a_value_added_behind_the_sum(p: Any, b: Any) -> Any:
    def loss(p: Any, b: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            h, total = carry
            h = jnp.tanh(h @ w)
            return (h, total + h.T @ h), None

        start = (b["x"], jnp.zeros((D, D)))
        (h, total), _ = lax.scan(layer, start, jnp.stack([p["b"], p["c"]]))
        return (h**2).mean() + (p["a"] + total).mean()

    return _gradient(loss)(p, b)


@way
def examples_mixed_in_the_inputs(p: Any, b: Any) -> Any:
    x = 0.7 * b["x"] + 0.3 * jnp.roll(b["x"], 1, 0)
    return _gradient(lambda p, b: ((_net(p, x) - b["y"]) ** 2).mean())(p, b)


@pytest.mark.parametrize("name", WAYS)
def test_ways_out_work(name: str) -> None:
    step, args = WAYS[name], (_state(), _batch())
    program = split(trace(step, args, {}), M)
    verify(program)
    actual = jax.tree.unflatten(program.traced.out_tree, evaluate(program, args, compiled=True))
    assert_equal(actual, jax.jit(step)(*args))


def test_the_place_is_the_users_line_not_one_of_an_installed_library() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return (jnp.tanh(batch @ params) ** 2).mean()

        grads = jax.grad(loss)(params)
        norm = optax.global_norm(grads)
        return params - jax.grad(loss)(params + grads / norm)

    with pytest.raises(hp.HetpassError) as caught:
        hp.het_parallelize(step, cluster=hp.Cluster.emulated({"a": 2}), num_microbatches=2).trace(
            jnp.ones((6, 6)), jnp.ones((4, 6))
        ).plan()
    assert __file__ in caught.value.where


def test_state_with_a_row_per_example_is_named_with_its_way_out() -> None:
    def step(state: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch @ state["w"] + state["h"])
        return {"w": state["w"], "h": hidden}, hidden.mean()

    state, batch = {"w": jnp.ones((6, 6)), "h": jnp.ones((4, 6))}, jnp.ones((4, 6))
    cluster = hp.Cluster.emulated({"a": 2})
    with pytest.raises(hp.HetpassError) as caught:
        hp.het_parallelize(step, cluster=cluster, num_microbatches=2).trace(state, batch).plan()
    (way,) = [w for w in caught.value.ways_out if "batch_axes" in w]
    options = eval(way[way.index("hp.Options(") :])
    parallel = hp.het_parallelize(
        step, cluster=cluster, num_microbatches=2, options=options, donate_argnums=()
    )
    assert differences(parallel(state, batch), jax.jit(step)(state, batch)) == []


@pytest.mark.parametrize("stopped", [True, False])
def test_a_product_as_a_metric_wants_its_gradient_stopped(stopped: bool) -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            each = jax.nn.sigmoid(batch @ params).mean(axis=1)
            return each.mean(), jnp.prod(jax.lax.stop_gradient(each) if stopped else each)

        (value, product), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return params - grads, value, product

    params, batch = jnp.eye(6), jnp.linspace(-1, 1, 24).reshape(4, 6)
    parallel = hp.het_parallelize(
        step, cluster=hp.Cluster.emulated({"a": 2}), num_microbatches=2, donate_argnums=()
    )
    if stopped:
        assert differences(parallel(params, batch), jax.jit(step)(params, batch)) == []
    else:
        with pytest.raises(SplitError, match="stop_gradient"):
            parallel(params, batch)
