"""Recomputation per stage: the same numbers, and only the stage's inputs are held."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hetpass.ir.program import Staged
from tests.transforms.build import Example, random_tree
from tests.transforms.test_partition import BATCH, WIDTH, X, Y, check, residual_net, trained


def written(staged: Staged, stage: int) -> Any:
    """Shapes of what the forward fragment of a stage leaves for others, per microbatch."""
    (forward,) = (f for f in staged.fragments if (f.role, f.stage) == ("forward", stage))
    slots = [staged.slots[o.slot] for o in forward.outputs]
    shapes = [s.aval.shape for s in slots if s.scope == "microbatch"]
    return set(shapes) if len(set(shapes)) == len(shapes) else shapes


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_forward_part_leaves_only_its_results(schedule):
    kept = check(residual_net(6), 3, 3, num_microbatches=2)
    again = check(residual_net(6), 3, 3, num_microbatches=2, schedule=schedule, recomputed=(0, 1))
    assert len(written(kept, 0)) > 3
    assert written(again, 0) == {(BATCH // 2, WIDTH)}  # what stage 1 reads
    assert written(again, 1) == set()
    backward = "".join(str(f.jaxpr) for f in again.fragments if f.role == "backward")
    assert backward.count("tanh") == 6


def test_one_stage_alone():
    staged = check(residual_net(4), 2, 2, num_microbatches=2, recomputed=(0,))
    text = {f.stage: str(f.jaxpr) for f in staged.fragments if f.role == "backward"}
    assert "tanh" in text[0]
    assert "tanh" not in text[1]


def dropout() -> Example:
    def loss(params, rows, offset, key):
        h = rows["x"]
        for k in range(4):
            with jax.named_scope(f"layer{k}"):
                h = jnp.tanh(h @ params[f"w{k}"])
                drawn = jax.random.fold_in(jax.random.wrap_key_data(key), k)
                keep = jax.random.bernoulli(drawn, 0.5, (BATCH, WIDTH))
                keep = jax.lax.dynamic_slice_in_dim(keep, offset, h.shape[0])
                h = jnp.where(keep, h, 0.0)
        with jax.named_scope("layer3"):
            return jnp.sum((h - rows["y"]) ** 2) / BATCH

    def region(whole, rows, offset):
        state = dict(whole["state"])
        key = state.pop("key")
        value, grads = jax.value_and_grad(loss)(state, rows, offset, key)
        return {"loss": value, **{f"d{k}": g for k, g in grads.items()}}

    def epilogue(state, batch, pro, totals):
        return {k: w - 0.1 * totals[f"d{k}"] for k, w in state.items() if k != "key"}, totals

    state = random_tree({f"w{k}": (WIDTH, WIDTH) for k in range(4)})
    state["key"] = jnp.asarray([0, 7], jnp.uint32)
    return Example(state, {"x": X, "y": Y}, region, epilogue, 4)


def test_random_masks_are_drawn_again_and_equal():
    staged = check(dropout(), 2, 2, num_microbatches=4, recomputed=(0, 1))
    draws = {(f.role, f.stage) for f in staged.fragments if "random_bits" in str(f.jaxpr)}
    assert ("backward", 0) in draws
    assert ("forward", 0) in draws


def test_what_prints_is_not_run_again():
    def loss(params, rows, offset):
        h = rows["x"]
        for k in range(2):
            with jax.named_scope(f"layer{k}"):
                h = jnp.tanh(h @ params[f"w{k}"])
        jax.debug.print("seen")
        with jax.named_scope("layer1"):
            return jnp.sum((h - rows["y"]) ** 2) / BATCH

    state = random_tree({f"w{k}": (WIDTH, WIDTH) for k in range(2)})
    example = trained(loss, state, {"x": X, "y": Y}, 2)
    staged = check(example, 1, 1, num_microbatches=2, recomputed=(0, 1))
    printing = [f.role for f in staged.fragments if "debug" in str(f.jaxpr)]
    assert printing == ["forward"]


def fence(eqns: list[Any]) -> tuple[int, list[str]]:
    """Where the fence stands that waits for something made before; and all primitives."""
    names = [eqn.primitive.name for eqn in eqns]
    (at,) = (
        i
        for i, eqn in enumerate(eqns)
        if eqn.primitive.name == "optimization_barrier"
        and {v for e in eqns[:i] for v in e.outvars} & set(eqn.invars)
    )
    return at, names


def test_blocks_that_the_model_recomputes_itself_wait_for_their_turn():
    """Whether the stage recomputes or not: block 0 is computed after the gradient that block 1 has
    made. On a recomputed stage the backward part computes it once more, for block 1."""

    def loss(params, rows, offset):
        h = rows["x"]
        for k in range(4):
            with jax.named_scope(f"layer{k}"):
                h = jax.checkpoint(lambda h, w: jnp.sin(jnp.tanh(h @ w) @ w))(h, params[f"w{k}"])
        with jax.named_scope("layer3"):
            return jnp.sum((h - rows["y"]) ** 2) / BATCH

    state = random_tree({f"w{k}": (WIDTH, WIDTH) for k in range(4)})
    example = trained(loss, state, {"x": X, "y": Y}, 4)
    staged = check(example, 2, 2, num_microbatches=2, recomputed=(0,))
    backward = {f.stage: f.jaxpr.eqns for f in staged.fragments if f.role == "backward"}
    at, names = fence(backward[0])
    assert names.count("tanh") == 3
    assert names[:at].count("tanh") == 2
    kept = check(example, 2, 2, num_microbatches=2)
    backward = {f.stage: f.jaxpr.eqns for f in kept.fragments if f.role == "backward"}
    for stage in (0, 1):
        named = [eqn.primitive.name for eqn in backward[stage]]
        assert named.count("tanh") == 2
        fences = [i for i, name in enumerate(named) if name == "optimization_barrier"]
        assert [named[:at].count("tanh") for at in fences] == [0, 1]
