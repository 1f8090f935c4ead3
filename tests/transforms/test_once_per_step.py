"""Optimizers, clipping, loss scaling: where prologue and epilogue equations run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from hetpass.ir.program import Staged
from hetpass.transforms.sizes import SMALL_BYTES, aval_bytes
from tests.transforms.build import Example, random_tree
from tests.transforms.test_partition import BATCH, WIDTH, X, Y, check, transfers_by_scope

LAYERS = 3


def loss(params, rows):
    h = rows["x"]
    for k in range(LAYERS):
        with jax.named_scope(f"layer{k}"):
            h = jnp.tanh(h @ params[f"w{k}"] + params[f"b{k}"])
            if k == LAYERS - 1:
                return jnp.sum((h - rows["y"]) ** 2) / BATCH


def optimized(transform, *, scaled: bool = False) -> Example:
    shapes = {f"w{k}": (WIDTH, WIDTH) for k in range(LAYERS)}
    shapes |= {f"b{k}": (WIDTH,) for k in range(LAYERS)}
    params = random_tree(shapes)
    state = {"params": params, "opt": transform.init(params), "step": jnp.int32(3)}
    # Not the first step: moments and counts are other than zero.
    grads = jax.tree.map(lambda p: 0.1 * p, params)
    _, state["opt"] = transform.update(grads, state["opt"], params)

    def region(whole, rows, offset):
        value, grads = jax.value_and_grad(loss)(whole["state"]["params"], rows)
        return {"loss": value, **{f"d.{k}": g for k, g in grads.items()}}

    def epilogue(state, batch, pro, totals):
        grads = {k: totals[f"d.{k}"] for k in state["params"]}
        updates, opt = transform.update(grads, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        rate = 0.1 / (1.0 + state["step"])
        state = {"params": new, "opt": opt, "step": state["step"] + 1}
        return state, {"loss": totals["loss"], "rate": rate}

    return Example(state, {"x": X, "y": Y}, region, epilogue, LAYERS)


def large_transfers(staged: Staged) -> list[str]:
    """Step-scoped values that are sent between stages and that are not small."""
    return [
        staged.slots[t.source].name
        for t in staged.transfers
        if staged.slots[t.source].scope == "step"
        and aval_bytes(staged.slots[t.source].aval) > SMALL_BYTES
    ]


def phases(staged: Staged) -> list[tuple[int, int]]:
    """(phase, stage) of the epilogue fragments, in order."""
    return [(f.phase, f.stage) for f in staged.fragments if f.role == "epilogue"]


SGD = optax.sgd(0.1)
TRANSFORMS = {
    "sgd": SGD,
    "adamw with a schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 9)),
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.3), optax.adam(0.1)),
    "multi steps": optax.MultiSteps(optax.adam(0.1), 2),
    "multi steps, skipping": optax.MultiSteps(SGD, 3),
    "multi steps of clipped": optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.3), SGD), 2),
    "apply if finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=8),
    "lion": optax.lion(0.1),
    "two optimizers": optax.multi_transform(
        {"w": optax.adam(0.1), "b": SGD},
        {f"{c}{k}": c for k in range(LAYERS) for c in "wb"},
    ),
    "averaged": optax.chain(optax.adam(0.1), optax.ema(0.9)),
    "noisy": optax.chain(optax.add_noise(0.1, 0.5, 1), SGD),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_optimizers_stay_on_their_stages(name):
    staged = check(optimized(TRANSFORMS[name]), 1, 1, 1, num_microbatches=2, rtol=1e-4)
    assert large_transfers(staged) == []
    slots = {f.input: staged.slots[f.slot] for f in staged.feeds}
    leaves = staged.layered.program.traced.inputs
    for index, slot in slots.items():
        path = leaves[index].path
        if len(leaves[index].aval.shape) == 2 and not slot.stacked:
            assert slot.stage == int(path[-3]), path  # moments sit beside their parameter
    donated = [i for i, leaf in enumerate(leaves) if leaf.donated]
    assert [i for i, _ in staged.pairs] == donated


def test_update_without_a_norm_is_one_phase():
    staged = check(optimized(SGD), 1, 1, 1, num_microbatches=1)
    assert phases(staged) == [(0, 0), (0, 1), (0, 2)]


def test_clipping_is_two_phases_and_sends_norms_alone():
    staged = check(optimized(TRANSFORMS["clipped adam"]), 1, 1, 1, num_microbatches=2)
    assert phases(staged) == [(p, s) for p in (0, 1) for s in range(3)]
    first = [f for f in staged.fragments if f.role == "epilogue" and f.phase == 0]
    for fragment in first:  # sums of squares; nothing of the moments waits for the second phase
        written = [staged.slots[o.slot] for o in fragment.outputs]
        large = [s.name for s in written if aval_bytes(s.aval) > SMALL_BYTES]
        assert all(name.startswith("total") for name in large), large
    assert set(transfers_by_scope(staged, "step")) == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }


@pytest.mark.parametrize("overflow", [False, True])
def test_loss_scale_skips_on_every_stage(overflow):
    """Grads are scaled in the region; a non-finite one anywhere skips the whole update."""

    def region(whole, rows, offset):
        scale = whole["state"]["scale"]
        value, grads = jax.value_and_grad(lambda p: loss(p, rows) * scale)(whole["state"]["params"])
        return {"loss": value, **{f"d.{k}": g for k, g in grads.items()}}

    def epilogue(state, batch, pro, totals):
        grads = {k: totals[f"d.{k}"] / state["scale"] for k in state["params"]}
        if overflow:
            grads["b1"] = grads["b1"] + jnp.inf
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))

        def update(grads):
            new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
            return new, moments, state["count"] + 1

        def skip(grads):
            return state["params"], state["moments"], state["count"]

        params, moments, count = jax.lax.cond(finite, update, skip, grads)
        scale = jnp.where(finite, state["scale"], state["scale"] / 2)
        return {"params": params, "moments": moments, "count": count, "scale": scale}, finite

    params = optimized(SGD).state["params"]
    state = {
        "params": params,
        "moments": jax.tree.map(jnp.ones_like, params),
        "count": jnp.int32(4),
        "scale": jnp.float32(8.0),
    }
    example = Example(state, {"x": X, "y": Y}, region, epilogue, LAYERS)
    staged = check(example, 1, 1, 1, num_microbatches=4)
    assert large_transfers(staged) == []
    with_cond = [
        (f.phase, f.stage)
        for f in staged.fragments
        if any(e.primitive.name == "cond" for e in f.jaxpr.eqns)
    ]
    assert with_cond == [(1, 0), (1, 1), (1, 2)]


def test_state_returned_from_another_stage_goes_home():
    """The new value of stage 0's parameter is computed from stage 1's gradient."""

    def region(whole, rows, offset):
        state = whole["state"]
        with jax.named_scope("layer0"):
            h = rows["x"] @ state["w0"]
        with jax.named_scope("layer1"):
            return {"s": jnp.sum(h @ state["w1"], 0)}

    def epilogue(state, batch, pro, totals):
        far = jnp.outer(totals["s"], totals["s"])
        return {"w0": far, "w1": state["w1"] + state["w0"], "last": far}, far

    state = random_tree({"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH), "last": (WIDTH, WIDTH)})
    example = Example(state, {"x": X}, region, epilogue, 2)
    staged = check(example, 1, 1, num_microbatches=2)
    assert staged.pairs == ((0, 0), (1, 1), (2, 2))
    result = staged.slots[staged.results[0].slot]
    assert result.stage == 0


def test_donated_state_is_freed_by_its_update_alone():
    staged = check(optimized(optax.adam(0.1)), 1, 1, 1, num_microbatches=2)
    leaves = staged.layered.program.traced.inputs
    freed = {s: f.role for f in staged.fragments for s in f.frees}
    for feed in staged.feeds:
        if leaves[feed.input].donated and leaves[feed.input].aval.shape == (WIDTH, WIDTH):
            assert freed[feed.slot] == "epilogue"
        if not leaves[feed.input].donated:
            assert feed.slot not in freed
