"""Calls as a whole: shapes, several functions, eval beside training, donation, bad calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp
from tests.equality import assert_equal
from tests.programs.models import BATCH, DIM, mlp, mlp_params, normal, sgd
from tests.small_gpt import training

CLUSTER = {"a": 2, "b": 1}


def _step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: ((mlp(p, batch["x"]) - batch["y"]) ** 2).mean())(
        params
    )
    return sgd(params, grads), {"loss": loss, "grads": grads}


def _arguments(seed=0, batch=BATCH):
    draw = np.random.default_rng(seed)
    params = mlp_params(draw, DIM, 12, 8, 4)
    return params, {"x": normal(draw, batch, DIM), "y": normal(draw, batch, 4)}


def _parallel(fun=_step, num_microbatches=4, **settings):
    settings.setdefault("plan", "even")  # a stage on each group
    cluster = hp.Cluster.emulated(CLUSTER)
    return hp.het_parallelize(fun, cluster=cluster, num_microbatches=num_microbatches, **settings)


# ---------------------------------------------------------------------------------------------
# Shapes and several functions


def test_another_sequence_length_is_a_second_compiled_step():
    work = training()
    parallel = work.parallel(CLUSTER, 4)
    long = next(work.batches())
    short = {name: x[:, :7] for name, x in long.items()}
    jitted = jax.jit(work.step)
    expected, actual = work.state(), work.state()
    for batch in (long, short, long, short):
        expected, wanted = jitted(expected, batch)
        actual, found = parallel(actual, batch)
        assert_equal(found, wanted)
    assert_equal(actual.params, expected.params, tolerance=1e-4)


def test_another_batch_size_is_a_second_compiled_step():
    parallel = _parallel()
    for size in (8, 16, 8):
        expected = jax.jit(_step)(*_arguments(size, size))
        assert_equal(parallel(*_arguments(size, size)), expected)


def test_two_decorated_functions_interleaved():
    def other(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.abs(mlp(p, batch["x"]) - batch["y"]).sum())(
            params
        )
        return sgd(params, grads, 0.01), {"loss": loss}

    one, two = _parallel(), _parallel(other, 2)
    state = {"one": _arguments(1)[0], "two": _arguments(1)[0]}
    plain = {"one": _arguments(1)[0], "two": _arguments(1)[0]}
    batch = _arguments(1)[1]
    for _ in range(3):
        for name, parallel, step in (("one", one, _step), ("two", two, other)):
            state[name], found = parallel(state[name], batch)
            plain[name], wanted = jax.jit(step)(plain[name], batch)
            assert_equal(found, wanted)
    assert_equal(state, plain)


def test_as_a_decorator_with_and_without_arguments():
    cluster = hp.Cluster.emulated({"only": 1})

    @hp.het_parallelize
    def plain(params, batch):
        """Doc."""
        return _step(params, batch)

    @hp.het_parallelize(cluster=cluster, num_microbatches=2)
    def configured(params, batch):
        return _step(params, batch)

    assert (plain.__name__, plain.__doc__) == ("plain", "Doc.")
    expected = jax.jit(_step)(*_arguments())
    assert_equal(plain(*_arguments()), expected)
    assert_equal(configured(*_arguments()), expected)


def test_stages_of_the_compile_flow_need_shapes_only_and_print():
    params, batch = _arguments()
    shapes = jax.eval_shape(lambda: (params, batch))
    traced = _parallel().trace(*shapes)
    planned = traced.plan()
    text = planned.plan.to_text()
    compiled = traced.with_plan(text).compile()
    assert compiled.planned.plan.to_text() == text
    for stage in (traced, planned, compiled):
        assert str(stage)
    assert_equal(compiled(params, batch), jax.jit(_step)(*_arguments()))


def test_plan_travels_as_json(tmp_path):
    planned = _parallel().trace(*_arguments()).plan()
    planned.plan.save(tmp_path / "plan.json")
    loaded = hp.Plan.load(tmp_path / "plan.json")
    assert loaded == planned.plan
    assert_equal(_parallel(plan=loaded)(*_arguments()), jax.jit(_step)(*_arguments()))


def test_marked_boundaries_do_not_change_the_numbers():
    def step(params, batch):
        def loss_fn(params):
            x = batch["x"]
            for p in params:
                x = hp.stage_boundary(jnp.tanh(x @ p["w"] + p["b"]))
            return ((x - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return sgd(params, grads), {"loss": loss, "grads": grads}

    assert_equal(_parallel(step)(*_arguments()), jax.jit(step)(*_arguments()))


# ---------------------------------------------------------------------------------------------
# The state


def test_init_state_equals_creation_on_one_device():
    work = training(dropout=0.1)
    parallel = work.parallel({"a": 4, "b": 3, "c": 1}, 4)
    batch = next(work.batches())
    state = parallel.init_state(work.create, jax.random.key(0), batch=batch)
    assert_equal(state, jax.jit(work.create)(jax.random.key(0)), tolerance=1e-6)
    devices = {d for x in jax.tree.leaves(state) for d in x.devices()}
    assert len(devices) > 1
    _, wanted = jax.jit(work.step)(work.state(), batch)
    _, found = parallel(state, batch)
    assert_equal(found, wanted)


def test_eval_beside_training_mutates_nothing():
    work = training()
    parallel = work.parallel(CLUSTER, 4)

    def evaluate(state, batch):
        logits = state.apply_fn({"params": state.params}, batch["tokens"])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)
        return {"loss": -picked.mean(), "losses": -picked.mean((1, 2))}

    companion = parallel.companion(evaluate)
    batches, others = work.batches(), work.batches(6, seed=1)
    first = next(batches)
    actual = parallel.init_state(work.create, jax.random.key(0), batch=first)
    expected = work.state()
    for batch in (first, next(batches)):
        held_out = next(others)
        before = jax.tree.map(np.asarray, actual.params)
        assert_equal(companion(actual, held_out), jax.jit(evaluate)(expected, held_out))
        jax.tree.map(np.testing.assert_array_equal, before, actual.params)
        actual, found = parallel(actual, batch)
        expected, wanted = jax.jit(work.step)(expected, batch)
        assert_equal(found, wanted)
    assert_equal(companion(actual, held_out), jax.jit(evaluate)(expected, held_out))


def test_aliased_leaves_of_a_donated_state_are_refused_with_both_paths():
    def step(state, batch):
        params, new = _step(state["params"], batch)
        return {"params": params, "average": sgd(state["average"], state["params"])}, new

    params, batch = _arguments()
    with pytest.raises(hp.HetpassError, match="donat") as refusal:
        _parallel(step)({"params": params, "average": params}, batch)
    assert "state['params'][0]['b']" in str(refusal.value)
    assert "state['average'][0]['b']" in str(refusal.value)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
    kept = _parallel(step, donate_argnums=())({"params": params, "average": params}, batch)
    assert_equal(kept, jax.jit(step)({"params": params, "average": params}, batch))


def test_reuse_of_a_donated_state_says_who_gave_it_away():
    parallel = _parallel()
    params, batch = _arguments()
    new, _ = parallel(params, batch)
    with pytest.raises((hp.HetpassError, RuntimeError), match="donate") as error:
        parallel(params, batch)
    assert "params[0]['b']" in str(error.value)
    parallel(new, batch)


def test_state_is_kept_without_donation():
    params, batch = _arguments()
    parallel = _parallel(donate_argnums=())
    expected = jax.jit(_step)(params, batch)
    for _ in range(2):
        assert_equal(parallel(params, batch), expected)


# ---------------------------------------------------------------------------------------------
# Bad calls


def _refused(code, call, *fragments):
    with pytest.raises(hp.HetpassError) as refusal:
        call()
    assert refusal.value.code.startswith(code), refusal.value
    assert refusal.value.ways_out, refusal.value
    for fragment in fragments:
        assert fragment in str(refusal.value), refusal.value
    return refusal.value


def test_a_batch_that_does_not_divide():
    value = _refused("HP-", lambda: _parallel(num_microbatches=3)(*_arguments()), "3")
    assert any(str(n) in "\n".join(value.ways_out + value.details) for n in (2, 4))


def test_a_data_axis_that_does_not_divide():
    traced = _parallel(num_microbatches=8).trace(*_arguments())
    last = traced.plan().layered.num_layers - 1
    _refused("HP-PLAN", lambda: traced.with_plan(f"a[2](data=2): 0-{last}"), "data")


def test_a_batch_size_written_into_the_step():
    def step(params, batch):
        x = batch["x"].reshape(8, DIM)
        return ((mlp(params, x) - batch["y"].reshape(8, 4)) ** 2).mean()

    refusal = _refused("HP-", lambda: _parallel(step)(*_arguments()))
    assert "test_whole_calls.py" in str(refusal)
    alone = _parallel(step, num_microbatches=1)(*_arguments())
    assert_equal(alone, jax.jit(step)(*_arguments()))


def test_leaves_of_the_batch_that_disagree():
    params, batch = _arguments()
    wrong = batch | {"y": batch["y"][:4]}
    _refused("HP-TRACE", lambda: _parallel()(params, wrong), "batch['y']")


@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(lambda p, b: 1.0 if b["x"].sum() > 0 else 0.0, id="python control flow"),
        pytest.param(lambda p, b: np.asarray(b["x"]).sum(), id="numpy on tracers"),
        pytest.param(lambda p, b: "text", id="no array returned"),
        pytest.param(lambda p, b: b["missing"], id="missing entry"),
    ],
)
def test_steps_that_cannot_be_traced(fun):
    with pytest.raises((hp.HetpassError, jax.errors.JAXTypeError, KeyError, TypeError)) as error:
        _parallel(fun)(*_arguments())
    assert isinstance(error.value, hp.HetpassError) or "hetpass" not in str(error.value)


def test_arguments_that_are_no_arrays():
    params, batch = _arguments()
    _refused("HP-TRACE", lambda: _parallel()(params, batch | {"name": "text"}), "name")


@pytest.mark.parametrize("count", [0, -1, 2.5, "many", True])
def test_numbers_of_microbatches_that_cannot_be(count):
    _refused("HP-PLAN", lambda: _parallel(num_microbatches=count))


def test_what_is_no_function():
    _refused("HP-TRACE", lambda: hp.het_parallelize(3))


def test_another_structure_for_a_compiled_step():
    params, batch = _arguments()
    compiled = _parallel().trace(params, batch).plan().compile()
    _refused("HP-RUN", lambda: compiled(params, {"x": batch["x"]}))
    _refused("HP-RUN", lambda: compiled(params, batch | {"y": batch["y"][:, :2]}), "batch['y']")
    assert_equal(compiled(params, batch), jax.jit(_step)(*_arguments()))


def test_a_plan_of_another_program():
    planned = _parallel().trace(*_arguments()).plan()

    def deeper(params, batch):
        return _step(params, batch | {"x": jnp.tanh(batch["x"] @ jnp.eye(DIM))})

    _refused("HP-PLAN", lambda: _parallel(deeper, plan=planned.plan)(*_arguments()))


# ---------------------------------------------------------------------------------------------
# Side effects


def test_a_print_that_is_free_of_the_batch_runs_once(capfd):
    def step(params, batch):
        jax.debug.print("weight {w:.3f}", w=params[0]["w"][0, 0])
        return _step(params, batch)

    result = _parallel(step)(*_arguments())
    jax.block_until_ready(result)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("weight") == 1
    assert_equal(result, jax.jit(_step)(*_arguments()))


def test_a_print_of_the_whole_batch_prints_the_whole_batch_once(capfd):
    def step(params, batch):
        jax.debug.print("weight {x:.4f}", x=batch["x"].sum())
        return _step(params, batch)

    wanted = jax.jit(step)(*_arguments())
    jax.effects_barrier()
    expected = capfd.readouterr().out
    result = _parallel(step)(*_arguments())
    jax.block_until_ready(result)
    jax.effects_barrier()
    assert capfd.readouterr().out == expected != ""
    assert_equal(result, wanted)


def test_a_print_inside_the_loss_sees_the_whole_batch(capfd):
    def step(params, batch):
        def loss_fn(params):
            x = mlp(params, batch["x"])
            jax.debug.print("x {first} {largest}", first=x[0] > 0, largest=x.argmax(0))
            return ((x - batch["y"]) ** 2).mean()

        return jax.grad(loss_fn)(params)

    wanted = jax.jit(step)(*_arguments())
    jax.effects_barrier()
    expected = capfd.readouterr().out
    result = _parallel(step)(*_arguments())
    jax.block_until_ready(result)
    jax.effects_barrier()
    assert capfd.readouterr().out == expected != ""
    assert_equal(result, wanted)


def test_a_callback_inside_the_loss_is_refused_by_name():
    def step(params, batch):
        def loss_fn(params):
            x = mlp(params, batch["x"])
            seen = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype),
                                     jax.lax.stop_gradient(x))  # fmt: skip
            return ((x - batch["y"]) ** 2 * (1 + seen**2)).mean()

        return jax.grad(loss_fn)(params)

    _refused("HP-", lambda: _parallel(step)(*_arguments()), "callback", "test_whole_calls.py")
