"""What a program's assignment asks for, held against what the compiler made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpass.backend.compiled_collectives import CompiledCollective
from hetpass.backend.laid_out import Emitted


@dataclass(frozen=True)
class CollectiveDifference:
    """Collectives of one kind along the same axes, where priced and compiled bytes differ.

    Attributes:
      priced, compiled: (how many, bytes of their results on one device) in one run.
      reasons: operations with a collective on one side that has none of its size on the other.
    """

    kind: str
    axes: tuple[str, ...]
    priced: tuple[int, float]
    compiled: tuple[int, float]
    reasons: tuple[str, ...] = ()

    @property
    def difference_bytes(self) -> float:
        return abs(self.priced[1] - self.compiled[1])

    def __str__(self) -> str:
        along = ", ".join(self.axes)
        return (
            f"{self.kind} along {along}: priced {self.priced[0]} of {self.priced[1]:,.0f} bytes, "
            f"compiled {self.compiled[0]} of {self.compiled[1]:,.0f}"
        )


Key = tuple[str, tuple[str, ...]]


def collective_differences(
    emitted: Sequence[Emitted],
    compiled: Sequence[CompiledCollective],
    mesh: Sequence[tuple[str, int]],
) -> tuple[CollectiveDifference, ...]:
    """Where the two differ, by kind and axes; () where every byte is as priced.

    A compiler without reduce-scatters shows an all-reduce of the whole and a slice: where the
    program has none, priced ones count so. Permutations are counted together, whatever their axes.
    """
    scatters = any(c.kind == "reduce_scatter" for c in compiled)
    sizes = dict(mesh)
    asked: dict[Key, list[tuple[float, int, str]]] = {}
    for e in emitted:
        kind, size = e.kind, e.result_bytes
        if kind == "reduce_scatter" and not scatters:
            kind = "all_reduce"
            for axis in e.axes:
                size *= sizes[axis]
        axes = tuple(name for name, size in mesh if name in e.axes and size > 1)
        if axes:
            key = (kind, () if kind == "permute" else axes)
            asked.setdefault(key, []).append((size, e.count, e.reason))
    made: dict[Key, list[tuple[float, int, str]]] = {}
    for c in compiled:
        if c.axes:
            key = (c.kind, () if c.kind == "permute" else c.axes)
            made.setdefault(key, []).append((c.result_bytes, c.count, c.operation))
    found = []
    for key in sorted({*asked, *made}):
        ours, theirs = _totals(asked.get(key, ())), _totals(made.get(key, ()))
        if ours[1] != theirs[1]:
            reasons = _unmatched(asked.get(key, ()), made.get(key, ()))
            found.append(CollectiveDifference(*key, ours, theirs, reasons))
    return tuple(found)


def _totals(rows: Sequence[tuple[float, int, str]]) -> tuple[int, float]:
    return sum(count for _, count, _ in rows), sum(size * count for size, count, _ in rows)


def _unmatched(
    asked: Sequence[tuple[float, int, str]], made: Sequence[tuple[float, int, str]]
) -> tuple[str, ...]:
    left: dict[tuple[float, int], list[str]] = {}
    for size, count, reason in asked:
        left.setdefault((size, count), []).append(f"priced for {reason}: {size:,.0f} bytes")
    extra = []
    for size, count, operation in made:
        same = left.get((size, count))
        if same:
            same.pop()
        else:
            extra.append(f"compiled for {operation or 'nothing named'}: {size:,.0f} bytes")
    return (*(reason for rows in left.values() for reason in rows), *extra)


def total_bytes(emitted: Sequence[Emitted]) -> float:
    """Result bytes of all that is asked for, in one run."""
    return sum(e.result_bytes * e.count for e in emitted)
