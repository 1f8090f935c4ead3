"""Every public function, called wrongly: a HetpassError with code and way out, never a raw one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp
from hetpass.errors import ExecutionError

CLUSTER = hp.Cluster.emulated({"a": 2, "b": 1})
GROUPS, LINK = CLUSTER.groups, hp.Link(1e-5, 1e9)
KIND = GROUPS[0].kind


def _step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> Any:
        h = jnp.tanh(jnp.tanh(batch["x"] @ p["w1"]) @ p["w2"])
        return ((h - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def _arguments(rows: int = 8) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    params = {k: draw.normal(size=(4, 4)).astype(np.float32) for k in ("w1", "w2")}
    return params, {k: draw.normal(size=(rows, 4)).astype(np.float32) for k in ("x", "y")}


STATE, BATCH = _arguments()


def _wrapped(**settings: Any) -> Any:
    defaults = {"cluster": CLUSTER, "num_microbatches": 2, "donate_argnums": ()}
    return hp.het_parallelize(_step, **(defaults | settings))


@cache
def _traced() -> Any:
    return _wrapped().trace(*_arguments())


@cache
def _planned() -> Any:
    return _traced().plan()


@cache
def _compiled() -> Any:
    return _planned().compile()


@cache
def _called() -> Any:
    step = _wrapped()
    step(STATE, BATCH)
    return step


def _options(**options: Any) -> Callable[[], Any]:
    return lambda: _wrapped(options=hp.Options(**options))(STATE, BATCH)


def _parsed(**changes: Any) -> Callable[[], Any]:
    good = {"text": "a: 0-1", "cluster": CLUSTER, "num_layers": 2, "num_microbatches": 2}
    given = good | changes
    return lambda: hp.Plan.parse(given.pop("text"), **given)


def _verified(**settings: Any) -> Callable[[], Any]:
    defaults = {"cluster": CLUSTER, "num_microbatches": 2}
    return lambda: hp.verify(_step, STATE, BATCH, **(defaults | settings))


def _shapes() -> Any:
    return jax.eval_shape(_arguments)


FUNCTION, OPTION, COUNT = "HP-TRACE-FUNCTION", "HP-TRACE-OPTION", "HP-PLAN-MICROBATCHES"

CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    # het_parallelize
    "None": (FUNCTION, lambda: hp.het_parallelize(None)),
    "None, then called": (FUNCTION, lambda: hp.het_parallelize(None)(STATE, BATCH)),
    "no function, then called": (FUNCTION, lambda: hp.het_parallelize()(STATE, BATCH)),
    "no function, then nothing": (FUNCTION, lambda: hp.het_parallelize(cluster=CLUSTER)()),
    "a name": (FUNCTION, lambda: hp.het_parallelize("step")),
    "a list": (FUNCTION, lambda: hp.het_parallelize([_step])),
    "the state": (FUNCTION, lambda: hp.het_parallelize(STATE)),
    "the cluster": (FUNCTION, lambda: hp.het_parallelize(CLUSTER)),
    "M as text": (COUNT, lambda: _wrapped(num_microbatches="4")),
    "M as a list": (COUNT, lambda: _wrapped(num_microbatches=[4])),
    "M as an array": (COUNT, lambda: _wrapped(num_microbatches=np.array([1, 2]))),
    "cluster as a dict": ("HP-CLUSTER-TYPE", lambda: _wrapped(cluster={"a": 2})),
    "cluster as a path": ("HP-CLUSTER-TYPE", lambda: _wrapped(cluster="c.toml")),
    "schedule as a number": ("HP-", lambda: _wrapped(schedule=3)(STATE, BATCH)),
    "plan as a number": (OPTION, lambda: _wrapped(plan=3)),
    "plan as a path": (OPTION, lambda: _wrapped(plan=Path("plan.json"))),
    "plan of another name": ("HP-PLAN", lambda: _wrapped(plan="evn")(STATE, BATCH)),
    "batch_argnums by name": ("HP-TRACE-ARGNUMS", lambda: _wrapped(batch_argnums="batch")),
    "batch_argnums as a float": ("HP-TRACE-ARGNUMS", lambda: _wrapped(batch_argnums=1.0)),
    "runtime": ("HP-RUN-RUNTIME", lambda: _wrapped(runtime="Ray")),
    "options as a class": (OPTION, lambda: _wrapped(options=hp.Options)),
    # Options
    "batch_axes as a list": ("HP-TRACE-BATCH-AXIS", _options(batch_axes=["batch"])),
    "batch_axes as None": ("HP-TRACE-BATCH-AXIS", _options(batch_axes=None)),
    "batch_axes by text": ("HP-TRACE-BATCH-AXIS", _options(batch_axes={"batch['x']": "0"})),
    "batch_axes by number": ("HP-TRACE-BATCH-AXIS", _options(batch_axes={1: 0})),
    "batch_axes as a float": ("HP-TRACE-BATCH-AXIS", _options(batch_axes={"batch['x']": 0.0})),
    "statistics as a list": (OPTION, lambda: hp.Options(batch_statistics=["exact"])),
    "accumulate in nothing": (OPTION, _options(accumulate_dtype="float33")),
    "accumulate in integers": (OPTION, _options(accumulate_dtype="int32")),
    "accumulate in a number": (OPTION, _options(accumulate_dtype=3)),
    "devices as a number": (OPTION, _options(devices=3)),
    "devices by name": (OPTION, _options(devices=["cpu"])),
    "no devices": ("HP-CLUSTER-DEVICES", _options(devices=[])),
    "observer": (OPTION, _options(observer=3)),
    "progress": (OPTION, _options(progress="yes")),
    "status": (OPTION, _options(status="yes")),
    "profile as a path": (OPTION, _options(profile="profile.json")),
    "profile as a dict": (OPTION, _options(profile={})),
    # Cluster and its parts
    "emulated of a list": ("HP-CLUSTER-TYPE", lambda: hp.Cluster.emulated([2, 1])),
    "emulated of nothing": ("HP-CLUSTER-VALUE", lambda: hp.Cluster.emulated({})),
    "emulated of text": ("HP-CLUSTER-TYPE", lambda: hp.Cluster.emulated({"a": "2"})),
    "emulated, speed as text": (
        "HP-CLUSTER-TYPE",
        lambda: hp.Cluster.emulated({"a": 1}, speeds={"a": "fast"}),
    ),
    "emulated, speed of zero": (
        "HP-CLUSTER-VALUE",
        lambda: hp.Cluster.emulated({"a": 1}, speeds={"a": 0}),
    ),
    "auto of None": ("HP-CLUSTER-DEVICES", lambda: hp.Cluster.auto(None)),
    "auto of a number": ("HP-CLUSTER-TYPE", lambda: hp.Cluster.auto(3)),
    "auto of a name": ("HP-CLUSTER-TYPE", lambda: hp.Cluster.auto("cpu")),
    "auto of names": ("HP-CLUSTER-TYPE", lambda: hp.Cluster.auto(["cpu"])),
    "auto of one device": ("HP-CLUSTER-TYPE", lambda: hp.Cluster.auto(jax.devices()[0])),
    "auto of nothing": ("HP-CLUSTER-DEVICES", lambda: hp.Cluster.auto([])),
    "file None": ("HP-CLUSTER-TYPE", lambda: hp.Cluster.from_file(None)),
    "file of a dict": ("HP-CLUSTER-TYPE", lambda: hp.Cluster.from_file({"groups": []})),
    "file without a name": ("HP-CLUSTER-FILE", lambda: hp.Cluster.from_file("")),
    "file with a zero": ("HP-CLUSTER-FILE", lambda: hp.Cluster.from_file("a\0b.toml")),
    "data of None": ("HP-CLUSTER-TYPE", lambda: hp.Cluster.from_dict(None)),
    "data of another kind": (
        "HP-CLUSTER",
        lambda: hp.Cluster.from_dict({"groups": [{"name": "a", "kind": ["A100-40"]}]}),
    ),
    "written to None": ("HP-CLUSTER-TYPE", lambda: CLUSTER.to_file(None)),
    "written nowhere": ("HP-CLUSTER-FILE", lambda: CLUSTER.to_file("none/none/c.toml")),
    "groups None": ("HP-CLUSTER-TYPE", lambda: hp.Cluster(None)),
    "groups by name": ("HP-CLUSTER-TYPE", lambda: hp.Cluster("a")),
    "one group": ("HP-CLUSTER-TYPE", lambda: hp.Cluster(GROUPS[0])),
    "links as a list": ("HP-CLUSTER-TYPE", lambda: hp.Cluster(GROUPS, [LINK])),
    "links None": ("HP-CLUSTER-TYPE", lambda: hp.Cluster(GROUPS, None)),
    "links by sets": ("HP-CLUSTER-VALUE", lambda: hp.Cluster(GROUPS, {frozenset("ab"): LINK})),
    "group None": ("HP-CLUSTER-GROUP", lambda: CLUSTER.group(None)),
    "link by numbers": ("HP-CLUSTER-GROUP", lambda: CLUSTER.link(0, 1)),
    "bound to None": ("HP-CLUSTER-TYPE", lambda: CLUSTER.bind(None)),
    "bound to names": ("HP-CLUSTER-TYPE", lambda: CLUSTER.bind(["x", "y", "z"])),
    "link with units": ("HP-CLUSTER-TYPE", lambda: hp.Link("10 us", "25 GB/s")),
    "kind, capabilities": (
        "HP-CLUSTER-TYPE",
        lambda: hp.DeviceKind("k", {"float32": 1.0}, 1, 1, 3),
    ),
    "kind, link": (
        "HP-CLUSTER-TYPE",
        lambda: hp.DeviceKind("k", {"float32": 1.0}, 1, 1, link=3),
    ),
    "kind, source": (
        "HP-CLUSTER-TYPE",
        lambda: hp.DeviceKind("k", {"float32": 1.0}, 1, 1, source=3),
    ),
    "group, kind by name": ("HP-CLUSTER-TYPE", lambda: hp.DeviceGroup("a", "A100-40", 1, 1)),
    # Plan
    "parse None": ("HP-PLAN-TEXT", _parsed(text=None)),
    "parse for a name": ("HP-PLAN-TYPE", _parsed(cluster="c.toml")),
    "parse for None": ("HP-PLAN-TYPE", _parsed(cluster=None)),
    "parse, layers as text": ("HP-PLAN-TYPE", _parsed(num_layers="2")),
    "parse, layers None": ("HP-PLAN-TYPE", _parsed(num_layers=None)),
    "parse, no layers": ("HP-PLAN-LAYERS", _parsed(num_layers=0)),
    "parse, M as text": ("HP-PLAN", _parsed(num_microbatches="2")),
    "parse, schedule": ("HP-PLAN", _parsed(schedule=3)),
    "plan of nothing": ("HP-PLAN", lambda: hp.Plan([])),
    "plan of a number": ("HP-PLAN", lambda: hp.Plan([3])),
    "load None": ("HP-PLAN-TYPE", lambda: hp.Plan.load(None)),
    "load a number": ("HP-PLAN-TYPE", lambda: hp.Plan.load(3)),
    "JSON None": ("HP-PLAN-TYPE", lambda: hp.Plan.from_json(None)),
    "saved to None": ("HP-PLAN-TYPE", lambda: _planned().plan.save(None)),
    "saved nowhere": ("HP-PLAN-FILE", lambda: _planned().plan.save("none/none/p.json")),
    "facts saved nowhere": ("HP-FACTS-FILE", lambda: _planned().facts.save("none/f.json")),
    "facts of no file": ("HP-FACTS-FILE", lambda: type(_planned().facts).load("none.json")),
    "check None": ("HP-PLAN-TYPE", lambda: _planned().plan.check(None, 2)),
    "check, layers as text": ("HP-PLAN-TYPE", lambda: _planned().plan.check(CLUSTER, "2")),
    # Traced and Planned
    "with_plan None": ("HP-PLAN-TEXT", lambda: _traced().with_plan(None)),
    "with_plan of a planned step": ("HP-PLAN-TEXT", lambda: _traced().with_plan(_planned())),
    "with_plan, M as text": (COUNT, lambda: _traced().with_plan("a: 0-1", num_microbatches="2")),
    "with_plan, M of zero": (COUNT, lambda: _traced().with_plan("a: 0-1", num_microbatches=0)),
    "planned, M as text": (COUNT, lambda: _traced().plan(num_microbatches="2")),
    "planned, M of zero": (COUNT, lambda: _traced().plan(num_microbatches=0)),
    "planned, M as a float": (COUNT, lambda: _traced().plan(num_microbatches=2.0)),
    "on None": ("HP-CLUSTER-TYPE", lambda: _traced().on(None)),
    "on a dict": ("HP-CLUSTER-TYPE", lambda: _traced().on({"a": 2})),
    "plotted as something": ("HP-RUN-PLOT", lambda: _planned().plot_timeline("x.foo")),
    "plotted nowhere": ("HP-RUN-PLOT", lambda: _planned().plot_memory("none/none/x.png")),
    "plotted to a number": ("HP-RUN-PLOT", lambda: _planned().plot_sharding(3)),
    # verify
    "verify None": (FUNCTION, lambda: hp.verify(None, STATE, BATCH)),
    "verify what is compiled, with settings": (
        OPTION,
        lambda: hp.verify(_wrapped(), STATE, BATCH, num_microbatches=4),
    ),
    "tolerance as text": (OPTION, _verified(tolerance="1e-5")),
    "tolerance below zero": (OPTION, _verified(tolerance=-1.0)),
    "tolerance NaN": (OPTION, _verified(tolerance=float("nan"))),
    "kwargs as a list": (OPTION, _verified(kwargs=[1])),
    "verify of shapes": ("HP-RUN-SHAPE", lambda: hp.verify(_step, *_shapes(), cluster=CLUSTER)),
    # calls
    "call without arguments": ("HP-TRACE-CALL", lambda: _wrapped()()),
    "call with one argument of two": ("HP-TRACE-CALL", lambda: _wrapped()(STATE)),
    "call with one too many": ("HP-TRACE-CALL", lambda: _wrapped()(STATE, BATCH, 3.0)),
    "call by another name": ("HP-TRACE-CALL", lambda: _wrapped()(STATE, wrong_name=BATCH)),
    "companion with one too many": (
        "HP-TRACE-CALL",
        lambda: _called().companion(lambda s, b: b)(STATE, BATCH, 3.0),
    ),
    "call with text": ("HP-TRACE-ARGUMENT", lambda: _wrapped()("a", "b")),
    "call with shapes": ("HP-RUN-SHAPE", lambda: _wrapped()(*_shapes())),
    "compiled, without arguments": ("HP-RUN-STRUCTURE", lambda: _compiled()()),
    "compiled, with shapes": ("HP-RUN-SHAPE", lambda: _compiled()(*_shapes())),
    "compiled, with text": ("HP-RUN", lambda: _compiled()({"w1": "x", "w2": 0}, BATCH)),
    "compiled, other rows": ("HP-RUN-SHAPE", lambda: _compiled()(*_arguments(16))),
    "compiled, under jit": ("HP-RUN-TRACED", lambda: jax.jit(_compiled())(STATE, BATCH)),
    "compiled, under grad": (
        "HP-RUN-TRACED",
        lambda: jax.grad(lambda p: _compiled()(p, BATCH)[1])(STATE),
    ),
    "init_state of a number": ("HP-RUN-INIT", lambda: _wrapped().init_state(3, batch=BATCH)),
    "init_state of a state": ("HP-RUN-INIT", lambda: _wrapped().init_state(STATE, batch=BATCH)),
    "init_state that raises": (
        "HP-RUN-INIT",
        lambda: _wrapped().init_state(lambda: 1 / 0, batch=BATCH),
    ),
    "init_state of text": ("HP-RUN-INIT", lambda: _wrapped().init_state(lambda: "x", batch=BATCH)),
    "init_state, arguments left out": (
        "HP-RUN-INIT",
        lambda: _compiled().init_state(lambda key: STATE),
    ),
    "companion None": (FUNCTION, lambda: _called().companion(None)),
    "companion, M as text": (
        COUNT,
        lambda: _called().companion(lambda s, b: b, num_microbatches="2"),
    ),
    "companion, batch by name": (
        "HP-TRACE-ARGNUMS",
        lambda: _called().companion(lambda s, b: b, batch_argnums="b"),
    ),
    "boundary of text": ("HP-TRACE-ARGUMENT", lambda: hp.stage_boundary("x")),
    "boundary with a number": (OPTION, lambda: hp.stage_boundary(jnp.ones(2), name=3)),
    # workers
    "transport": ("HP-RUN-TRANSPORT", lambda: hp.WorkerOptions(transport="udp")),
    "environment": ("HP-RUN-OPTION", lambda: hp.WorkerOptions(environment=["a"])),
    "limits as a number": ("HP-RUN-OPTION", lambda: hp.Workers(limits=3)),
    "address as a number": ("HP-RUN-OPTION", lambda: hp.Workers(address=3)),
    "workers of a dict": ("HP-RUN-OPTION", lambda: hp.Workers(options={})),
    "limits as text": ("HP-RUN-LIMITS", lambda: hp.Limits("x")),
    "limits below zero": ("HP-RUN-LIMITS", lambda: hp.Limits(-1.0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused(name: str) -> None:
    code, call = CALLS[name]
    with pytest.raises(hp.HetpassError) as caught:
        call()
    assert caught.value.code.startswith(code)
    assert caught.value.ways_out
    assert "object at 0x" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((STATE,), {}, "missing a required argument: 'batch'"),
        ((STATE, BATCH, 3.0), {}, "too many positional arguments"),
        ((STATE,), {"wrong_name": BATCH}, "wrong_name"),
    ],
)
def test_a_call_that_does_not_fit_names_the_steps_signature(args, kwargs, said) -> None:
    with pytest.raises(hp.HetpassError) as caught:
        _wrapped()(*args, **kwargs)
    text = str(caught.value)
    assert said in text
    assert f"_step{inspect.signature(_step)}" in text
    assert f"called with {len(args)} argument" in text


def test_what_differs_from_the_compiled_call_has_the_arguments_name() -> None:
    with pytest.raises(ExecutionError) as caught:
        _compiled()(STATE, wrong_name=BATCH)
    assert "compiled for: 2 arguments by position" in str(caught.value)
    assert "called with: 1 argument by position, wrong_name by name" in str(caught.value)
    with pytest.raises(ExecutionError) as caught:
        _compiled()({**STATE, "more": 0.0}, BATCH)
    assert "at ['" + next(iter(inspect.signature(_step).parameters)) + "']:" in str(caught.value)


def test_a_wrapper_with_other_parameters_than_it_says_is_called() -> None:
    @wraps(_step)
    def half(*args):
        return _step(*args, BATCH)

    step = hp.het_parallelize(half, cluster=CLUSTER, batch_argnums=(), num_microbatches=1)
    assert step.trace(STATE).program.name == "_step"


def test_what_a_users_own_function_raised_is_kept() -> None:
    with pytest.raises(ExecutionError) as caught:
        _wrapped().init_state(lambda: 1 / 0, batch=BATCH)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "ZeroDivisionError: division by zero" in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert _wrapped(num_microbatches=np.int64(2)).settings.num_microbatches == 2
    assert hp.Options(accumulate_dtype=jnp.float32).accumulate_dtype == "float32"
    assert hp.Options(accumulate_dtype="bfloat16").accumulate_dtype == "bfloat16"


def test_a_decorator_with_and_without_arguments() -> None:
    plain = hp.het_parallelize(_step)
    other = hp.het_parallelize(num_microbatches=2)(_step)
    assert plain.__name__ == other.__name__ == "_step"
    assert other.settings.num_microbatches == 2
