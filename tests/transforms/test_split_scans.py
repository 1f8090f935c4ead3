"""Scans over layers that are cut at stage boundaries."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from hetpass._jax import scan_counts
from hetpass.ir.kinds import Partial
from hetpass.ir.program import LayerSpan, Staged
from hetpass.transforms.split_scans import split_scans
from tests.transforms.build import Example, layered, random_tree
from tests.transforms.test_partition import (
    BATCH,
    WIDTH,
    X,
    Y,
    check,
    trained,
    transfers_by_scope,
)

DEPTH = 6


def scanned(body, state, *, aux: bool = False, first: int = 1) -> Example:
    """embed | scan over DEPTH layers | head: layers 0, 1 … DEPTH, DEPTH + 1."""

    def loss(params, rows, offset):
        with jax.named_scope("layer0"):
            h = rows["x"] @ params["embed"]
        shared = {k: params[k] for k in ("shared",) if k in params}
        stacked = {k: v for k, v in params.items() if k.startswith("s_")}
        with jax.named_scope(f"layers1to{DEPTH}"):
            h, ys = jax.lax.scan(partial(body, shared), h, stacked)
        with jax.named_scope(f"layer{DEPTH + 1}"):
            total = jnp.sum((h @ params["head"] - rows["y"]) ** 2) / BATCH
            return total + (jnp.sum(ys * jnp.arange(1.0, DEPTH + 1)) if aux else 0.0)

    return trained(loss, state, {"x": X, "y": Y}, DEPTH + 2)


def parameters(**more) -> dict:
    shapes = {"embed": (WIDTH, WIDTH), "head": (WIDTH, WIDTH), "s_w": (DEPTH, WIDTH, WIDTH)}
    state = random_tree(shapes | more)
    return {k: 0.3 * v for k, v in state.items()}


def plain(shared, h, layer):
    return jnp.tanh(h @ layer["s_w"]) + h, None


def with_shared(shared, h, layer):
    return jnp.tanh(h @ layer["s_w"]) @ shared["shared"], None


def with_aux(shared, h, layer):
    h = jnp.tanh(h @ layer["s_w"])
    return h, jnp.sum(h**2) / BATCH


CUTS = [(8,), (4, 4), (1, 3, 4), (2, 2, 2, 2)]


@pytest.mark.parametrize("num_microbatches", [4])
@pytest.mark.parametrize("sizes", CUTS)
def test_scan_with_residuals(sizes, num_microbatches):
    staged = check(
        scanned(plain, parameters()), *sizes, num_microbatches=num_microbatches, rtol=1e-4
    )
    _no_stack_is_held_whole(staged, sizes)


@pytest.mark.parametrize("sizes", CUTS[1:])
def test_scan_whose_body_is_rematerialized(sizes):
    body = lambda shared, h, layer: jax.checkpoint(partial(plain, shared))(h, layer)  # noqa: E731
    staged = check(scanned(body, parameters()), *sizes, num_microbatches=2, rtol=1e-4)
    _no_stack_is_held_whole(staged, sizes)


@pytest.mark.parametrize("sizes", CUTS[1:])
def test_gradient_of_a_shared_weight_does_not_travel_with_the_microbatch(sizes):
    state = parameters(shared=(WIDTH, WIDTH))
    staged = check(scanned(with_shared, state), *sizes, num_microbatches=2, rtol=1e-4)
    slots = [s for s in staged.slots if s.scope == "microbatch"]
    assert not any(isinstance(s.kind, Partial) for s in slots)
    assert not any(s.aval.shape == (WIDTH, WIDTH) for s in slots)


@pytest.mark.parametrize("sizes", CUTS[1:])
def test_stacked_outputs_that_something_else_reads(sizes):
    check(scanned(with_aux, parameters(), aux=True), *sizes, num_microbatches=2, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 3, 3)])
def test_stacked_outputs_that_are_results(sizes):
    def region(whole, rows, offset):
        params = whole["state"]
        with jax.named_scope("layer0"):
            h = rows["x"] @ params["embed"]
        with jax.named_scope(f"layers1to{DEPTH}"):
            h, ys = jax.lax.scan(partial(with_aux, {}), h, {"s_w": params["s_w"]})
        with jax.named_scope(f"layer{DEPTH + 1}"):
            return {"out": h @ params["head"], "norms": ys}

    def epilogue(state, batch, pro, totals):
        return totals["out"], totals["norms"]

    example = Example(parameters(), {"x": X}, region, epilogue, DEPTH + 2, joined=("out",))
    check(example, *sizes, num_microbatches=4, rtol=1e-4)


def test_scans_that_are_cut_differently_pass_rows_on():
    """The second scan reads the first one's outputs, in other layers."""

    def region(whole, rows, offset):
        w = whole["state"]["s_w"]
        with jax.named_scope("layers0to5"):
            h, ys = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), rows["x"], w)
        with jax.named_scope("layers6to11"):
            h, _ = jax.lax.scan(lambda h, wy: (jnp.tanh(h @ wy[0]) + wy[1], None), h, (w, ys))
        return {"out": h}

    state = {"s_w": parameters()["s_w"]}
    example = Example(
        state,
        {"x": X},
        region,
        lambda state, batch, pro, totals: totals["out"],
        12,
        joined=("out",),
    )
    for sizes in [(3, 5, 4), (6, 6), (2, 2, 3, 5)]:
        check(example, *sizes, num_microbatches=2, rtol=1e-4)


def test_pieces_are_scans_in_one_stage_and_never_unrolled():
    source = layered(scanned(plain, parameters()), 2)
    stage_of_layer = (0, 0, 0, 1, 1, 2, 2, 2)
    cut = split_scans(source, stage_of_layer)
    scans = [
        (eqn.params["length"], span, backward)
        for eqn, span, backward in zip(
            cut.program.region.eqns, cut.spans, cut.backward, strict=True
        )
        if eqn.primitive.name == "scan"
    ]
    assert scans == [
        (2, LayerSpan(1, 2), False),
        (2, LayerSpan(3, 4), False),
        (2, LayerSpan(5, 6), False),
        (2, LayerSpan(5, 6), True),
        (2, LayerSpan(3, 4), True),
        (2, LayerSpan(1, 2), True),
    ]
    assert set(cut.program.region.invars) <= set(cut.program.kinds)
    assert split_scans(source, (0,) * 8) is source


def test_what_is_no_scan_cannot_span_stages():
    source = layered(scanned(plain, parameters()), 2)
    with pytest.raises(ValueError, match="one iteration per layer"):
        from dataclasses import replace

        spans = tuple(LayerSpan(0, 7) for _ in source.spans)
        split_scans(replace(source, spans=spans), (0, 0, 0, 0, 1, 1, 1, 1))


def _no_stack_is_held_whole(staged: Staged, sizes: tuple[int, ...]) -> None:
    """Stacks in microbatch slots, and stacks that scans read, have the stage's layers alone."""
    if len(sizes) == 1:
        return
    for slot in staged.slots:
        if slot.scope == "microbatch":
            assert DEPTH not in slot.aval.shape[:1], slot
    for fragment in staged.fragments:
        if fragment.role in ("forward", "backward"):
            for eqn in fragment.jaxpr.eqns:
                if eqn.primitive.name == "scan":
                    stacked = eqn.invars[sum(scan_counts(eqn)) :]
                    assert all(v.aval.shape[0] == eqn.params["length"] for v in stacked)
                    assert eqn.params["length"] < DEPTH
    gradients = [t for t in transfers_by_scope(staged, "step")]
    assert len(gradients) == len(set(gradients))
