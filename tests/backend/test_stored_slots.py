"""What a microbatch's forward keeps for its backward is stored as the compiler made it."""

from __future__ import annotations

import gc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp
from tests.equality import assert_equal

BATCH, LAYERS = 16, 4


def step(params, batch):
    def loss_of(params):
        h = batch
        for up, down in params:
            h = h + jnp.tanh(h @ up) @ down
        return (h**2).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, grads


def arguments(width: int, inner: int):
    rng = np.random.default_rng(0)
    shapes = [(width, inner), (inner, width)] * LAYERS
    leaves = [np.float32(0.3) * rng.standard_normal(s, np.float32) for s in shapes]
    return list(zip(leaves[::2], leaves[1::2], strict=True)), rng.standard_normal(
        (BATCH, width), np.float32
    )


def compiled(plan: str, params, batch) -> hp.Compiled:
    cluster = hp.Cluster.emulated({"a": 4, "b": 4})
    parallel = hp.het_parallelize(step, cluster=cluster, num_microbatches=4, donate_argnums=())
    return parallel.trace(params, batch).with_plan(plan).compile()


def kept(step: hp.Compiled, stage: int):
    """(Stored shape, sharding) of what the stage's forward hands its backward."""
    built = step.runtime.compiled
    roles = {
        role: {
            slot
            for e in built.executables
            if (e.program.stage, e.program.role) == (stage, role)
            for slot in (e.program.results if role == "forward" else e.program.arguments)
        }
        for role in ("forward", "backward")
    }
    slots = [s for s in roles["forward"] & roles["backward"] if not built.staged.slots[s].stacked]
    return [
        (built.avals[s].shape, built.shardings[s])
        for s in slots
        if built.staged.slots[s].scope == "microbatch"
    ]


# Tensor parallelism alone, beside data parallelism, and with widths that nothing divides.
@pytest.mark.parametrize(
    ("mesh", "width", "inner"),
    [("(data=2,model=2)", 16, 64), ("(model=4)", 16, 64), ("(data=2,model=2)", 15, 21)],
)
def test_what_is_kept_is_cut_and_the_numbers_are_those_of_jit(mesh, width, inner):
    params, batch = arguments(width, inner)
    ours = compiled(f"a[0-3]{mesh}: 0-3 | b: 4-5", params, batch)
    of_first = kept(ours, 0)
    assert any(shape == (BATCH // 4, inner) for shape, _ in of_first)
    for shape, sharding in of_first:
        if shape == (BATCH // 4, inner):
            spec = sharding.spec
            assert ("data" in mesh) == (spec[0] == "data")
            assert ("model" in jax.tree.leaves(tuple(spec[1:]))) == (inner % 2 == 0)
    assert_equal(ours(params, batch), jax.jit(step)(params, batch))


def test_what_the_plan_names_is_stored_as_it_says():
    params, batch = arguments(16, 64)
    plan = "a[0-3](data=2,model=2): 0-3 | b: 4-5"
    built = compiled(plan, params, batch).runtime.compiled
    slot = next(
        s
        for s in built.staged.slots
        if s.stage == 0 and s.scope == "microbatch" and s.aval.shape == (BATCH // 4, 64)
    )
    traced = hp.het_parallelize(
        step, cluster=hp.Cluster.emulated({"a": 4, "b": 4}), num_microbatches=4, donate_argnums=()
    ).trace(params, batch)
    planned = traced.with_plan(plan)
    (pipeline,) = planned.plan.pipelines
    first = replace(pipeline.stages[0], shardings={slot.name: (("data",), ())})
    chosen = replace(pipeline, stages=(first, *pipeline.stages[1:]))
    whole = traced.with_plan(replace(planned.plan, pipelines=(chosen,))).compile().runtime.compiled
    assert "model" not in str(whole.shardings[slot.index].spec)


def test_executables_go_with_their_step():
    """JAX's caches keep none: a process that compiles step after step would run out of mappings."""
    client = jax.devices()[0].client

    def once(number: int) -> int:
        inner = 64 + 4 * number  # another program each time
        compiled("a(data=2,model=2): 0-3 | b: 4-5", *arguments(16, inner))
        gc.collect()
        return len(client.live_executables())

    once(0)
    assert once(1) == once(2) == once(3)
