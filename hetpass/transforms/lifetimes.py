"""Which fragment is the last to read a slot, and so may give its memory away."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hetpass.ir.program import ReadOffset, Slot
from hetpass.transforms.assemble import Draft, Key


def last_uses(
    slots: Sequence[Slot], drafts: Mapping[Key, Draft], kept: Collection[int]
) -> dict[Key, list[int]]:
    """Per fragment, the slots that it is the last to read.

    A slot of scope "step" that a microbatch fragment reads last is in no list: that fragment runs
    M times. A slot that no fragment reads (it is only sent) is in no list either, so the fragment
    that writes a slot never frees it. A slot may be freed by a reader while a transfer of it is
    still to come only if the transfer was issued before: it is, right after the write.

    Args:
      kept: slots that must outlive the step's fragments (results, inputs that are not donated).
    """
    last: dict[int, Key] = {}
    for key, draft in sorted(drafts.items()):
        for source in draft.inputs.values():
            if not isinstance(source, ReadOffset):
                last[source.slot] = key
    frees: dict[Key, list[int]] = {}
    for slot, key in sorted(last.items()):
        once = key.role in ("prologue", "epilogue")
        if slot not in kept and (once or slots[slot].scope == "microbatch"):
            frees.setdefault(key, []).append(slot)
    return frees
