"""Training as a whole: many steps equal `jax.jit`, and nothing grows or compiles on the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetpass as hp
from tests.equality import ALL_LAYOUTS, assert_equal, relative_error
from tests.programs import dropout
from tests.programs.check import check
from tests.programs.models import DIM, mlp, mlp_params, regression, sgd
from tests.small_gpt import training


def _losses(step, state, batches, count, put=lambda b: b):
    losses = []
    for _, batch in zip(range(count), batches, strict=False):
        state, metrics = step(state, put(batch))
        losses.append(metrics["loss"])
    return np.asarray(jnp.stack([jnp.asarray(np.asarray(x)) for x in losses])), state


@contextmanager
def _compiles() -> Iterator[list[str]]:
    """The events of XLA compilations inside the context."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# ---------------------------------------------------------------------------------------------
# Fifty steps


@pytest.mark.parametrize(
    ("library", "shape"),
    [
        ("linen", {}),
        ("linen", {"dropout": 0.1, "remat": True}),
        ("linen", {"scan": True}),
        ("nnx", {"dropout": 0.1}),
    ],
    ids=str,
)
def test_fifty_steps_of_a_gpt_equal_jit_in_float32(library, shape):
    work = training(library, **shape)
    parallel = work.parallel({"fast": 2, "slow": 1}, 4)
    expected, _ = _losses(jax.jit(work.step), work.state(), work.batches(), 50)
    actual, _ = _losses(parallel, work.state(), work.batches(), 50)
    assert expected[-1] < 0.8 * expected[0]
    assert np.abs(actual / expected - 1).max() <= 1e-5


@pytest.mark.usefixtures("x64")
def test_fifty_steps_of_a_gpt_equal_jit_in_float64():
    work = training(dtype="float64", param_dtype="float64", dropout=0.1)
    parallel = work.parallel({"a": 4, "b": 3, "c": 1}, 2)
    expected, end = _losses(jax.jit(work.step), work.state(), work.batches(), 50)
    actual, state = _losses(parallel, work.state(), work.batches(), 50)
    assert expected.dtype == np.float64
    assert np.abs(actual / expected - 1).max() <= 1e-12
    assert max(map(relative_error, jax.tree.leaves(state.params), jax.tree.leaves(end.params))) < (
        1e-11
    )


def test_adamw_beside_it_stays_near():
    """Adam turns rounding noise into steps where a gradient is zero: near, not equal."""
    work = training(optimizer=optax.adamw(1e-3))
    parallel = work.parallel({"fast": 2, "slow": 1}, 4)
    expected, _ = _losses(jax.jit(work.step), work.state(), work.batches(), 30)
    actual, _ = _losses(parallel, work.state(), work.batches(), 30)
    assert np.abs(actual / expected - 1).max() <= 1e-4


def test_dropout_masks_are_bit_equal_in_every_layout():
    """Masks are outputs, and bools are compared exactly."""
    check(dropout.masks_equal_the_full_draw, ALL_LAYOUTS)


# ---------------------------------------------------------------------------------------------
# Labels


