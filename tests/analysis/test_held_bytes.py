"""Estimates of what stages hold, against what the partition holds."""

from __future__ import annotations

import pytest

from hetpass.analysis.held_bytes import activation_bytes, fixed_bytes
from hetpass.ir.program import Staged
from hetpass.transforms.partition import partition
from tests.transforms.build import layered, plan
from tests.transforms.test_partition import residual_net

ALL = ("forward", "backward", "epilogue")


def held(staged: Staged, stage: int, roles: tuple[str, ...], scope: str) -> float:
    """Bytes of the slots that fragments of these roles read; not the batch, nor gradients that
    arrive."""
    read = {
        i.slot
        for f in staged.fragments
        if f.stage == stage and f.role in roles
        for i in f.inputs
        if hasattr(i, "slot")
    }
    slots = [staged.slots[s] for s in read if staged.slots[s].scope == scope]
    kept = [s for s in slots if not s.stacked and not (scope == "microbatch" and "grad" in s.name)]
    return sum(s.aval.size * s.aval.dtype.itemsize for s in kept)


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 2)])
def test_near_what_the_slots_hold(sizes):
    program = layered(residual_net(4), 2)
    staged = partition(program, plan(*sizes, num_microbatches=2))
    stage_of = [s for s, size in enumerate(sizes) for _ in range(size)]
    for stage, (active, fixed) in enumerate(
        zip(activation_bytes(program, stage_of), fixed_bytes(program, stage_of), strict=True)
    ):
        assert active == pytest.approx(held(staged, stage, ("backward",), "microbatch"), rel=0.35)
        assert fixed == pytest.approx(held(staged, stage, ALL, "step"), rel=0.35)
