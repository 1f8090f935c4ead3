"""Every schedule runs on virtual devices, equals `jax.jit`, and keeps its order and bounds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp
from hetpass.errors import PlanError, ScheduleError
from hetpass.ir.timeline import Timeline
from tests.equality import differences

DIM, BATCH = 16, 8
LAYERS = 6


def step(state: Any, batch: Any) -> Any:
    """Six layers with dropout, a parameter used by first and last; gradients come back too."""
    params, key = state["params"], state["key"]

    def loss_of(p: Any) -> Any:
        x = batch["x"] @ p["tied"]
        for k in range(LAYERS):
            with jax.named_scope(f"layer{k}"):
                x = x + jnp.tanh(x @ p[f"w{k}"] + p[f"b{k}"])
                keep = jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, x.shape)
                x = jnp.where(keep, x / 0.9, 0)
        return ((x @ p["tied"].T - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    new = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
    return {"params": new, "key": jax.random.fold_in(key, 1)}, {"loss": loss, "grads": grads}


def state() -> Any:
    draw = np.random.default_rng(0)
    params = {f"w{k}": jnp.asarray(draw.normal(size=(DIM, DIM)) * 0.2, "f4") for k in range(LAYERS)}
    params |= {f"b{k}": jnp.asarray(draw.normal(size=DIM) * 0.1, "f4") for k in range(LAYERS)}
    params["tied"] = jnp.asarray(draw.normal(size=(DIM, DIM)) * 0.3, "f4")
    return {"params": params, "key": jax.random.key(3)}


def batch() -> Any:
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(2, BATCH, DIM))
    return {"x": jnp.asarray(x, "f4"), "y": jnp.asarray(y, "f4")}


def planned(schedule: str, places: str, microbatches: int, **changes: Any) -> Any:
    """`places`: a group per stage, "a b b a"; a group that comes twice is one submesh."""
    groups = places.split()
    cluster = hp.Cluster.emulated(dict.fromkeys(groups, 1), speeds={"a": 2.0})
    work = hp.het_parallelize(
        step, cluster=cluster, schedule=schedule, num_microbatches=microbatches
    )
    traced = work.trace(state(), batch())
    count, parts = traced.plan(schedule="gpipe").layered.num_layers, len(groups)
    ends = [i * count // parts for i in range(parts + 1)]
    text = " | ".join(f"{g}[0-0]: {ends[i]}-{ends[i + 1] - 1}" for i, g in enumerate(groups))
    found = traced.with_plan(text)
    if not changes:
        return found
    data = found.plan.to_json()
    for old, new in changes.items():
        data = data.replace(f'"{old}": "none"', f'"{old}": "{new}"')
    return traced.with_plan(hp.Plan.from_json(data))


def check(plan: Any, steps: int = 2) -> Timeline:
    """Runs it, against jax.jit; the timeline of one more step."""
    compiled = plan.compile()
    mine, reference, jitted = state(), state(), jax.jit(step)
    for _ in range(steps):
        mine, out = compiled(mine, batch())
        reference, expected = jitted(reference, batch())
        assert not differences((mine, out), (reference, expected))
    (mine, out), timeline = compiled.timeline(mine, batch())
    assert not differences((mine, out), jitted(reference, batch()))
    agree(plan.timeline(), timeline)
    bounds(compiled, timeline)
    return timeline


def agree(simulated: Timeline, measured: Timeline) -> None:
    """The same lanes, and on each the same tasks in the same order."""
    assert simulated.lanes == measured.lanes
    for expected, actual in zip(simulated.order(), measured.order(), strict=True):
        # A stage of one layer may have nothing that an earlier stage waits for: no B of its own.
        assert actual == tuple(t for t in expected if t in actual)
        assert {t for t in expected if t[0] == "F"} <= set(actual)


def bounds(compiled: Any, timeline: Timeline) -> None:
    """No stage holds more microbatches than its schedule says, by the measured times."""
    schedule = compiled.runtime.compiled.schedule
    for stage, bound in enumerate(schedule.in_flight):
        spans = [s for s in timeline.spans if s.stage == stage]
        begun = [(s.start_s, 1) for s in spans if s.kind == "F"]
        ended = [(s.end_s, -1) for s in spans if s.kind == "B"]
        if ended:
            assert np.cumsum([c for _, c in sorted(begun + ended)]).max() <= bound
        weights = [(s.end_s, -1) for s in spans if s.kind == "W"]
        if weights:
            most = np.cumsum([c for _, c in sorted(begun + weights)]).max()
            assert most <= schedule.held()[stage]


ONE_EACH = ("gpipe", "1f1b", "eager-1f1b", "h-1f1b", "zb-h1", "zb-h2", "auto")


@pytest.mark.parametrize("schedule", ONE_EACH)
def test_one_stage_per_submesh(schedule):
    timeline = check(planned(schedule, "a b c", 8))
    kinds = {s.kind for s in timeline.spans if s.kind in ("F", "B", "W")}
    assert ("W" in kinds) == schedule.startswith("zb")


@pytest.mark.parametrize("schedule", ["interleaved", "auto"])
def test_stages_that_wind_around_the_submeshes(schedule):
    plan = planned(schedule, "a b a b", 4)
    assert plan.plan.lane_of == (0, 1, 0, 1)
    timeline = check(plan)
    assert timeline.lanes == ("0 · a[1]", "1 · b[1]")


def test_two_stages_per_submesh_in_the_shape_of_a_v():
    timeline = check(planned("zb-v", "a b b a", 4))
    assert {s.stage for s in timeline.on(timeline.lanes[0])} == {0, 3}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "auto"])
def test_fewer_microbatches_than_stages(schedule):
    check(planned(schedule, "a b c d", 2), steps=1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_recomputation(schedule):
    plan = planned(schedule, "a b", 4, recompute="full")
    assert {s.recompute for s in plan.plan.pipelines[0].stages} == {"full"}
    check(plan)


def test_one_stage_alone_splits_its_weight_gradients():
    check(planned("zb-h1", "a", 2), steps=1)


@pytest.mark.parametrize("how", ["none", "full"])
def test_meshes_with_data_and_model_axes(how):
    """Sums over examples stay apart on every device until the epilogue, in W as in B."""
    cluster = hp.Cluster.emulated({"a": 4, "b": 2})
    work = hp.het_parallelize(step, cluster=cluster, schedule="zb-v", num_microbatches=4)
    traced = work.trace(state(), batch())
    last = traced.plan(schedule="gpipe").layered.num_layers - 1
    a, b = "a[0-3](data=2,model=2)", "b[0-1](data=2)"
    found = traced.with_plan(f"{a}: 0-1 | {b}: 2-3 | {b}: 4 | {a}: 5-{last}")
    data = found.plan.to_json().replace('"recompute": "none"', f'"recompute": "{how}"')
    check(traced.with_plan(hp.Plan.from_json(data)))


def test_forward_only():
    def score(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for k in range(4):
            with jax.named_scope(f"layer{k}"):
                x = jnp.tanh(x @ params[f"w{k}"])
        return x, jnp.abs(x).max()

    params = state()["params"]
    for schedule in ("inference", "1f1b", "auto"):
        work = hp.het_parallelize(
            score,
            cluster=hp.Cluster.emulated({"a": 1, "b": 1}),
            schedule=schedule,
            num_microbatches=4,
            donate_argnums=(),
            plan="even",
        )
        compiled = work.trace(params, batch()).plan().compile()
        result, timeline = compiled.timeline(params, batch())
        assert not differences(result, jax.jit(score)(params, batch()))
        assert timeline.order() == compiled.planned.timeline().order()


@pytest.mark.parametrize(("schedule", "places"), [("zb-h1", "a b"), ("interleaved", "a b a b")])
def test_an_eval_step_beside_it(schedule, places):
    def evaluate(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["tied"]
        for k in range(LAYERS):
            with jax.named_scope(f"layer{k}"):
                x = x + jnp.tanh(x @ params[f"w{k}"])
        return jnp.abs(x).mean()

    plan = planned(schedule, places, 4)
    work = hp.het_parallelize(step, cluster=plan.traced.cluster, plan=plan.plan, num_microbatches=4)
    beside = work.companion(evaluate, num_microbatches=2)
    mine, _ = work(state(), batch())
    reference, _ = jax.jit(step)(state(), batch())
    expected = jax.jit(evaluate)(reference["params"], batch())
    assert not differences(beside(mine["params"], batch()), expected)


# ---------------------------------------------------------------------------------------------
# What a plan says about its schedule


@pytest.mark.parametrize(
    ("schedule", "places"),
    [("auto", "a b c"), ("h-1f1b", "a b"), ("zb-h1", "a b"), ("auto", "a b a b")],
)
def test_a_saved_plan_has_the_schedule_in_it(schedule, places):
    """No costs are needed to read it back, and the same is planned every time."""
    first = planned(schedule, places, 4)
    again = hp.Plan.from_json(first.plan.to_json())
    assert again == first.plan
    assert again.schedule != "auto"
    assert first.traced.with_plan(again).plan == again
    assert planned(schedule, places, 4).plan.to_json() == first.plan.to_json()


@pytest.mark.parametrize(
    ("schedule", "places"), [("1f1b", "a b a b"), ("interleaved", "a b b a"), ("zb-v", "a b")]
)
def test_a_schedule_that_does_not_fit_the_submeshes_is_refused(schedule, places):
    with pytest.raises(PlanError) as caught:
        planned(schedule, places, 4)
    assert caught.value.code == "HP-PLAN-SCHEDULE"


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ScheduleError, match="HP-SCHEDULE-UNKNOWN"):
        planned("1f2b", "a b", 4)
