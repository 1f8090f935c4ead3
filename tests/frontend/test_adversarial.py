"""split: programs written to be misread. Each equals jax.jit at M = 1 and M = 4, or is refused."""

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
from hetpass.frontend.trace import trace
from hetpass.ir.verify import verify
from tests.equality import assert_equal
from tests.frontend.evaluate import evaluate

B, D, H = 8, 6, 16

Loss = Callable[[Any, Any], tuple[Any, Any]]
EQUAL: dict[str, Loss] = {}


def equal(loss: Loss) -> Loss:
    EQUAL[loss.__name__] = loss
    return loss


def _params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1), 4)
    return {
        "w1": jax.random.normal(keys[0], (D, H)) / 2,
        "w2": jax.random.normal(keys[1], (H, D)) / 3,
        "square": jax.random.normal(keys[2], (3, D, D)) / 2,
        "table": jax.random.normal(keys[3], (B, D)),
    }


def _batch() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(2), 3)
    return {
        "x": jax.random.normal(keys[0], (B, D)),
        "wide": jax.random.normal(keys[1], (B, 40)),
        "y": jax.random.randint(keys[2], (B,), 0, D),
        "m": jnp.array([1.0, 0, 1, 1, 0, 0, 1, 1]),
    }


def _net(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w1"]) @ p["w2"]


def _mse(p: Any, b: Any) -> Any:
    return (_net(p, b["x"]) ** 2).mean()


def _step(loss: Loss) -> Callable[..., Any]:
    def step(p: Any, batch: Any) -> Any:
        (value, aux), grads = jax.value_and_grad(lambda q: loss(q, batch), has_aux=True)(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value, grads, aux

    return step


# Scales that wait for the whole loss go through loops over examples.


@equal
def map_under_a_square(p: Any, b: Any) -> Any:
    return lax.map(lambda x: (_net(p, x) ** 2).sum(), b["x"]).mean() ** 2, ()


@equal
def map_under_an_exponential(p: Any, b: Any) -> Any:
    return jnp.exp(lax.map(lambda x: jnp.sin(_net(p, x)).sum(), b["x"]).mean()), ()


@equal
def loop_over_examples_that_resets_its_carry(p: Any, b: Any) -> Any:
    last, losses = lax.scan(lambda c, x: (jnp.float32(0), (_net(p, x) ** 2).sum()), 3.0, b["x"])
    return losses.mean(), (last,)


@equal
def loop_over_examples_that_adds_up(p: Any, b: Any) -> Any:
    def body(total: Any, x: Any) -> Any:
        loss = (_net(p, x) ** 2).sum()
        return total + loss, loss

    total, losses = lax.scan(body, jnp.float32(0), b["x"])
    return jnp.sqrt(total / b["x"].shape[0]), (total, losses.sum())


# Numbers that follow the batch and are no sizes of it: those of the full batch.


@equal
def column_numbered_by_the_batch(p: Any, b: Any) -> Any:
    n = b["x"].shape[0]
    return _mse(p, b) + (b["wide"][:, n : n + 3] @ p["w1"][:3]).sum() + b["wide"][:, n].mean(), ()


@equal
def column_at_half_the_batch(p: Any, b: Any) -> Any:
    n = b["x"].shape[0]
    return _mse(p, b) + (b["wide"][:, n // 2 : n // 2 + 3] @ p["w1"][:3]).sum(), ()


@equal
def window_as_wide_as_the_batch(p: Any, b: Any) -> Any:
    n = b["x"].shape[0]
    sums = lax.reduce_window(b["wide"], 0.0, lax.add, (1, n), (1, 1), "SAME")
    return _mse(p, b) + (sums[:, :3] @ p["w1"][:3]).sum(), ()


@equal
def as_many_iterations_as_examples(p: Any, b: Any) -> Any:
    start = lax.stop_gradient(b["x"])
    h = lax.fori_loop(0, start.shape[0], lambda i, h: jnp.sin(h) + i, start)
    return (_net(p, h) ** 2).mean(), ()


@equal
def arithmetic_with_the_batch_size(p: Any, b: Any) -> Any:
    n, out = b["x"].shape[0], _net(p, b["x"])
    ramp = out * jnp.arange(n)[:, None]
    clipped = jnp.clip(out, -1 / n, 1 / n).sum()
    return (out**2).sum() / n + clipped + ((jnp.tanh(out) / 2) ** n).sum() + ramp.mean(), ()


@equal
def captured_array_of_the_batch_size(p: Any, b: Any) -> Any:
    weights = np.linspace(0, 1, b["x"].shape[0], dtype=np.float32)
    return ((_net(p, b["x"]) ** 2).sum(1) * weights).mean(), (weights * 2,)


# Reductions that are not sums.


@equal
def any_and_all_as_numbers(p: Any, b: Any) -> Any:
    out = _net(p, b["x"])
    any_, all_, none = jnp.any(out > 0.5), jnp.all(out > -5), jnp.any(out > 100)
    return (out**2).mean(), (any_.astype(jnp.float32), all_.astype(jnp.int32), none * 1.0)


@equal
def product_cut_to_an_integer(p: Any, b: Any) -> Any:
    return _mse(p, b), (jnp.prod(lax.stop_gradient(1.5 + 0 * b["m"])).astype(jnp.int32),)


@equal
def bytes_that_wrap_around(p: Any, b: Any) -> Any:
    count = lax.reduce(jnp.full(b["m"].shape, 40, jnp.int8), np.int8(0), lax.add, (0,))
    return _mse(p, b), (count, count.astype(jnp.int32))


@equal
def filled_lookup_in_a_sum(p: Any, b: Any) -> Any:
    sums = _net(p, b["x"]).sum(0)
    return _mse(p, b), (sums.at[jnp.array([0, 77])].get(mode="fill", fill_value=1.0),)


@equal
def order_statistics(p: Any, b: Any) -> Any:
    sizes = (b["x"] ** 2).sum(1)
    losses = (_net(p, b["x"]) ** 2).sum(1)
    loss = (losses * (sizes / sizes.sum())).sum() + jnp.std(sizes) * losses.mean()
    return loss, (losses.max(), losses.argmax(), jnp.median(losses), jnp.var(losses))


@equal
def segments(p: Any, b: Any) -> Any:
    out = _net(p, b["x"])
    largest = jax.ops.segment_max(lax.stop_gradient(out), b["y"], D)
    return (out**2).mean(), (jax.ops.segment_sum(out, b["y"], D), largest)


# One value in two roles.


@equal
def sum_read_inside_and_outside(p: Any, b: Any) -> Any:
    count, losses = b["m"].sum(), (_net(p, b["x"]) ** 2).sum(1)
    loss = (losses * b["m"]).sum() / count + (losses * count).mean() + count * p["w1"].sum()
    return loss, (count, count * losses, b["m"] * count)


@equal
def one_body_for_the_batch_and_a_table_of_its_size(p: Any, b: Any) -> Any:
    def body(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    x, _ = lax.scan(body, b["x"], p["square"])
    table, _ = lax.scan(body, p["table"], p["square"])
    return (x**2).mean() + (table**2).mean() + (x.sum(0) * table.sum(0)).sum(), ()


@equal
def products_and_powers_of_losses(p: Any, b: Any) -> Any:
    first, second = _mse(p, b), jnp.abs(_net(p, b["x"]) - 1).mean()
    chosen = jnp.where(first > 0.1, first * 2, first * 3) + jnp.maximum(first, 0.3)
    return first * second + jnp.log(first) + jnp.sqrt(first) ** 3 + chosen, (first / second,)


@equal
def key_that_leaves_a_scan(p: Any, b: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        h, key = carry
        key, use = jax.random.split(key)
        return (jnp.tanh(h @ w) * jax.random.bernoulli(use, 0.5, h.shape), key), None

    (h, key), _ = lax.scan(layer, (b["x"], jax.random.key(3)), p["square"])
    later = jax.random.uniform(jax.random.fold_in(key, 3), (4,))
    return (h**2).mean(), (later, jax.random.key_data(key))


@equal
def positions_and_counts(p: Any, b: Any) -> Any:
    n = b["x"].shape[0]
    scores = jax.nn.log_softmax(_net(p, b["x"]))
    counts = jnp.zeros(D).at[b["y"]].add(1.0)
    picked = scores[jnp.arange(n), b["y"]]
    marked = scores.at[jnp.arange(n), b["y"]].set(0.0)
    return -(picked / (1 + counts)[b["y"]]).mean(), (counts, marked)


@equal
def branch_without_a_gradient_under_a_square(p: Any, b: Any) -> Any:
    branches = [lambda h: h + 1, lambda h: jnp.zeros_like(h) + 0.5, lambda h: jnp.sin(h)]
    h = _net(p, lax.switch((b["x"].ndim + p["w1"].size) % 3, branches, _net(p, b["x"])))
    gate = (p["w1"][0, 0] > -100).astype(jnp.int32)
    h = lax.switch(gate * 2, [branches[2], branches[1], branches[0]], h)
    return (h**2).mean() ** 2, ()


# Linear algebra, copies, draws and gradients per example.


@equal
def matrices_per_example_and_one_for_all(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    each = h[:, :, None] * h[:, None, :] + 3 * jnp.eye(D)
    one = p["square"][0] @ p["square"][0].T + 3 * jnp.eye(D)
    solved = jnp.linalg.solve(each, h[..., None]).mean() + (jnp.linalg.solve(one, h.T) ** 2).mean()
    lower = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(one), h.T, lower=True)
    return solved + jnp.linalg.slogdet(each)[1].mean() + lower.mean(), jnp.linalg.eigvalsh(each)


@equal
def copies_along_the_batch(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    twice, again = jnp.repeat(h, 2, axis=0), jnp.tile(h, (2, 1))
    return (jnp.sin(twice) ** 2).mean() + jnp.cos(again).mean(), (twice, again)


@equal
def draws_of_every_sort(p: Any, b: Any) -> Any:
    key, h = jax.random.key(4), _net(p, b["x"])
    gammas = jax.random.gamma(key, jnp.abs(b["x"][:, 0]) + 0.5)
    classes = jax.random.categorical(key, lax.stop_gradient(h))
    numbers = jax.random.randint(key, classes.shape, 0, 5)
    steps = jax.random.normal(key, (3, *classes.shape))
    return (h**2 * numbers[:, None]).mean() + (steps.T[:, :1] * h).mean(), (classes, gammas)


@equal
def gradients_clipped_per_example(p: Any, b: Any) -> Any:
    grads = jax.vmap(jax.grad(lambda q, x: (_net(q, x) ** 2).sum()), in_axes=(None, 0))(p, b["x"])
    norms = jax.vmap(lambda t: jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(t))))(grads)
    small = 1 / jnp.maximum(1, norms)
    clipped = jax.tree.map(lambda g: jnp.einsum("b...,b->...", g, small), grads)
    inputs = jax.grad(lambda x: _net(p, x).sum())(b["x"])
    return ((jnp.linalg.norm(inputs, axis=1) - 1) ** 2).mean(), (clipped, norms)


@equal
def a_sum_carried_by_a_scan(p: Any, b: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        h, total, count, best = carry
        h = jnp.tanh(h @ w)
        return (h, total + h.sum(), count + 1, jnp.maximum(best, h.max(1))), (h.sum(0), h[:, 0])

    start = (b["x"], 0.0, 0, jnp.full(b["x"].shape[0], -9.0))
    (h, total, count, best), seen = lax.scan(layer, start, p["square"])
    return (h**2).mean() + total * 0.01 + best.mean(), (total, count, seen)


_ZEROS = np.zeros((D, D), np.float32)
_ZERO = jnp.array(0.0)


@equal
def sums_that_start_at_captured_zeros(p: Any, b: Any) -> Any:
    def layer(carry: Any, w: Any) -> Any:
        h, total, table = carry
        h = jnp.tanh(h @ w)
        return (h, total + h.sum(), table + h.T @ h), None

    (h, total, table), _ = lax.scan(layer, (b["x"], _ZERO, _ZEROS), p["square"])
    counts = jnp.asarray(_ZEROS[0]).at[b["y"]].add((h**2).mean(1))
    value = (h**2).mean() + total * 0.01 + (table * 0.1).mean() + (counts * 0.1).sum()
    return value, (table, counts)


@equal
def rows_by_index_in_every_way(p: Any, b: Any) -> Any:
    h = _net(p, b["x"])
    cut = jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (3,)))(h, b["y"])
    put = jax.vmap(lambda x, i, v: lax.dynamic_update_slice(x, v[None], (i,)))(h, b["y"], b["m"])
    rows = jnp.arange(h.shape[0])[:, None]
    picked = h[rows, jnp.array([[0, 2]])].mean() + (h[rows, b["y"][:, None]] ** 2).mean()
    table = jnp.full(D, -9.0).at[b["y"]].max(lax.stop_gradient(h[:, 0]))
    return (cut**2).mean() + (put**2).mean() + picked, table


@equal
def tables_shuffled_before_the_model(p: Any, b: Any) -> Any:
    order = jax.random.permutation(jax.random.key(3), b["x"].shape[0])
    return (_net(p, 0.7 * b["x"] + 0.3 * b["x"][order]) ** 2).mean(), order


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("name", EQUAL)
def test_equals_jit(name: str, num_microbatches: int) -> None:
    step, args = _step(EQUAL[name]), (_params(), _batch())
    program = split(trace(step, args, {}), num_microbatches)
    verify(program)
    actual = jax.tree.unflatten(program.traced.out_tree, evaluate(program, args, compiled=True))
    strong = [
        jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype), tree)
        for tree in (actual, jax.jit(step)(*args))
    ]
    assert_equal(*strong)


# ---------------------------------------------------------------------------------------------
# Refused


def _identity_matrix(p: Any, b: Any) -> Any:
    return ((jnp.eye(b["x"].shape[0]) @ _net(p, b["x"])) ** 2).mean(), ()


def _gradient_penalty(p: Any, b: Any) -> Any:
    grads = jax.grad(_mse)(p, b)
    return _mse(p, b) + sum((g**2).sum() for g in jax.tree.leaves(grads)), ()


def _choice_by_a_sum(p: Any, b: Any) -> Any:
    out = _net(p, b["x"])
    return jnp.where(out.sum() > 0, out, 2 * out).mean(), ()


def _residuals_per_iteration_of_the_batch_size(p: Any, b: Any) -> Any:
    n = b["x"].shape[0]
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ p["square"][0]), None), b["x"], None, length=n)
    return (h**2).mean(), ()


@pytest.mark.parametrize(
    "loss",
    [
        _identity_matrix,
        _gradient_penalty,
        _choice_by_a_sum,
        _residuals_per_iteration_of_the_batch_size,
    ],
)
def test_refused_by_name(loss: Loss) -> None:
    traced = trace(_step(loss), (_params(), _batch()), {})
    with pytest.raises(SplitError, match="HP-SPLIT") as refusal:
        split(traced, 4)
    assert "test_adversarial.py:" in refusal.value.where
    assert refusal.value.ways_out
    args = (_params(), _batch())
    assert_equal(
        jax.tree.unflatten(traced.out_tree, evaluate(split(traced, 1), args)),
        jax.jit(_step(loss))(*args),
    )
