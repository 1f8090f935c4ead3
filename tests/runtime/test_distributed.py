"""Several workers give what the step itself gives. Here all are threads of one process, each with
devices of its own; everything between them goes over TCP. (test_distributed_ray.py has processes.)
"""

from __future__ import annotations

import gc

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetpass as hp
from hetpass.errors import ExecutionError, PlanError
from hetpass.runtime.distributed.crew import ThreadCrew
from hetpass.runtime.distributed.remote_array import RemoteArray
from tests.equality import relative_error

SIZES = {"fast": 4, "slow": 2, "last": 1}
PLANS = {
    "three workers": "fast[4](data=2,model=2): 0-1 | slow(data=2): 2-3 | last: 4-5",
    "two stages on one worker": "fast[2]: 0-1 | fast[2](data=2): 2-3 | slow(model=2): 4-5",
    "out and back": "fast[2](model=2): 0-1 | slow: 2-3 | fast[2]: 4-5",
    "one worker": "slow(data=2): 0-5",
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def threads(cluster):
    return ThreadCrew(cluster, cluster.bind(jax.devices()))


def train_step(state, batch):
    """Six layers with dropout; the state holds a key, a counter and a leaf that nothing reads."""

    def loss_fn(params):
        x = batch["x"]
        for w in params:
            x = x + jnp.tanh(x @ w)
        keep = jax.random.bernoulli(state["key"], 0.9, x.shape)
        return jnp.mean((x * keep - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    new = {
        **state,
        "params": optax.apply_updates(state["params"], updates),
        "opt": opt,
        "key": jax.random.fold_in(state["key"], state["count"]),
        "count": state["count"] + 1,
    }
    return new, {"loss": loss, "norm": optax.tree.norm(grads), "rate": jnp.float32(0.1)}


def create(key):
    params = [0.2 * jax.random.normal(k, (16, 16)) for k in jax.random.split(key, 6)]
    return {
        "params": params,
        "opt": OPTIMIZER.init(params),
        "key": jax.random.fold_in(key, 7),
        "count": jnp.int32(0),
        "unused": jnp.arange(3.0),
    }


def batches(count):
    draw = np.random.default_rng(0)
    for _ in range(count):
        yield {name: draw.normal(size=(16, 16)).astype(np.float32) for name in "xy"}


def parallel(plan, **options):
    cluster = hp.Cluster.emulated(SIZES)
    workers = hp.Workers(crew=threads)
    return hp.het_parallelize(
        train_step, cluster=cluster, num_microbatches=4, plan=plan, runtime=workers, **options
    )


@pytest.fixture(scope="module")
def step():
    step = parallel(PLANS["three workers"])
    yield step
    step.settings.workers.close()


@pytest.mark.parametrize(
    ("plan", "schedule"),
    [
        *((plan, "1f1b") for plan in PLANS),
        ("three workers", "zb-h1"),
        ("two stages on one worker", "gpipe"),
    ],
)
def test_equal_to_the_step(plan, schedule):
    step = parallel(PLANS[plan], schedule=schedule)
    state = create(jax.random.key(1))
    expected, jitted = create(jax.random.key(1)), jax.jit(train_step)
    for batch in batches(3):
        state, metrics = step(state, batch)
        expected, wanted = jitted(expected, batch)
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
        assert float(metrics["rate"]) == np.float32(0.1)
    found = hp.fetch(state)
    for value, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            value, other = jax.random.key_data(value), jax.random.key_data(other)
        assert relative_error(value, other) < 1e-5
    step.settings.workers.close()


def test_a_state_is_created_in_place(step):
    batch = next(batches(1))
    state = step.init_state(create, jax.random.key(1), batch=batch)
    assert all(isinstance(leaf, RemoteArray) for leaf in jax.tree.leaves(state))
    places = [leaf.places for leaf in state["params"]]
    assert places == [(0,), (0,), (1,), (1,), (2,), (2,)]
    for value, expected in zip(
        jax.tree.leaves(hp.fetch(state["params"])),
        jax.tree.leaves(create(jax.random.key(1))["params"]),
        strict=True,
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    _, metrics = step(state, batch)
    _, expected = jax.jit(train_step)(create(jax.random.key(1)), batch)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)


def test_a_companion_reads_the_state_where_it_is(step):
    batch = next(batches(1))
    state = step.init_state(create, jax.random.key(1), batch=batch)

    def evaluate(state, batch):
        x = batch["x"]
        for w in state["params"]:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    found = step.companion(evaluate, num_microbatches=2)(state, batch)
    expected = evaluate(create(jax.random.key(1)), batch)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert float(step(state, batch)[1]["loss"]) > 0  # nothing was given away


def test_a_measured_step_is_a_timeline_of_all_workers(step):
    batch = next(batches(1))
    compiled = step.compiled_for(create(jax.random.key(1)), batch)
    (_, metrics), timeline = compiled.timeline(create(jax.random.key(1)), batch)
    assert float(metrics["loss"]) > 0
    assert len(timeline.lanes) == 3
    assert [len(tasks) for tasks in timeline.order()] == [8, 8, 8]
    sends = [s for s in timeline.spans if s.kind == "send-F" and s.microbatch >= 0]
    ends = {(s.stage, s.microbatch): s.end_s for s in timeline.spans if s.kind == "F"}
    for send in sends:
        assert send.end_s <= ends[send.stage + 1, send.microbatch]


def test_donated_arrays_are_gone(step):
    batch = next(batches(1))
    state = step.init_state(create, jax.random.key(1), batch=batch)
    step(state, batch)
    with pytest.raises(ExecutionError, match="HP-RUN-DONATED"):
        step(state, batch)
    with pytest.raises(ExecutionError, match="HP-RUN-DONATED"):
        hp.fetch(state["params"][0])


def test_what_nobody_holds_is_forgotten(step):
    talk = step.settings.workers.talk(step.settings.cluster)

    def kept():
        gc.collect()
        for place in range(3):
            talk.crew.wait([talk.crew.ask(place, "forget", talk.forgotten(place))])
        return [talk.crew.wait([talk.crew.ask(place, "kept")])[0] for place in range(3)]

    before = kept()
    state = step.init_state(create, jax.random.key(1), batch=next(batches(1)))
    for batch in batches(3):
        state, metrics = step(state, batch)
    during = kept()
    assert sum(during) - sum(before) == len(jax.tree.leaves((state, metrics))) - 1  # the rate
    for batch in batches(3):
        state, metrics = step(state, batch)
    assert kept() == during
    del state, metrics
    assert kept() == before


def test_later_steps_compile_nothing_and_hold_no_more(step):
    state = step.init_state(create, jax.random.key(1), batch=next(batches(1)))
    for batch in batches(3):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    compiles = []

    def listen(event, duration, **_):
        if "compile" in event:
            compiles.append(event)

    def live():
        jax.block_until_ready((state, metrics))
        gc.collect()
        return len(jax.live_arrays())

    before = live()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(20):
            state, metrics = step(state, batch)
        after = live()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiles == []
    assert after <= before


def test_arguments_are_checked_before_anything_runs(step):
    batch = next(batches(1))
    state = create(jax.random.key(1))
    step(state, batch)
    compiled = step.compiled_for(state, batch)
    with pytest.raises(ExecutionError, match="HP-RUN-SHAPE"):
        compiled(state, {**batch, "x": batch["x"][:8]})
    with pytest.raises(ExecutionError, match="HP-RUN-STRUCTURE"):
        compiled(state, {"x": batch["x"]})


def test_two_steps_share_workers_and_arrays(step):
    """A state that one step made is taken by another, where it lives elsewhere too."""
    other = hp.het_parallelize(
        train_step,
        cluster=step.settings.cluster,
        num_microbatches=2,
        plan="fast[2]: 0-2 | slow: 3-5",
        runtime=step.settings.workers,
    )
    first, second = batches(2)
    state, _ = step(create(jax.random.key(1)), first)
    _, metrics = other(state, second)
    jitted = jax.jit(train_step)
    expected, _ = jitted(create(jax.random.key(1)), first)
    _, wanted = jitted(expected, second)
    assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)


def test_workers_belong_to_one_cluster(step):
    with pytest.raises(ExecutionError, match="HP-RUN-CLUSTER"):
        step.settings.workers.talk(hp.Cluster.emulated({"fast": 2}))


def test_closed_workers_are_told():
    step = parallel(PLANS["one worker"])
    batch = next(batches(1))
    state, _ = step(create(jax.random.key(1)), batch)
    step.settings.workers.close()
    with pytest.raises(ExecutionError, match="HP-RUN-CLOSED"):
        step(state, batch)


def test_remote_arrays_are_numbers_when_asked(step):
    batch = next(batches(1))
    _, metrics = step(create(jax.random.key(1)), batch)
    loss = metrics["loss"]
    assert (loss.shape, loss.dtype, loss.ndim, loss.size) == ((), np.float32, 0, 1)
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    assert float(jnp.sqrt(jnp.asarray(loss))) == pytest.approx(float(loss) ** 0.5, rel=1e-6)
    assert np.asarray(loss) == loss.item() == loss.tolist()
    assert jax.block_until_ready(metrics)["loss"] is loss
    assert "stage 2" in repr(loss)


def test_wrong_plans_are_refused():
    step = parallel("fast[4](data=4): 0-3 | slow(data=2): 4-5")
    batch = {name: np.ones((24, 16), np.float32) for name in "xy"}
    with pytest.raises(PlanError, match="HP-PLAN"):
        step(create(jax.random.key(1)), batch)


@pytest.mark.parametrize("runtime", ["spark", None, 3])
def test_unknown_runtimes_are_refused(runtime):
    with pytest.raises(ExecutionError, match="HP-RUN-RUNTIME"):
        hp.het_parallelize(train_step, runtime=runtime)
