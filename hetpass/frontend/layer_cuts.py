"""Cut a chain of forward equations into pieces where few bytes cross.

A *heavy* equation is one that takes time on any device: a product, a convolution, a lookup in a
parameter, a loop over such. Between two consecutive heavy equations lies a *gap*; its cut is the
position in it that the fewest bytes cross. A gap is kept as a cut if one value flows through it
(then nothing is gained by waiting), or if its bytes are near the smallest of its neighbourhood; so
attention is never cut in its middle while the residual stream alone crosses nearby.

A value that is not read within the neighbourhood (a skip connection of a U-Net) is asleep: it
crosses all the gaps around alike and says nothing about which of them to take.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from hetpass.analysis.flops import aval_bytes
from hetpass.frontend.dataflow import Dataflow

NEIGHBOURHOOD = 4
"""Heavy equations on either side. The residual stream sleeps over no more than three of them at
the best position of a transformer's or a residual network's block."""

NEAR_MINIMUM = 1.25

SIGNIFICANT = 1 / 16
"""Of the largest value that crosses, below which a value does not count as one."""


@dataclass(frozen=True)
class Piece:
    """Consecutive equations of one chain.

    Attributes:
      equations: in order.
      heavy: those of them that are heavy.
      forced: the user marked the cut before it.
    """

    equations: tuple[int, ...]
    heavy: tuple[int, ...]
    forced: bool


@dataclass(frozen=True)
class Weights:
    """What the cutter needs to know about equations.

    Attributes:
      heavy: the heavy equations.
      lookups: those of them that only look up rows of a parameter.
      alone: heavy equations with a cut on either side: scans over layers.
      marks: markers of the user; the cut goes before them.
      crosses: whether an equation's results count where they cross a cut.
    """

    heavy: Set[int]
    lookups: Set[int]
    alone: Set[int]
    marks: Set[int]
    crosses: Callable[[int], bool]


def cut_chain(flow: Dataflow, chain: Sequence[int], weights: Weights) -> list[Piece]:
    """Pieces of a chain.

    Args:
      chain: forward equations in a topological order.
    """
    heavies = [p for p, number in enumerate(chain) if number in weights.heavy]
    bytes_at = _crossing_bytes(flow, chain, weights)
    gaps = [_best(bytes_at, a + 1, b) for a, b in zip(heavies, heavies[1:], strict=False)]
    kept = _kept(flow, chain, heavies, gaps, weights)
    marked = {p for p, number in enumerate(chain) if number in weights.marks}
    # A gap that the user marked is cut there and nowhere else.
    for a, b, position in zip(heavies, heavies[1:], gaps, strict=False):
        if any(a < p <= b for p in marked):
            kept.discard(position)
    return _pieces(chain, sorted((kept | marked) - {0}), marked, weights)


def _best(bytes_at: Sequence[float], first: int, last: int) -> int:
    """The latest position in first..last that the fewest bytes cross."""
    return min(range(first, last + 1), key=lambda p: (bytes_at[p], -p))


def _crossing_bytes(flow: Dataflow, chain: Sequence[int], weights: Weights) -> list[float]:
    """Entry p: bytes of the chain's own values that cross from before position p to after."""
    change = [0.0] * (len(chain) + 2)
    for start, _, reads, size in _spans(flow, chain, weights):
        change[start + 1] += size
        change[reads[-1] + 1] -= size
    total, result = 0.0, []
    for step in change:
        total += step
        result.append(total)
    return result


def _spans(
    flow: Dataflow, chain: Sequence[int], weights: Weights
) -> list[tuple[int, int, list[int], float]]:
    """(position made, value number, positions read, bytes) of every value that may cross."""
    place = {number: p for p, number in enumerate(chain)}
    spans = []
    for position, number in enumerate(chain):
        if not weights.crosses(number):
            continue
        for var in flow.eqns[number].outvars:
            reads = sorted(place[r] for r in flow.readers.get(var, ()) if r in place)
            if reads:
                spans.append((position, len(spans), reads, aval_bytes(var.aval)))
    return spans


def _kept(
    flow: Dataflow,
    chain: Sequence[int],
    heavies: Sequence[int],
    gaps: Sequence[int],
    weights: Weights,
) -> set[int]:
    """The gaps worth a cut."""
    active: list[dict[int, float]] = [{} for _ in gaps]
    for start, value, reads, size in _spans(flow, chain, weights):
        for before, after in zip([start, *reads], reads, strict=False):
            for g in _gaps_shortly_before(gaps, heavies, before, after):
                active[g][value] = size
    score = [sum(values.values()) for values in active]
    kept = set()
    for g, position in enumerate(gaps):
        left, right = chain[heavies[g]], chain[heavies[g + 1]]
        if left in weights.lookups and right in weights.lookups:
            continue  # the lookups of one embedding
        sizes = active[g].values()
        single = sum(size >= SIGNIFICANT * max(sizes) for size in sizes) == 1
        around = score[max(0, g - NEIGHBOURHOOD) : g + NEIGHBOURHOOD + 1]
        near = score[g] <= NEAR_MINIMUM * min(around)
        if single or near or left in weights.alone or right in weights.alone:
            kept.add(position)
    return kept


def _gaps_shortly_before(
    gaps: Sequence[int], heavies: Sequence[int], before: int, after: int
) -> list[int]:
    """The gaps after position `before` with at most NEIGHBOURHOOD heavy equations to `after`."""
    first = bisect_right(gaps, before)
    last = bisect_right(gaps, after)
    reader = bisect_left(heavies, after)  # heavy equations that stand before `after`
    return [g for g in range(first, last) if reader - (g + 1) <= NEIGHBOURHOOD]


def _pieces(
    chain: Sequence[int], cuts: Sequence[int], marked: Set[int], weights: Weights
) -> list[Piece]:
    bounds = [0, *cuts, len(chain)]
    pieces = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        equations = tuple(chain[start:end])
        heavy = tuple(n for n in equations if n in weights.heavy)
        pieces.append(Piece(equations, heavy, start in marked))
    return pieces
