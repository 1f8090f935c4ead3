"""Whole partitions, run by the interpreter and compared with the step itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpass.errors import PlanError
from hetpass.ir.kinds import Partial
from hetpass.ir.program import FromInput, Staged
from hetpass.ir.verify import verify
from hetpass.transforms.partition import partition
from tests.transforms.build import Example, layered, plan, random_tree
from tests.transforms.interpreter import assert_equal, run

BATCH, WIDTH = 8, 24
X = random_tree((BATCH, WIDTH), 1)
Y = random_tree((BATCH, WIDTH), 2)


def check(
    example: Example, *sizes: int, num_microbatches: int, rtol: float = 1e-5, **decisions: Any
) -> Staged:
    staged = partition(
        layered(example, num_microbatches),
        plan(*sizes, num_microbatches=num_microbatches, **decisions),
    )
    verify(staged)
    expected = jax.tree.leaves(example.reference(example.state, example.batch))
    actual = run(staged, jax.tree.leaves((example.state, example.batch)))
    assert_equal(actual, expected, rtol)
    return staged


def trained(loss, state, batch, num_layers, **rest) -> Example:
    """A step that returns new parameters, the gradients and the (summed) loss."""

    def region(whole, rows, offset):
        value, grads = jax.value_and_grad(loss)(whole["state"], rows, offset)
        return {"loss": value, **{f"d.{k}": g for k, g in grads.items()}}

    def epilogue(state, batch, pro, totals):
        grads = {k: totals[f"d.{k}"] for k in state}
        new = {k: w - 0.1 * grads[k] for k, w in state.items()}
        return new, grads, {"loss": totals["loss"]}

    return Example(state, batch, region, epilogue, num_layers, **rest)


def residual_net(num_layers: int, skips: tuple[tuple[int, int], ...] = ()) -> Example:
    """A chain of layers; a skip (i, j) adds layer i's output to layer j's input."""

    def loss(params, rows, offset):
        h, outs = rows["x"], []
        for k in range(num_layers):
            with jax.named_scope(f"layer{k}"):
                for i, j in skips:
                    if j == k:
                        h = h + outs[i]
                h = jnp.tanh(h @ params[f"w{k}"] + params[f"b{k}"])
                outs.append(h)
                if k == num_layers - 1:
                    return jnp.sum((h - rows["y"]) ** 2) / BATCH

    shapes = {f"w{k}": (WIDTH, WIDTH) for k in range(num_layers)}
    shapes |= {f"b{k}": (WIDTH,) for k in range(num_layers)}
    return trained(loss, random_tree(shapes), {"x": X, "y": Y}, num_layers)


def transfers_by_scope(staged: Staged, scope: str) -> list[tuple[int, int]]:
    slots = staged.slots
    return [
        (slots[t.source].stage, slots[t.target].stage)
        for t in staged.transfers
        if slots[t.source].scope == scope
    ]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 1, 1)])
def test_a_chain_of_layers(sizes, num_microbatches):
    staged = check(residual_net(4), *sizes, num_microbatches=num_microbatches)
    stages = len(sizes)
    assert len(staged.pairs) == 8
    assert transfers_by_scope(staged, "step") == []
    assert sorted(transfers_by_scope(staged, "microbatch")) == sorted(
        [(s, s + 1) for s in range(stages - 1)] + [(s + 1, s) for s in range(stages - 1)]
    )
    assert [f.role for f in staged.fragments].count("epilogue") == stages


@given(st.data())
@settings(max_examples=15)
def test_random_cuts_and_skips(data):
    num_layers = data.draw(st.integers(1, 6))
    pairs = [(i, j) for j in range(num_layers) for i in range(j)]
    skips = tuple(data.draw(st.lists(st.sampled_from(pairs), max_size=3))) if pairs else ()
    cuts = sorted(data.draw(st.sets(st.integers(1, num_layers - 1)))) if num_layers > 1 else []
    edges = [0, *cuts, num_layers]
    sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    check(
        residual_net(num_layers, skips),
        *sizes,
        num_microbatches=data.draw(st.sampled_from([1, 2, 4])),
        rtol=1e-4,
    )


def test_a_skip_is_sent_straight_from_its_producer():
    staged = check(residual_net(3, ((0, 2),)), 1, 1, 1, num_microbatches=2)
    assert (0, 2) in transfers_by_scope(staged, "microbatch")


def tied() -> Example:
    vocabulary = 40

    def loss(params, rows, offset):
        with jax.named_scope("layer0"):
            h = params["emb"][rows["tokens"]]
        with jax.named_scope("layer1"):
            h = jnp.tanh(h @ params["w"])
        with jax.named_scope("layer2"):
            logits = h @ params["emb"].T
            return jnp.sum(jax.nn.logsumexp(logits, -1) - logits[:, 0]) / BATCH

    tokens = jax.random.randint(jax.random.key(0), (BATCH,), 0, vocabulary)
    state = random_tree({"emb": (vocabulary, WIDTH), "w": (WIDTH, WIDTH)})
    return trained(loss, state, {"tokens": tokens}, 3)


@pytest.mark.parametrize("sizes", [(3,), (2, 1), (1, 1, 1)])
def test_tied_parameter_meets_at_its_owner_once_per_step(sizes):
    staged = check(tied(), *sizes, num_microbatches=4)
    if len(sizes) > 1:
        last = len(sizes) - 1
        assert sorted(transfers_by_scope(staged, "step")) == [(0, last), (last, 0)]
        accumulators = [s for s in staged.slots if isinstance(s.kind, Partial)]
        assert all(s.scope == "step" for s in accumulators)
        assert sum(s.aval.shape == (40, WIDTH) for s in accumulators) == 2


def test_mask_from_the_batch_is_made_again_and_not_sent():
    def loss(params, rows, offset):
        h = rows["x"]
        mask = (rows["x"] > 0)[:, :, None] & (rows["x"] > 0)[:, None, :]
        for k in range(3):
            with jax.named_scope(f"layer{k}"):
                scores = jnp.where(mask, (h @ params[f"w{k}"])[:, :, None] * h[:, None, :], 0.0)
                h = jnp.tanh(scores.sum(-1))
        with jax.named_scope("layer2"):
            return jnp.sum(h**2) / BATCH

    state = random_tree({f"w{k}": (WIDTH, WIDTH) for k in range(3)})
    staged = check(trained(loss, state, {"x": X}, 3), 1, 1, 1, num_microbatches=2)
    shapes = {s.aval.shape for s in staged.slots if s.scope == "microbatch"}
    dtypes = {s.aval.dtype.name for s in staged.slots if s.scope == "microbatch"}
    assert "bool" not in dtypes, shapes
    assert sum(s.stacked for s in staged.slots) == 3  # x is fed to every stage


def test_whole_table_from_the_prologue_reaches_every_stage():
    def prologue(state, batch):
        return {"table": jnp.tanh(state["seed"] @ state["seed"].T)}

    def loss(params, rows, offset, table):
        h = rows["x"]
        for k in range(2):
            with jax.named_scope(f"layer{k}"):
                h = jnp.tanh(h @ table) @ params[f"w{k}"]
        with jax.named_scope("layer1"):
            return jnp.sum((h - rows["y"]) ** 2) / BATCH

    def region(whole, rows, offset):
        value, grads = jax.value_and_grad(loss)(whole["state"], rows, offset, whole["table"])
        return {"loss": value, "dw0": grads["w0"], "dw1": grads["w1"]}

    def epilogue(state, batch, pro, totals):
        new = {k: state[k] - 0.1 * totals[f"d{k}"] for k in ("w0", "w1")}
        return {**new, "seed": state["seed"]}, totals["loss"], pro["table"]

    state = random_tree({"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH), "seed": (WIDTH, WIDTH)})
    example = Example(
        state, {"x": X, "y": Y}, region, epilogue, 2, prologue=prologue, whole=("table",)
    )
    staged = check(example, 1, 1, num_microbatches=2)
    assert transfers_by_scope(staged, "step") == [(0, 1)]
    assert FromInput(0) in staged.results


def test_prologue_result_that_is_sliced():
    def prologue(state, batch):
        order = jnp.argsort(batch["x"][:, 0])
        return {"sorted": batch["x"][order], "scale": jnp.sum(jnp.abs(batch["y"]))}

    def loss(params, rows, offset, scale):
        with jax.named_scope("layer0"):
            h = jnp.tanh(rows["sorted"] @ params["w0"])
        with jax.named_scope("layer1"):
            h = h @ params["w1"] + rows["sorted"]
            return jnp.sum((h - rows["y"]) ** 2) / scale

    def region(whole, rows, offset):
        value, grads = jax.value_and_grad(loss)(whole["state"], rows, offset, whole["scale"])
        return {"loss": value, "dw0": grads["w0"], "dw1": grads["w1"]}

    def epilogue(state, batch, pro, totals):
        return {k: state[k] - totals[f"d{k}"] for k in state}, totals["loss"] * pro["scale"]

    state = random_tree({"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH)})
    example = Example(
        state,
        {"x": X, "y": Y},
        region,
        epilogue,
        2,
        prologue=prologue,
        whole=("scale",),
        rows=("sorted",),
    )
    check(example, 1, 1, num_microbatches=4)
    check(example, 2, num_microbatches=2)


def test_metrics_per_example_outputs_and_maxima():
    def region(whole, rows, offset):
        params = whole["state"]
        with jax.named_scope("layer0"):
            h = jnp.tanh(rows["x"] @ params["w0"])
        with jax.named_scope("layer1"):
            logits = h @ params["w1"]
            index = offset + jax.lax.iota(jnp.int32, logits.shape[0])
            return {
                "logits": logits,
                "largest": jnp.max(jnp.abs(logits)),
                "hidden": jnp.sum(h),
                "index": index,
                "weighted": jnp.sum(logits[:, 0] * index),
            }

    def epilogue(state, batch, pro, totals):
        return {**totals, "top": jnp.sort(totals["logits"][:, 0]), "state": state, "seven": 7}

    state = random_tree({"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH)})
    example = Example(
        state,
        {"x": X},
        region,
        epilogue,
        2,
        joined=("logits", "index"),
        ops={"largest": "max"},
    )
    for num_microbatches in (1, 2, 4):
        staged = check(example, 1, 1, num_microbatches=num_microbatches)
        assert "backward" not in {f.role for f in staged.fragments}


def test_labels_are_fed_to_the_last_stage_alone():
    staged = check(residual_net(3), 1, 1, 1, num_microbatches=4)
    leaves = staged.layered.program.traced.inputs
    fed = {leaves[f.input].path: staged.slots[f.slot].stage for f in staged.feeds}
    assert fed["batch['x']"] == 0
    assert fed["batch['y']"] == 2


def test_a_stage_without_gradients_has_no_backward():
    def loss(tail, frozen, rows):
        with jax.named_scope("layer0"):
            h = jnp.tanh(rows["x"] @ frozen["w0"])
        with jax.named_scope("layer1"):
            h = h @ (frozen["w1"] + tail["a"] @ tail["b"])
            return jnp.sum((h - rows["y"]) ** 2) / BATCH

    def region(whole, rows, offset):
        state = whole["state"]
        value, grads = jax.value_and_grad(loss)(state["lora"], state["frozen"], rows)
        return {"loss": value, "da": grads["a"], "db": grads["b"]}

    def epilogue(state, batch, pro, totals):
        lora = {k: state["lora"][k] - totals[f"d{k}"] for k in ("a", "b")}
        return {"lora": lora, "frozen": state["frozen"]}, totals["loss"]

    state = {
        "frozen": random_tree({"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH)}),
        "lora": random_tree({"a": (WIDTH, 2), "b": (2, WIDTH)}),
    }
    staged = check(Example(state, {"x": X, "y": Y}, region, epilogue, 2), 1, 1, num_microbatches=2)
    assert {f.stage for f in staged.fragments if f.role == "backward"} == {1}
    assert transfers_by_scope(staged, "microbatch") == [(0, 1)]
    returned = {r.input for r in staged.results if isinstance(r, FromInput)}
    freed = {s for f in staged.fragments for s in f.frees}
    assert not freed & {f.slot for f in staged.feeds if f.input in returned}


def test_random_bits_are_kept_for_backward_and_drawn_once():
    def loss(params, rows, offset, key):
        with jax.named_scope("layer0"):
            h = rows["x"] @ params["w0"]
            keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, (BATCH, WIDTH))
            keep = jax.lax.dynamic_slice_in_dim(keep, offset, h.shape[0])
            h = jnp.where(keep, h, 0.0)
        with jax.named_scope("layer1"):
            return jnp.sum((h @ params["w1"] - rows["y"]) ** 2) / BATCH

    def region(whole, rows, offset):
        state = dict(whole["state"])
        key = state.pop("key")
        value, grads = jax.value_and_grad(loss)(state, rows, offset, key)
        return {"loss": value, "dw0": grads["w0"], "dw1": grads["w1"]}

    def epilogue(state, batch, pro, totals):
        return {k: state[k] - totals[f"d{k}"] for k in ("w0", "w1")}, totals["loss"]

    state = random_tree({"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH)})
    state["key"] = jnp.asarray([0, 7], jnp.uint32)
    example = Example(state, {"x": X, "y": Y}, region, epilogue, 2)
    staged = check(example, 1, 1, num_microbatches=4)
    draws = [f.role for f in staged.fragments if "random_bits" in str(f.jaxpr)]
    assert draws == ["forward"]


def test_steps_without_a_region():
    def region(whole, rows, offset):
        return {}

    def epilogue(state, batch, pro, totals):
        return {"a": state["a"] * 2 + jnp.sum(batch["x"]), "b": state["b"]}, batch["y"], 3.0

    state = random_tree({"a": (WIDTH, WIDTH), "b": (4,), "unused": (5,)})
    example = Example(state, {"x": X, "y": Y}, region, epilogue, 2)
    staged = check(example, 1, 1, num_microbatches=1)
    assert {f.role for f in staged.fragments} == {"epilogue"}
    fed = {f.input for f in staged.feeds}
    paths = [leaf.path for leaf in staged.layered.program.traced.inputs]
    assert {paths[i] for i in fed} == {"state['a']", "batch['x']"}


def test_dead_code_is_dropped_and_effects_are_kept(capfd):
    def region(whole, rows, offset):
        with jax.named_scope("layer0"):
            h = rows["x"] @ whole["state"]["w0"]
        with jax.named_scope("layer1"):
            return {"used": jnp.sum(h), "dead": jnp.sum(jnp.exp(h @ whole["state"]["w1"]))}

    def epilogue(state, batch, pro, totals):
        jax.debug.print("loss {}", totals["used"] * 0 + 5)
        jnp.sin(totals["dead"])
        return totals["used"]

    state = random_tree({"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH)})
    staged = check(Example(state, {"x": X}, region, epilogue, 2), 1, 1, num_microbatches=2)
    assert "exp" not in "".join(str(f.jaxpr) for f in staged.fragments)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("loss 5.0") == 2  # the reference, and the interpreter


@pytest.mark.parametrize(
    ("sizes", "num_microbatches", "code"),
    [
        ((1, 1), 2, "HP-PLAN-LAYERS"),
        ((2, 2), 2, "HP-PLAN-LAYERS"),
        ((1, 2), 4, "HP-PLAN-MICROBATCHES"),
    ],
)
def test_plans_that_do_not_fit_are_refused(sizes, num_microbatches, code):
    with pytest.raises(PlanError) as caught:
        partition(layered(residual_net(3), 2), plan(*sizes, num_microbatches=num_microbatches))
    assert caught.value.code == code


def test_the_same_partition_every_time():
    def text() -> str:
        staged = partition(
            layered(residual_net(3, ((0, 2),)), 2), plan(1, 1, 1, num_microbatches=2)
        )
        slots = [(s.stage, s.scope, s.name, str(s.kind)) for s in staged.slots]
        return str(slots) + "".join(str(f.jaxpr) + str(f.inputs) for f in staged.fragments)

    assert text() == text()
