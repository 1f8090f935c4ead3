"""The local runtime gives what the step itself gives, and keeps its promises about memory."""

from __future__ import annotations

import gc

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from hetpass.backend.compile import compile
from hetpass.errors import ExecutionError, ScheduleError
from hetpass.runtime.dispatch import Run, Wait, dispatch
from hetpass.runtime.local import LocalRuntime
from hetpass.schedules.make import make_schedule
from tests.backend.handmade import devices_of, mlp, plan_of
from tests.equality import relative_error

DATA, MODEL = (("data", 2),), (("model", 2),)
BOTH = (("data", 2), ("model", 2))


def runtime_of(step, *meshes, schedule="1f1b"):
    count = step.staged.num_microbatches
    plan = plan_of(*meshes, microbatches=count)
    tasks = make_schedule(schedule, num_stages=len(meshes), num_microbatches=count)
    return LocalRuntime(compile(step.staged, plan, devices_of(plan), tasks))


def next_arguments(step, results):
    """The state that came back, and the same batch."""
    state = len(step.staged.pairs)
    return [*results[:state], *step.arguments[state:]]


LAYOUTS = {
    "one device each": ((), ()),
    "data and model": (DATA, MODEL),
    "unequal": (BOTH, (("data", 3),)),
    "three stages": (DATA, (), BOTH),
}


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_the_step(layout, microbatches):
    meshes = LAYOUTS[layout]
    step = mlp(len(meshes), microbatches)
    results = runtime_of(step, *meshes)(step.arguments)
    assert len(results) == len(step.expected)
    for result, expected in zip(results, step.expected, strict=True):
        assert relative_error(result, expected) < 1e-5


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b"])
def test_equal_in_float64(schedule):
    step = mlp(2, 4, dtype=np.float64)
    results = runtime_of(step, BOTH, (("data", 3),), schedule=schedule)(step.arguments)
    for result, expected in zip(results, step.expected, strict=True):
        assert result.dtype == np.float64
        assert relative_error(result, expected) < 1e-12


def test_state_comes_back_in_place_and_nothing_is_compiled_again():
    step = mlp(2, 2)
    runtime = runtime_of(step, BOTH, DATA)
    results = runtime(step.arguments)
    pointers = [shard.data.unsafe_buffer_pointer() for shard in results[0].addressable_shards]
    results = runtime(next_arguments(step, results))
    again = [shard.data.unsafe_buffer_pointer() for shard in results[0].addressable_shards]
    assert again == pointers
    compiles = []

    def listen(event, duration, **_):
        if "compile" in event or "trace" in event:
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(3):
            results = runtime(next_arguments(step, results))
        jax.block_until_ready(results)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiles


def test_live_arrays_are_constant():
    step = mlp(2, 4)
    runtime = runtime_of(step, DATA, ())
    results = runtime(next_arguments(step, runtime(step.arguments)))
    jax.block_until_ready(results)
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(100):
        results = runtime(next_arguments(step, results))
    jax.block_until_ready(results)
    gc.collect()
    assert len(jax.live_arrays()) == before
    del results, runtime
    gc.collect()
    assert len(jax.live_arrays()) < before


def test_arrays_that_are_given_away_are_gone():
    step = mlp(2, 2)
    runtime = runtime_of(step, MODEL, ())
    arguments = [jnp.asarray(a) for a in step.arguments]
    runtime(arguments)
    assert [a.is_deleted() for a in arguments] == [True] * 4 + [False] * 2
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(arguments[0])
    with pytest.raises(ExecutionError, match=r"HP-RUN-DONATED.*state\.w\[0\]"):
        runtime(arguments)


def test_arrays_that_are_not_given_away_stay():
    step = mlp(2, 2, donated=False)
    runtime = runtime_of(step, (), ())
    arguments = [jnp.asarray(a) for a in step.arguments]
    first = runtime(arguments)
    second = runtime([*first[:4], *arguments[4:]])
    jax.block_until_ready(second)
    for array, value in zip(arguments, step.arguments, strict=True):
        np.testing.assert_array_equal(array, value)
    for result, expected in zip(first, step.expected, strict=True):
        assert relative_error(result, expected) < 1e-5


