"""Weight gradients as fragments of their own: exact, and B holds no more than it needs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpass.ir.kinds import Partial
from hetpass.ir.program import Accumulate, Staged, Write
from tests.transforms.test_partition import check, residual_net, tied


def fragment(staged: Staged, role: str, stage: int) -> Any:
    (found,) = (f for f in staged.fragments if (f.role, f.stage) == (role, stage))
    return found


def products(staged: Staged, role: str, stage: int) -> int:
    return str(fragment(staged, role, stage).jaxpr).count("dot_general")


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_a_chain_of_layers(schedule, num_microbatches):
    staged = check(residual_net(4), 2, 2, num_microbatches=num_microbatches, schedule=schedule)
    # Each layer has one product for its input gradient and one for its weights; the first layer
    # needs no input gradient.
    assert [products(staged, "backward", s) for s in (0, 1)] == [1, 2]
    assert [products(staged, "weight", s) for s in (0, 1)] == [2, 2]


def test_b_accumulates_nothing_and_w_writes_nothing_else():
    staged = check(residual_net(4), 2, 2, num_microbatches=2, schedule="zb-h1")
    for stage in (0, 1):
        assert all(isinstance(o, Write) for o in fragment(staged, "backward", stage).outputs)
        assert all(isinstance(o, Accumulate) for o in fragment(staged, "weight", stage).outputs)
        sums = [s for s in staged.slots if s.stage == stage and isinstance(s.kind, Partial)]
        assert all(slot.scope == "step" for slot in sums)


def test_what_w_reads_is_kept_until_w():
    staged = check(residual_net(4), 2, 2, num_microbatches=2, schedule="zb-h1")
    for stage in (0, 1):
        back, weight = fragment(staged, "backward", stage), fragment(staged, "weight", stage)
        kept = {i.slot for i in weight.inputs if staged.slots[i.slot].scope == "microbatch"}
        assert kept == set(weight.frees)
        assert not kept & set(back.frees)


def test_other_schedules_have_no_weight_fragments():
    staged = check(residual_net(3), 1, 2, num_microbatches=2)
    assert "weight" not in {f.role for f in staged.fragments}


@pytest.mark.parametrize("sizes", [(3,), (2, 1), (1, 1, 1)])
def test_a_tied_parameter(sizes):
    check(tied(), *sizes, num_microbatches=4, schedule="zb-h1")


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_random_cuts_skips_and_recomputation(data):
    num_layers = data.draw(st.integers(1, 5))
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
        schedule=data.draw(st.sampled_from(["1f1b", "zb-h1"])),
        recomputed=data.draw(st.sets(st.integers(0, len(sizes) - 1))),
    )
