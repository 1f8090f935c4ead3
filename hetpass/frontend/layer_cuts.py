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
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from hetpass.analysis.flops import aval_bytes
from hetpass.frontend.dataflow import Dataflow

NEIGHBOURHOOD = 8
"""Heavy equations on either side: attention with adapters beside its products has fourteen."""

NEAR_MINIMUM = 1.25

LARGE_SHARE = 1 / 8
"""Of a chain's time, above which a piece is cut further where at most MORE_BYTES times the bytes
of its own borders cross (a small U-Net is all one neighbourhood)."""

FEWEST_PIECES = 4
"""Pieces that a chain is cut into, if it can be, whatever crosses."""

MORE_BYTES = 1.75
"""Below 2, so that a residual block with one inner value is not cut."""

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
      heavy: the heavy equations and their times, in seconds on the reference device.
      lookups: those of them that only look up rows of a parameter.
      alone: heavy equations with a cut on either side: scans over layers.
      marks: markers of the user; the cut goes before them.
      crosses: whether an equation's results count where they cross a cut.
      inside: per equation, whether a cut before it would part what `jax.checkpoint` recomputes
        together.
    """

    heavy: Mapping[int, float]
    lookups: Set[int]
    alone: Set[int]
    marks: Set[int]
    crosses: Callable[[int], bool]
    inside: Sequence[bool]


def cut_chain(flow: Dataflow, chain: Sequence[int], weights: Weights) -> list[Piece]:
    """Pieces of a chain.

    Args:
      chain: forward equations in a topological order.
    """
    heavies = [p for p, number in enumerate(chain) if number in weights.heavy]
    bytes_at = _crossing_bytes(flow, chain, weights)
    gaps = [
        _best(flow, chain, bytes_at, a + 1, b) for a, b in zip(heavies, heavies[1:], strict=False)
    ]
    kept = _kept(flow, chain, heavies, gaps, weights)
    _cut_large(chain, heavies, gaps, bytes_at, weights, kept)
    marked = {p for p, number in enumerate(chain) if number in weights.marks}
    # A gap that the user marked is cut there and nowhere else.
    for a, b, position in zip(heavies, heavies[1:], gaps, strict=False):
        if any(a < p <= b for p in marked):
            kept.discard(position)
    return _pieces(chain, sorted((kept | marked) - {0}), marked, weights)


def _best(
    flow: Dataflow, chain: Sequence[int], bytes_at: Sequence[float], first: int, last: int
) -> int:
    """The position in first..last that the fewest bytes cross.

    Of several the latest, so that an activation stays with its product; but a norm, which starts
    with a reduction, goes with what follows.
    """
    fewest = min(bytes_at[first : last + 1])
    best = None
    for position in range(first, last + 1):
        if bytes_at[position] == fewest:
            best = position
        if best is not None and flow.eqns[chain[position]].primitive.name.startswith("reduce_"):
            break
    return last if best is None else best


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
    spans: list[tuple[int, int, list[int], float]] = []
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
        if weights.inside[chain[position]]:
            continue
        sizes = active[g].values()
        single = sum(size >= SIGNIFICANT * max(sizes) for size in sizes) == 1
        around = score[max(0, g - NEIGHBOURHOOD) : g + NEIGHBOURHOOD + 1]
        near = score[g] <= NEAR_MINIMUM * min(around)
        if single or near or left in weights.alone or right in weights.alone:
            kept.add(position)
    return kept


def _cut_large(
    chain: Sequence[int],
    heavies: Sequence[int],
    gaps: Sequence[int],
    bytes_at: Sequence[float],
    weights: Weights,
    kept: set[int],
) -> None:
    """Add to `kept` the best inner gap of every piece that takes a large share of the time.

    Small models are cut further still: four layers let them run on several devices at all.
    """
    times = [weights.heavy[chain[p]] for p in heavies]
    large = LARGE_SHARE * sum(times)
    may_cut = [not weights.inside[chain[p]] for p in gaps]
    open_pieces = [(0, len(heavies))]  # heavy equations start..end-1, cut at kept gaps
    while open_pieces:
        start, end = open_pieces.pop()
        inner = range(start, end - 1)  # gap g lies between heavy equations g and g + 1
        cut = next((g for g in inner if gaps[g] in kept), None)
        if cut is None and sum(times[start:end]) > large:
            borders = [bytes_at[gaps[g]] for g in (start - 1, end - 1) if 0 <= g < len(gaps)]
            allowed = MORE_BYTES * max(borders, default=0.0)
            cut = min(
                (g for g in inner if bytes_at[gaps[g]] <= allowed and may_cut[g]),
                key=lambda g: (bytes_at[gaps[g]], g),
                default=None,
            )
        if cut is not None:
            kept.add(gaps[cut])
            open_pieces += [(start, cut + 1), (cut + 1, end)]
    others = sorted((bytes_at[p], p) for p, may in zip(gaps, may_cut, strict=True) if may)
    for _, position in others:
        if len(kept) + 1 < FEWEST_PIECES and not weights.alone:
            kept.add(position)


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