def _labelled_step(params, batch):
    def loss_fn(params):
        losses = ((mlp(params, batch["x"]) - batch["y"]) ** 2).mean(-1)
        return losses.mean(), losses

    (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return sgd(params, grads), {"loss": loss, "losses": losses, "id": batch["id"] + 0}


def test_labels_meet_their_own_examples_for_fifty_steps():
    draw = np.random.default_rng(0)
    params = mlp_params(draw, DIM, 24, 12, 12, 4)
    batches = [regression(draw) | {"id": jnp.arange(8) + 100 * i} for i in range(50)]
    cluster = hp.Cluster.emulated({"a": 4, "b": 3, "c": 1})
    parallel = hp.het_parallelize(_labelled_step, cluster=cluster, num_microbatches=8, plan="even")
    jitted = jax.jit(_labelled_step)
    expected, actual, naive = (jax.tree.map(jnp.copy, params) for _ in range(3))
    for number, batch in enumerate(batches):
        expected, wanted = jitted(expected, batch)
        actual, found = parallel(actual, batch)
        assert_equal(found, wanted)
        np.testing.assert_array_equal(found["id"], np.arange(8) + 100 * number)
        naive, _ = jitted(naive, batch | {"y": jnp.roll(batch["y"], 1, axis=0)})
    assert_equal(actual, expected)
    gaps = map(relative_error, jax.tree.leaves(naive), jax.tree.leaves(expected))
    assert max(gaps) > 0.005  # what one microbatch's offset would do


# ---------------------------------------------------------------------------------------------
# Nothing grows, nothing compiles


def test_a_scan_over_layers_compiles_the_same_program_at_any_depth():
    sizes = {}
    for depth in (4, 8):
        work = training(scan=True, layers=depth)
        parallel = work.parallel({"a": 1, "b": 1}, 4)
        traced = parallel.trace(jax.eval_shape(work.create, jax.random.key(0)),
                                next(work.batches()))  # fmt: skip
        layers = traced.plan().layered.num_layers
        assert layers >= depth
        text = f"a: 0-{layers // 2 - 1} | b: {layers // 2}-{layers - 1}"
        staged = traced.with_plan(text).compile().staged
        scans = [e for f in staged.fragments for e in f.jaxpr.eqns if e.primitive.name == "scan"]
        assert sum(e.params["length"] for e in scans) == 2 * depth  # forward and backward
        sizes[depth] = sum(len(f.jaxpr.eqns) for f in staged.fragments)
    assert sizes[8] <= 1.02 * sizes[4]


def test_nothing_compiles_after_the_first_step():
    work = training(dropout=0.1)
    parallel = work.parallel({"a": 4, "b": 3, "c": 1}, 4)
    batches = work.batches()
    first = next(batches)
    state = parallel.init_state(work.create, jax.random.key(0), batch=first)
    state, _ = parallel(state, first)
    with _compiles() as compiled:
        for _, batch in zip(range(4), batches, strict=False):
            state, metrics = parallel(state, batch)
        jax.block_until_ready((state, metrics))
    assert compiled == []


def test_the_listener_hears_compiles():
    with _compiles() as compiled:
        jax.jit(lambda x: x * 3 + jnp.float32(len(compiled)))(jnp.arange(37.0))
    assert compiled


def test_state_comes_back_on_the_shardings_it_went_in_with():
    work = training(dropout=0.1)
    parallel = work.parallel({"a": 4, "b": 3, "c": 1}, 2)
    batch = next(work.batches())
    state = parallel.init_state(work.create, jax.random.key(0), batch=batch)
    before = [(x.sharding, x.aval.weak_type) for x in jax.tree.leaves(state)]
    for _ in range(2):
        state, _ = parallel(state, batch)
        assert [(x.sharding, x.aval.weak_type) for x in jax.tree.leaves(state)] == before


def _small_parallel(num_microbatches=4, schedule="1f1b"):
    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: ((mlp(p, batch["x"]) - batch["y"]) ** 2).mean())(
            params
        )
        return sgd(params, grads), loss

    cluster = hp.Cluster.emulated({"a": 2, "b": 1})
    draw = np.random.default_rng(3)
    parallel = hp.het_parallelize(
        step, cluster=cluster, num_microbatches=num_microbatches, schedule=schedule, plan="even"
    )
    return parallel, mlp_params(draw, DIM, 12, 8, 4), regression(draw)


def _live() -> tuple[int, int]:
    gc.collect()
    arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
    return len(arrays), sum(x.nbytes for x in arrays)


def test_live_arrays_are_constant_over_five_hundred_steps():
    parallel, state, batch = _small_parallel()
    for _ in range(10):
        state, loss = parallel(state, batch)
    before = _live()
    for _ in range(490):
        state, loss = parallel(state, batch)
    jax.block_until_ready((state, loss))
    assert _live() == before


def test_no_array_is_left_after_everything_is_deleted():
    before = _live()
    parallel, state, batch = _small_parallel()
    for _ in range(3):
        state, loss = parallel(state, batch)
    jax.block_until_ready((state, loss))
    del parallel, state, batch, loss
    assert _live() == before


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])
def test_in_flight_bound_is_kept_at_sixty_four_microbatches(schedule):
    parallel, state, _ = _small_parallel(64, schedule)
    draw = np.random.default_rng(4)
    batch = {
        "x": jnp.asarray(draw.normal(size=(64, DIM)), jnp.float32),
        "y": jnp.asarray(draw.normal(size=(64, 4)), jnp.float32),
    }
    compiled = parallel.trace(state, batch).plan().compile()
    events = []
    compiled.timed(lambda name, stage, start, end: events.append((name, stage, start, end)),
                   state, batch)  # fmt: skip
    bounds = compiled.runtime.compiled.schedule.in_flight
    assert len(bounds) == 2
    assert max(bounds) < 8
    for stage, bound in enumerate(bounds):
        here = [(name, start, end) for name, where, start, end in events if where == stage]
        begun = [(start, 1) for name, start, _ in here if name.startswith("forward")]
        ended = [(end, -1) for name, _, end in here if name.startswith("backward")]
        assert len(begun) == 64
        assert len(ended) == 64
        held = np.cumsum([change for _, change in sorted(begun + ended)])
        assert held.max() <= bound