def test_one_array_for_two_leaves_is_refused_before_dispatch():
    step = mlp(2, 2)
    runtime = runtime_of(step, (), ())
    arguments = [jnp.asarray(a) for a in step.arguments]
    arguments[1] = arguments[0]
    with pytest.raises(ExecutionError, match="HP-RUN-ALIASED") as caught:
        runtime(arguments)
    assert "state.w[0]" in str(caught.value)
    assert "state.w[1]" in str(caught.value)
    assert not arguments[0].is_deleted()


def test_misfits_are_refused():
    step = mlp(2, 1)
    runtime = runtime_of(step, (), ())
    with pytest.raises(ExecutionError, match="HP-RUN-COUNT"):
        runtime(step.arguments[1:])
    with pytest.raises(ExecutionError, match="HP-RUN-SHAPE"):
        runtime([step.arguments[0][:4], *step.arguments[1:]])
    with pytest.raises(ExecutionError, match="HP-RUN-SHAPE"):
        runtime([jnp.asarray(step.arguments[0]).astype("bfloat16"), *step.arguments[1:]])


def test_a_schedule_for_another_program_is_refused():
    step = mlp(2, 2)
    plan = plan_of((), (), microbatches=2)
    tasks = make_schedule("gpipe", num_stages=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="HP-SCHEDULE-SIZES"):
        LocalRuntime(compile(step.staged, plan, devices_of(plan), tasks))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_microbatches_in_flight_are_bounded(schedule):
    """Played by hand: forwards sent whose backward was not waited for, per stage."""
    step = mlp(2, 12)
    plan = plan_of((), (), microbatches=12)
    tasks = make_schedule(schedule, num_stages=2, num_microbatches=12)
    program = dispatch(compile(step.staged, plan, devices_of(plan), tasks))
    token_of = {}
    held: dict[int, set[int]] = {0: set(), 1: set()}
    worst = {0: 0, 1: 0}
    for instruction in program.instructions:
        if isinstance(instruction, Run) and instruction.task is not None:
            task = instruction.task
            if task.kind == "F":
                held[task.stage].add(task.microbatch)
                worst[task.stage] = max(worst[task.stage], len(held[task.stage]))
            else:
                token_of[instruction.results[-1]] = task
        elif isinstance(instruction, Wait):
            ended = token_of[instruction.token]
            held[ended.stage] -= set(range(ended.microbatch + 1))
    assert (worst[0], worst[1]) == tasks.in_flight


def test_cells_of_microbatches_are_emptied():
    step = mlp(2, 4)
    runtime = runtime_of(step, (), ())
    program = runtime.program
    dropped = [cell for i in program.instructions for cell in i.drops]
    assert len(dropped) == len(set(dropped))
    for slot in step.staged.slots:
        if slot.scope == "microbatch":
            first = program.slots[slot.index]
            assert set(range(first, first + 4)) <= set(dropped)


def test_recorded_times_are_ordered():
    step = mlp(2, 3)
    runtime = runtime_of(step, DATA, ())
    rows = []
    results = runtime(step.arguments, record=lambda *row: rows.append(row))
    for result, expected in zip(results, step.expected, strict=True):
        assert relative_error(result, expected) < 1e-5
    names = {name for name, *_ in rows}
    assert {"forward 0.0", "forward 1.2", "backward 0.2", "epilogue 1"} <= names
    assert len(rows) == sum(isinstance(i, Run) for i in runtime.program.instructions)
    for stage in (0, 1):
        lane = [(start_s, end_s) for _, s, start_s, end_s in rows if s == stage]
        assert all(start_s <= end_s for start_s, end_s in lane)
        assert all(a[1] <= b[0] for a, b in zip(lane, lane[1:], strict=False))
