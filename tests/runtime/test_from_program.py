"""From an unmodified step to its results: what partition makes is what the runtime runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetpass.backend.compile import compile
from hetpass.backend.report import report
from hetpass.frontend.microbatch import split
from hetpass.frontend.segment import segment
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.runtime.local import LocalRuntime
from hetpass.schedules.make import make_schedule
from hetpass.transforms.partition import partition
from tests.backend.handmade import devices_of
from tests.equality import differences

B, T, H, V = 8, 3, 8, 11


def step(state, batch):
    """A tied embedding, dropout, a masked mean; gradients come back beside the new state."""
    params, key = state["params"], state["key"]

    def loss_of(p):
        x = p["table"][batch["tokens"]]
        for number, w in enumerate(p["layers"]):
            x = x + jnp.tanh(x @ w)
            keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape)
            x = jnp.where(keep, x / 0.8, 0)
        logits = jax.nn.log_softmax(x @ p["table"].T)
        losses = -jnp.take_along_axis(logits, batch["tokens"][..., None], -1)[..., 0]
        return (losses * batch["mask"]).sum() / batch["mask"].sum(), losses.max()

    (loss, worst), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    state = {"params": params, "key": jax.random.fold_in(key, 1), "step": state["step"] + 1}
    return state, {"loss": loss, "worst": worst, "grads": grads}


def arguments():
    draw = np.random.default_rng(0)
    layers = [jnp.asarray(draw.normal(size=(H, H)) * 0.3, jnp.float32) for _ in range(4)]
    table = jnp.asarray(draw.normal(size=(V, H)), jnp.float32)
    state = {"params": {"table": table, "layers": layers}, "key": jax.random.key(1), "step": 0}
    mask = jnp.asarray(np.arange(T) < draw.integers(0, T + 1, B)[:, None], jnp.float32)
    return state, {"tokens": jnp.asarray(draw.integers(0, V, (B, T)), jnp.int32), "mask": mask}


def compiled(microbatches, *meshes, donated=(0,)):
    state, batch = arguments()
    signature = Signature(batch_argnums=(1,), donate_argnums=donated)
    traced = trace(step, (state, batch), {}, signature)
    layered = segment(split(traced, microbatches))
    count, stages = len(meshes), []
    ends = [i * layered.num_layers // count for i in range(count + 1)]
    for number, mesh in enumerate(meshes):
        size = int(np.prod([n for _, n in mesh], dtype=int))
        place = Replica(f"g{number}", tuple(range(size)), mesh)
        stages.append(StagePlan(ends[number], ends[number + 1] - 1, (place,)))
    plan = Plan((Pipeline(tuple(stages), microbatches),))
    schedule = make_schedule("1f1b", num_stages=count, num_microbatches=microbatches)
    return traced, compile(partition(layered, plan), plan, devices_of(plan), schedule)


@pytest.mark.parametrize(
    ("microbatches", "meshes"),
    [
        (1, ((), ())),
        (2, ((("data", 2),), (("data", 4),))),
        (4, ((("model", 2),), (("data", 2), ("model", 2)))),
        (2, ((), (("data", 2),), (("model", 2),))),
    ],
)
def test_three_steps_equal_jit(microbatches, meshes):
    traced, parts = compiled(microbatches, *meshes)
    runtime = LocalRuntime(parts)
    state, batch = arguments()
    reference = jax.jit(step)
    expected_state, _ = arguments()
    for _ in range(3):
        leaves = runtime(jax.tree.leaves((state, batch)))
        state, outputs = jax.tree.unflatten(traced.out_tree, leaves)
        expected_state, expected = reference(expected_state, batch)
        assert not differences((state, outputs), (expected_state, expected))


def test_data_parallel_microbatches_reduce_nothing():
    _, parts = compiled(2, (("data", 2),), (("data", 4),))
    for fragment in report(parts):
        if fragment.role in ("forward", "backward"):
            assert not fragment.collectives, str(fragment)
