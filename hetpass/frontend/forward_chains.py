"""The forward equations as chains: what stands in a row, and what runs beside it.

Python runs one model call after the other, so a teacher, a discriminator on real images, a metrics
pass stand in the program one after the other although neither needs the other. A *chain* is a run
of heavy equations in program order; a chain *beside* the ones before it starts at a heavy equation
that does not depend on the one just before, and lasts until one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from hetpass.frontend.dataflow import Dataflow

MIN_SHARE = 0.1
"""Of the forward time, below which a run beside its predecessor is not a chain of its own."""

MIN_DEPTH = 2
"""Heavy equations one after the other in a run that nothing heavy joins again."""

MIN_JOINED_DEPTH = 4
"""The same in a run that is joined: keys with adapters beside queries are two deep."""


@dataclass(frozen=True)
class Chain:
    """One run of forward equations.

    Attributes:
      equations: in program order.
      beside: it may run along the layers of the chains before it.
      after: the last heavy equation of earlier chains that its first one depends on; None if it
        starts from inputs.
    """

    equations: tuple[int, ...]
    beside: bool
    after: int | None


def forward_chains(
    flow: Dataflow, forward: Sequence[int], anchors: Sequence[int], time_s: Sequence[float]
) -> list[Chain]:
    """Split forward equations into chains.

    Args:
      forward: the equations to split, in program order; each is an anchor or depends on one.
      anchors: the heavy equations among them (and the user's markers), in program order.
      time_s: per anchor.
    """
    ancestors = _ancestors(flow, anchors)
    before = [ancestors[a] for a in anchors]
    starts = _starts(before, time_s)
    chain_of: list[int] = []
    for j in range(len(anchors)):
        chain_of.append(chain_of[-1] + (j in starts) if j else 0)
    members: list[list[int]] = [[] for _ in range(chain_of[-1] + 1)] if anchors else []
    for number, chain in _membership(flow, forward, anchors, chain_of, ancestors).items():
        members[chain].append(number)
    chains = []
    first = [chain_of.index(c) for c in range(len(members))]
    for c, equations in enumerate(members):
        last = before[first[c]].bit_length() - 1
        after = anchors[last] if last >= 0 else None
        chains.append(Chain(tuple(equations), starts.get(first[c], False), after))
    return chains


def _membership(
    flow: Dataflow,
    forward: Sequence[int],
    anchors: Sequence[int],
    chain_of: Sequence[int],
    ancestors: Mapping[int, int],
) -> dict[int, int]:
    """Equation -> chain. A light one belongs to the last anchor that it depends on, unless only
    other chains go on from it: then to the first of these."""
    chain = {a: chain_of[j] for j, a in enumerate(anchors)}
    onward: dict[int, frozenset[int]] = {}  # the chains of the next anchors
    for number in reversed(forward):
        after: set[int] = set()
        for reader in flow.successors[number]:
            after |= {chain[reader]} if reader in chain else onward.get(reader, frozenset())
        if number not in chain:
            onward[number] = frozenset(after)
    result = {}
    for number in forward:
        own = chain.get(number)
        if own is None:
            own = chain_of[ancestors[number].bit_length() - 1]
            next_chains = onward[number]
            own = own if own in next_chains or not next_chains else min(next_chains)
        result[number] = own
    return result


def _ancestors(flow: Dataflow, anchors: Sequence[int]) -> dict[int, int]:
    """Per equation the anchors that it depends on, as bits."""
    place = {a: 1 << j for j, a in enumerate(anchors)}
    bits: dict[int, int] = {}
    for number, operands in enumerate(flow.operands):
        own = 0
        for o in operands:
            own |= bits[o] | place.get(o, 0)
        bits[number] = own
    return bits


def _starts(before: Sequence[int], time_s: Sequence[float]) -> dict[int, bool]:
    """Where chains start, and whether beside the ones before."""
    total = sum(time_s)
    starts: dict[int, bool] = {}
    blocked: list[int] = []  # anchors that the runs now open do not depend on
    for j in range(1, len(before)):
        joined = False
        while blocked and before[j] >> blocked[-1] & 1:
            blocked.pop()
            joined = True
        if joined:
            starts[j] = False
        if before[j] >> (j - 1) & 1:
            continue
        end = j
        while end < len(before) and not before[end] >> (j - 1) & 1:
            end += 1
        needed = MIN_DEPTH if end == len(before) else MIN_JOINED_DEPTH
        skipped = before[j].bit_length()  # the branch that ends at j - 1: a head, or a model?
        if all(
            sum(time_s[first:last]) >= MIN_SHARE * total
            and _depth(before, first, last, depth) >= depth
            for first, last, depth in ((j, end, needed), (skipped, j, MIN_DEPTH))
        ):
            starts[j] = True
            blocked.append(j - 1)
    return starts


def _depth(before: Sequence[int], start: int, end: int, enough: int) -> int:
    """Anchors on the longest path inside start..end-1, counted no further than `enough`."""
    depth: dict[int, int] = {}
    for j in range(start, end):
        inside = (before[j] >> start) & ((1 << (end - start)) - 1)
        deepest = 0
        while inside and deepest < enough:
            lowest = inside & -inside
            deepest = max(deepest, depth[start + lowest.bit_length() - 1])
            inside ^= lowest
        depth[j] = deepest + 1
        if depth[j] >= enough:
            return enough
    return max(depth.values(), default=0)


def whole_roots(
    flow: Dataflow, through: Sequence[bool], inputs: Set[object]
) -> list[frozenset[object]]:
    """Per equation the given inputs that it reads, directly or through equations of `through`."""
    roots: list[frozenset[object]] = []
    for number, eqn in enumerate(flow.eqns):
        own = {a for a in eqn.invars if not hasattr(a, "val") and a in inputs}
        for operand in flow.operands[number]:
            if through[operand]:
                own |= roots[operand]
        roots.append(frozenset(own))
    return roots
