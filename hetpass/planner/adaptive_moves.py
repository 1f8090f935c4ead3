"""Neighbours of an order of tasks: a critical task is moved before tasks that delay it.

The step can only get shorter if the critical path does: the chain of tasks and transfers, each
starting when the one before it ends, that leads to the last end. Where it passes from a task to
the next task of the same lane although that one had its inputs earlier, the two may change places
(as in job-shop local search; van Laarhoven et al. 1992).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from hetpass.schedules.pipe import Pipe
from hetpass.simulator.engine import Played

Lanes = tuple[tuple[int, ...], ...]
"""Per lane, numbers of tasks in the order of execution."""

_FARTHEST = 4
"""A task moves before at most so many tasks."""


def moved(pipe: Pipe, orders: Lanes, played: Played) -> Iterator[Lanes]:
    """Orders that differ from the given ones by one move; short moves and late ones first."""
    spots = [
        (lane, position)
        for lane, position in _critical(pipe, orders, played)
        if position and _may_pass(pipe, orders[lane][position - 1], orders[lane][position])
    ]
    for far in range(1, _FARTHEST + 1):
        for lane, position in spots:
            order = orders[lane]
            target = position - far
            passed = order[max(target, 0) : position]
            if target < 0 or not all(_may_pass(pipe, t, order[position]) for t in passed):
                continue
            new = (
                *order[:target],
                order[position],
                *order[target:position],
                *order[position + 1 :],
            )
            yield (*orders[:lane], new, *orders[lane + 1 :])


def exchanged(pipe: Pipe, orders: Lanes, chance: Random) -> Lanes:
    """Two neighbours on a lane, chosen by chance, change places; unchanged if they may not."""
    lane = chance.randrange(len(orders))
    order = orders[lane]
    position = chance.randrange(len(order) - 1) if len(order) > 1 else 0
    pair = order[position : position + 2]
    if len(pair) < 2 or not _may_pass(pipe, *pair):
        return orders
    new = (*order[:position], *reversed(pair), *order[position + 2 :])
    return (*orders[:lane], new, *orders[lane + 1 :])


def _may_pass(pipe: Pipe, before: int, after: int) -> bool:
    """Whether the later task may run first: neither the same kind on its stage, nor read by it."""
    block, microbatch = divmod(before, pipe.num_microbatches)
    other, other_microbatch = divmod(after, pipe.num_microbatches)
    if block % pipe.num_stages != other % pipe.num_stages:
        return True
    return block != other and microbatch != other_microbatch


def _critical(pipe: Pipe, orders: Lanes, played: Played) -> Iterator[tuple[int, int]]:
    """(lane, position) of the tasks on the critical path, from the last to the first."""
    m, stages = pipe.num_microbatches, pipe.num_stages
    place = {n: (lane, i) for lane, order in enumerate(orders) for i, n in enumerate(order)}
    sources = {b.to: index for index, b in enumerate(pipe.blocks) if b.to >= 0}
    lane = max(range(len(orders)), key=lambda i: played.end_s[orders[i][-1]] + pipe.updates_s[i])
    position = len(orders[lane]) - 1
    while True:
        yield lane, position
        number = orders[lane][position]
        start_s = played.start_s[number]
        if start_s <= 0:
            return
        if position and played.end_s[orders[lane][position - 1]] >= start_s:
            position -= 1
            continue
        block, microbatch = divmod(number, m)
        source = sources.get(block, block - stages)
        if source < 0:
            return
        lane, position = place[source * m + microbatch]
