"""What stages hold and send once a program is partitioned, told from its slots and transfers."""

from __future__ import annotations

from collections import Counter

from hetpass.ir.program import Staged
from hetpass.transforms.sizes import aval_bytes


def held_bytes(staged: Staged) -> list[float]:
    """Per stage, the forward values of one microbatch that its backward part reads."""
    source = {t.target: t.source for t in staged.transfers}
    forward = {output.slot for f in staged.fragments if f.role == "forward" for output in f.outputs}
    totals = [0.0] * staged.num_stages
    for fragment in staged.fragments:
        if fragment.role != "backward":
            continue
        for slot in {i.slot for i in fragment.inputs if hasattr(i, "slot")}:
            origin = slot
            while origin in source:
                origin = source[origin]
            value = staged.slots[slot]
            if value.scope == "microbatch" and not value.stacked and origin in forward:
                totals[fragment.stage] += aval_bytes(value.aval)
    return totals


def sent_bytes(staged: Staged) -> tuple[Counter[int], Counter[int]]:
    """By the stage in front of a link, the bytes of a microbatch forward and backward; what skips
    stages counts on every link between."""
    forward: Counter[int] = Counter()
    backward: Counter[int] = Counter()
    reach: dict[int, tuple[int, int]] = {}
    for transfer in staged.transfers:
        source, target = staged.slots[transfer.source], staged.slots[transfer.target]
        if source.scope == "microbatch" and not source.stacked:
            low, high = reach.get(transfer.source, (source.stage, source.stage))
            reach[transfer.source] = (min(low, target.stage), max(high, target.stage))
    for number, (low, high) in reach.items():
        slot = staged.slots[number]
        for stage in range(slot.stage, high):
            forward[stage] += aval_bytes(slot.aval)
        for stage in range(low, slot.stage):
            backward[stage] += aval_bytes(slot.aval)
    return forward, backward
