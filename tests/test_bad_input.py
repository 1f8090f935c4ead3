"""Bad input of every sort: refused with code, place, numbers and a way out, before any compile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hetpass as hp
from hetpass import pipeline
from hetpass.ir.plan import Pipeline, Replica, StagePlan

BAD: dict[str, tuple[str, Callable[[Path], Any]]] = {}


def bad(code: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        BAD[function.__name__] = (code, function)
        return function

    return register


# ---------------------------------------------------------------------------------------------
# Cluster files

GROUP = '[[groups]]\nname = "a"\nkind = "A100-40"\n'
OTHER = '[[groups]]\nname = "b"\nkind = "A100-40"\n'
KIND = '[kinds.k]\npeak_flops = { float32 = "1 TFLOP/s" }\nmemory = "1 GiB"\n'
LINK = '[[links]]\nbetween = ["a", "b"]\nlatency = "1 us"\nbandwidth = "1 GB/s"\n'

FILES = {
    "unknown_key": GROUP + "speed = 3\n",
    "unknown_table": GROUP + "[servers]\n",
    "duplicate_group": GROUP + GROUP,
    "negative_bandwidth": GROUP + OTHER + LINK.replace("1 GB/s", "-1 GB/s"),
    "bandwidth_that_is_no_number": GROUP + OTHER + LINK.replace('"1 GB/s"', "nan"),
    "infinite_latency": GROUP + OTHER + LINK.replace('"1 us"', "inf"),
    "bandwidth_in_seconds": GROUP + OTHER + LINK.replace("1 GB/s", "1 s"),
    "unit_that_is_unknown": GROUP + OTHER + LINK.replace("1 GB/s", "1 parsec"),
    "zero_devices": GROUP + "devices_per_host = 0\n",
    "half_a_device": GROUP + "devices_per_host = 1.5\n",
    "true_hosts": GROUP + "hosts = true\n",
    "missing_link": GROUP + OTHER,
    "link_to_nowhere": GROUP + LINK.replace('"b"', '"c"'),
    "link_to_itself": GROUP + LINK.replace('"b"', '"a"'),
    "link_twice": GROUP + OTHER + LINK + LINK,
    "link_of_three": GROUP + OTHER + LINK.replace('"b"]', '"b", "a"]'),
    "unknown_kind": GROUP.replace("A100-40", "A1OO-40"),
    "kind_without_memory": GROUP + KIND.replace('memory = "1 GiB"\n', ""),
    "kind_without_peak": GROUP + KIND.replace('{ float32 = "1 TFLOP/s" }', "{}"),
    "unknown_dtype": GROUP + KIND.replace("float32", "float33"),
    "group_without_name": '[[groups]]\nkind = "A100-40"\n',
    "empty_name": GROUP.replace('"a"', '""'),
    "no_groups": "groups = []\n",
    "empty_file": "",
    "not_toml": "groups = [[[",
    "too_deep": "x = " + "[" * 60 + "]" * 60 + "\n",
}


def _file(text: str) -> Callable[[Path], Any]:
    def read(tmp: Path) -> Any:
        path = tmp / "cluster.toml"
        path.write_text(text)
        return hp.Cluster.from_file(path)

    return read


for _name, _text in FILES.items():
    BAD[f"cluster_{_name}"] = ("HP-CLUSTER", _file(_text))


@bad("HP-CLUSTER")
def cluster_file_that_is_not_there(tmp: Path) -> Any:
    return hp.Cluster.from_file(tmp / "none.toml")


@bad("HP-CLUSTER")
def cluster_file_of_an_unknown_sort(tmp: Path) -> Any:
    (tmp / "cluster.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    return hp.Cluster.from_file(tmp / "cluster.pkl")


@bad("HP-CLUSTER")
def cluster_file_in_yaml_with_a_tag(tmp: Path) -> Any:
    (tmp / "cluster.yaml").write_text("groups: !!python/object/apply:os.system ['false']\n")
    return hp.Cluster.from_file(tmp / "cluster.yaml")


@bad("HP-CLUSTER")
def cluster_file_that_is_huge(tmp: Path) -> Any:
    (tmp / "c.toml").write_text(GROUP + "#" * (5 << 20))
    return hp.Cluster.from_file(tmp / "c.toml")


@bad("HP-CLUSTER")
def cluster_of_more_devices_than_there_are(tmp: Path) -> Any:
    step = hp.het_parallelize(_step, cluster=hp.Cluster.emulated({"a": 64, "b": 64}))
    return step(*_arguments())


# ---------------------------------------------------------------------------------------------
# Plans

CLUSTER = hp.Cluster.emulated({"a": 2, "b": 1})


def _step(params: Any, batch: Any) -> Any:
    def loss_fn(p: Any) -> Any:
        h = jnp.tanh(batch["x"] @ p["w1"])
        return ((jnp.tanh(h @ p["w2"]) - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def _arguments(rows: int = 8) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    params = {k: draw.normal(size=(4, 4)).astype(np.float32) for k in ("w1", "w2")}
    return params, {k: draw.normal(size=(rows, 4)).astype(np.float32) for k in ("x", "y")}


def _traced(num_microbatches: int = 4, **settings: Any) -> Any:
    step = hp.het_parallelize(_step, cluster=CLUSTER, num_microbatches=num_microbatches, **settings)
    return step.trace(*_arguments())


TEXTS = {
    "of_nonsense": "???",
    "that_is_empty": "",
    "without_layers": "a: ",
    "with_an_unknown_group": "c: 0-1",
    "with_too_many_devices": "a[3]: 0-1",
    "with_a_mesh_that_does_not_fit": "a[2](data=3): 0-1",
    "with_an_axis_twice": "a[2](data=1,data=2): 0-1",
    "with_layers_backwards": "a: 1-0",
    "with_layers_that_are_not_there": "a: 0-99",
    "that_skips_a_layer": "a: 0 | b: 2-99",
    "that_gives_a_layer_twice": "a: 0-1 | b: 1-99",
    "with_a_device_twice": "a[0,0]: 0-1",
    "with_a_negative_layer": "a: -1",
    "with_markup": "<script>alert(1)</script>: 0",
}
for _name, _text in TEXTS.items():
    BAD[f"plan_{_name}"] = ("HP-PLAN", lambda tmp, text=_text: _traced().with_plan(text))


def _plan(**changes: Any) -> Any:
    return replace(_traced().plan().plan, **changes)


@bad("HP-PLAN-FINGERPRINT")
def plan_for_another_program(tmp: Path) -> Any:
    return _traced().with_plan(_plan(fingerprint="0" * 16))


@bad("HP-PLAN")
def plan_for_another_cluster(tmp: Path) -> Any:
    step = hp.het_parallelize(_step, cluster=hp.Cluster.emulated({"x": 3}), num_microbatches=4)
    return step.trace(*_arguments()).with_plan(_plan())


@bad("HP-PLAN")
def plan_for_fewer_layers(tmp: Path) -> Any:
    stage = StagePlan(0, 0, (Replica("a", (0,), (("data", 1),)),))
    return _traced().with_plan(_plan(pipelines=(Pipeline((stage,), 4),)))


@bad("HP-")
def plan_with_an_unknown_schedule(tmp: Path) -> Any:
    return _traced(schedule="fastest").plan().compile()


def _edited(edit: Callable[[Any], Any]) -> Callable[[Path], Any]:
    def load(tmp: Path) -> Any:
        data = json.loads(_plan().to_json())
        edit(data)
        (tmp / "plan.json").write_text(json.dumps(data))
        return hp.Plan.load(tmp / "plan.json")

    return load


EDITS: dict[str, Callable[[Any], Any]] = {
    "an_unknown_key": lambda d: d.update(speed=1),
    "no_pipelines": lambda d: d.update(pipelines=[]),
    "another_version": lambda d: d.update(version=999),
    "pipelines_that_are_text": lambda d: d.update(pipelines="all"),
    "zero_microbatches": lambda d: d["pipelines"][0].update(num_microbatches=0),
    "half_a_microbatch": lambda d: d["pipelines"][0].update(num_microbatches=0.5),
    "no_stages": lambda d: d["pipelines"][0].update(stages=[]),
    "a_stage_without_devices": lambda d: d["pipelines"][0]["stages"][0].update(replicas=[]),
    "a_stage_that_is_null": lambda d: d["pipelines"][0].update(stages=[None]),
}
for _name, _edit in EDITS.items():
    BAD[f"plan_file_with_{_name}"] = ("HP-PLAN", _edited(_edit))


@bad("HP-PLAN")
def plan_file_that_is_not_json(tmp: Path) -> Any:
    (tmp / "plan.json").write_text("{")
    return hp.Plan.load(tmp / "plan.json")


@bad("HP-PLAN")
def plan_file_with_a_key_twice(tmp: Path) -> Any:
    (tmp / "plan.json").write_text('{"pipelines": [], "pipelines": []}')
    return hp.Plan.load(tmp / "plan.json")


# ---------------------------------------------------------------------------------------------
# Calls and options


@bad("HP-SPLIT-DIVIDE")
def microbatches_that_do_not_divide(tmp: Path) -> Any:
    return _traced(3).plan()


@bad("HP-SPLIT-DIVIDE")
def more_microbatches_than_examples(tmp: Path) -> Any:
    return _traced(16).plan()


for _value in (0, -1, 2.0, True, "many", None):
    BAD[f"microbatches_{_value}"] = (
        "HP-PLAN-MICROBATCHES",
        lambda tmp, value=_value: hp.het_parallelize(_step, num_microbatches=value),
    )
for _value in (-1, (0, -1), (True,)):
    BAD[f"batch_argnums_{_value}"] = (
        "HP-TRACE-ARGNUMS",
        lambda tmp, value=_value: hp.het_parallelize(_step, batch_argnums=value),
    )


for _name, _value in (("plan", {}), ("options", {"sharding": "solved"})):
    BAD[f"{_name}_that_is_a_dict"] = (
        "HP-TRACE-OPTION",
        lambda tmp, name=_name, value=_value: hp.het_parallelize(_step, **{name: value}),
    )


def _without_compiling(tmp: Any) -> Any:
    with jax.disable_jit():
        return hp.het_parallelize(_step, cluster=CLUSTER)(*_arguments())


BAD["compiling_switched_off"] = ("HP-TRACE-DISABLED", _without_compiling)
BAD["donate_argnums_that_are_none"] = (
    "HP-TRACE-ARGNUMS",
    lambda tmp: hp.het_parallelize(_step, donate_argnums=None),  # type: ignore[arg-type]
)
for _value in (None, 3, [("a", 2)], {1: 2}):
    BAD[f"emulated_{_value}"] = (
        "HP-CLUSTER-TYPE",
        lambda tmp, value=_value: hp.Cluster.emulated(value),
    )


@bad("HP-PLAN-AXIS")
def mesh_axis_along_which_nothing_is_cut(tmp: Path) -> Any:
    traced = _traced()
    first = next(iter(CLUSTER.groups)).name
    last = traced.plan().num_layers - 1
    return traced.with_plan(f"{first}[2](dat=2): 0-{last}")


@bad("HP-TRACE-FUNCTION")
def not_a_function(tmp: Path) -> Any:
    return hp.het_parallelize(3)


@bad("HP-TRACE-OPTION")
def option_that_is_unknown(tmp: Path) -> Any:
    return hp.Options(batch_statistics="fast")  # type: ignore[arg-type]


@bad("HP-TRACE-BATCH-AXIS")
def batch_axis_that_is_not_there(tmp: Path) -> Any:
    return _traced(options=hp.Options(batch_axes={"batch['z']": 0}))


@bad("HP-TRACE-BATCH-AXIS")
def batch_axis_beyond_the_rank(tmp: Path) -> Any:
    return _traced(options=hp.Options(batch_axes={"batch['x']": 5}))


def _call(batch: Any, step: Any = _step) -> Any:
    parallel = hp.het_parallelize(step, cluster=CLUSTER, num_microbatches=4)
    return parallel(_arguments()[0], batch)


@bad("HP-TRACE-BATCH-SIZE")
def arrays_of_unequal_length(tmp: Path) -> Any:
    batch = _arguments()[1]
    return _call(batch | {"y": batch["y"][:6]})


@bad("HP-TRACE-BATCH-SIZE")
def an_empty_batch(tmp: Path) -> Any:
    return _call(_arguments(0)[1])


@bad("HP-TRACE-ARGUMENT")
def text_in_the_batch(tmp: Path) -> Any:
    return _call(_arguments()[1] | {"name": "train"})


@bad("HP-TRACE-ARGUMENT")
def an_object_in_the_batch(tmp: Path) -> Any:
    return _call(_arguments()[1] | {"thing": object()})


@bad("HP-TRACE-ARGUMENT")
def objects_in_an_array_of_the_batch(tmp: Path) -> Any:
    return _call(_arguments()[1] | {"things": np.array([object()] * 8)})


@bad("HP-TRACE-ARGUMENT")
def a_masked_array(tmp: Path) -> Any:
    return _call(_arguments()[1] | {"x": np.ma.masked_array(_arguments()[1]["x"])})


@bad("HP-TRACE-ARGUMENT")
def an_integer_that_is_too_large(tmp: Path) -> Any:
    return _call(_arguments()[1] | {"seed": 2**40})


@bad("HP-TRACE-BATCH-AXIS")
def batch_axis_that_is_no_dimension(tmp: Path) -> Any:
    return _traced(options=hp.Options(batch_axes={"batch['x']": True}))


@bad("HP-TRACE-CALL")
def a_method_without_its_object(tmp: Path) -> Any:
    class Trainer:
        @hp.het_parallelize(cluster=CLUSTER, num_microbatches=4)
        def step(self, params: Any, batch: Any) -> Any:
            return _step(params, batch)

    return Trainer().step(*_arguments())


@bad("HP-TRACE-STATIC")
def a_static_argument_that_cannot_be_hashed(tmp: Path) -> Any:
    step = hp.het_parallelize(lambda s, b, c: _step(s, b), static_argnums=2)
    return step(*_arguments(), [1, 2])


# ---------------------------------------------------------------------------------------------
# Steps


def _of(step: Callable[..., Any]) -> Callable[[Path], Any]:
    return lambda tmp: _call(_arguments()[1], step)


def _returns_a_shape(params: Any, batch: Any) -> Any:
    return _step(params, batch), jax.ShapeDtypeStruct((2,), jnp.float32)


def _branches(params: Any, batch: Any) -> Any:
    return params if batch["x"].sum() > 0 else batch


def _bad_shapes(params: Any, batch: Any) -> Any:
    return batch["x"] @ params["w1"][:3]


def _raises(params: Any, batch: Any) -> Any:
    raise RuntimeError("the user's own")


def _missing_key(params: Any, batch: Any) -> Any:
    return batch["tokens"]


def _no_arrays(params: Any, batch: Any) -> Any:
    return {"name": "step", "loss": batch["x"].sum()}


def _numpy(params: Any, batch: Any) -> Any:
    return np.tanh(np.asarray(batch["x"])).sum()


def _integer_gradient(params: Any, batch: Any) -> Any:
    return jax.grad(lambda p: p["w1"].sum())(jax.tree.map(lambda p: p.astype(jnp.int32), params))


def _gradient_of_a_vector(params: Any, batch: Any) -> Any:
    return jax.grad(lambda p: batch["x"] @ p["w1"])(params)


def _hard_coded(params: Any, batch: Any) -> Any:
    return _step(params, {k: v.reshape(8, 4) * 1 for k, v in batch.items()})


def _another_program_at_another_size(params: Any, batch: Any) -> Any:
    x = jnp.sin(batch["x"]) if batch["x"].shape[0] > 8 else batch["x"]
    return _step(params, batch | {"x": x})


def _batch_norm(params: Any, batch: Any) -> Any:
    def loss_fn(p: Any) -> Any:
        h = batch["x"] @ p["w1"]
        return ((((h - h.mean(0)) / (h.std(0) + 1)) @ p["w2"] - batch["y"]) ** 2).mean()

    return jax.grad(loss_fn)(params)


def _contrastive(params: Any, batch: Any) -> Any:
    def loss_fn(p: Any) -> Any:
        h = batch["x"] @ p["w1"]
        return jax.nn.logsumexp(h @ h.T, axis=1).mean()

    return jax.grad(loss_fn)(params)


def _sorted(params: Any, batch: Any) -> Any:
    return jax.grad(lambda p: (jnp.sort(batch["x"] @ p["w1"], 0) @ p["w2"]).std())(params)


def _loop_steered_by_the_batch(params: Any, batch: Any) -> Any:
    def loss_fn(p: Any) -> Any:
        h = lax.stop_gradient(batch["x"] @ p["w1"])
        h = lax.while_loop(lambda h: h.sum() < 100, lambda h: h + 1, h)
        return ((h @ p["w2"]) ** 2).mean()

    return jax.grad(loss_fn)(params)


def _callback_on_the_batch(params: Any, batch: Any) -> Any:
    def loss_fn(p: Any) -> Any:
        h = lax.stop_gradient(batch["x"] @ p["w1"])
        h = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), h)
        return ((h @ p["w2"]) ** 2).mean()

    return jax.grad(loss_fn)(params)


STEPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "python_branch": ("HP-TRACE-STEP", _branches),
    "shapes_that_do_not_fit": ("HP-TRACE-STEP", _bad_shapes),
    "that_raises": ("HP-TRACE-STEP", _raises),
    "that_misses_a_key": ("HP-TRACE-STEP", _missing_key),
    "that_returns_text": ("HP-TRACE-STEP", _no_arrays),
    "that_returns_a_shape": ("HP-TRACE-STEP", _returns_a_shape),
    "in_numpy": ("HP-TRACE-STEP", _numpy),
    "gradient_of_integers": ("HP-TRACE-STEP", _integer_gradient),
    "gradient_of_a_vector": ("HP-TRACE-STEP", _gradient_of_a_vector),
    "hard_coded_batch_size": ("HP-SPLIT-PROBE", _hard_coded),
    "that_changes_with_the_size": ("HP-SPLIT-PROBE", _another_program_at_another_size),
    "batch_norm": ("HP-SPLIT-MIXES", _batch_norm),
    "contrastive_loss": ("HP-SPLIT-MIXES", _contrastive),
    "sorted_batch": ("HP-SPLIT-MIXES", _sorted),
    "loop_steered_by_the_batch": ("HP-SPLIT-MIXES", _loop_steered_by_the_batch),
    "callback_on_the_batch": ("HP-SPLIT-MIXES", _callback_on_the_batch),
}
for _name, (_code, _function) in STEPS.items():
    BAD[f"step_{_name}"] = (_code, _of(_function))


# ---------------------------------------------------------------------------------------------


def test_there_are_many() -> None:
    assert len(BAD) >= 60


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was compiled before the refusal")

    monkeypatch.setattr(pipeline, "compile", compiled)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    code, act = BAD[name]
    with pytest.raises(hp.HetpassError) as caught:
        act(tmp_path)
    refusal = caught.value
    text = str(refusal)
    assert refusal.code.startswith(code), text
    assert refusal.what
    assert refusal.where or refusal.details, f"no place and no numbers:\n{text}"
    assert refusal.ways_out, f"no way out:\n{text}"
    if name.startswith("step_"):
        assert "test_bad_input.py:" in text, f"the user's line is not named:\n{text}"


def test_what_is_no_array_is_named() -> None:
    with pytest.raises(hp.HetpassError) as caught:
        objects_in_an_array_of_the_batch(Path())
    assert caught.value.where == "batch['things']"


# ---------------------------------------------------------------------------------------------
# Calls of a compiled step


@pytest.fixture(scope="module")
def compiled() -> Any:
    step = hp.het_parallelize(_step, cluster=hp.Cluster.emulated({"a": 1}), num_microbatches=2)
    return step.trace(*_arguments()).plan().compile()


def _with(**entries: Any) -> Any:
    params, batch = _arguments()
    return params, batch | entries


CALLS: dict[str, Callable[[], Any]] = {
    "another_number_of_examples": lambda: _arguments(4),
    "another_dtype": lambda: _with(x=np.zeros((8, 4), np.float16)),
    "another_shape": lambda: _with(x=np.zeros((8, 5), np.float32)),
    "one_entry_more": lambda: _with(z=np.zeros((8, 4), np.float32)),
    "an_argument_less": lambda: _arguments()[:1],
    "a_list_for_a_dict": lambda: (list(_arguments()[0].values()), _arguments()[1]),
    "text_for_an_array": lambda: _with(x="text"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_fit(name: str, compiled: Any) -> None:
    with pytest.raises(hp.HetpassError, match=r"HP-(RUN|TRACE)") as caught:
        compiled(*CALLS[name]())
    assert caught.value.ways_out
    assert caught.value.where or caught.value.details


def test_an_array_given_away_twice(compiled: Any) -> None:
    params, batch = _arguments()
    same = jnp.asarray(params["w1"])
    with pytest.raises(hp.HetpassError, match="HP-RUN-ALIASED") as caught:
        compiled({"w1": same, "w2": same}, batch)
    assert "w1" in str(caught.value)
    assert "w2" in str(caught.value)
