"""Which devices are left: the resource states of the inter-op program, as a graph. No JAX.

A state says which devices are left after some stages, and which group the last of them took; a move
takes devices for one more stage. Two graphs:

  any_order       devices left in every group: stages may take any group at any time. Exact; the
                  number of states is a product over groups.
  one_run         each group takes one contiguous run of stages: the set of groups that are done,
                  the group at work, the devices left in it. 2^(G-1) · G · d states, any order of
                  groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

START = -1
"""Stands for the group before the first stage; it has one state."""

NO_STATE = -1


@dataclass(frozen=True, eq=False)
class ResourceGraph:
    """States by the group of the last stage, and moves between them.

    Attributes:
      counts: per group, its number of states.
      moves: entry (p, g, n), for a stage on n devices of group g after one on group p, gives for
        every state of p the state of g, or NO_STATE where the devices are not there.
      left: per group and state, how much is left in all groups, in whatever unit: less after
        every move.
      name: "any order" or "one run".
    """

    counts: tuple[int, ...]
    moves: Mapping[tuple[int, int, int], Indices]
    left: tuple[Indices, ...]
    name: str

    @property
    def num_states(self) -> int:
        return sum(self.counts)


def any_order_states(devices: Sequence[int], sizes: Sequence[Sequence[int]]) -> int:
    """How many states `any_order` has."""
    units = _units(sizes)
    return math.prod(d // u + 1 for d, u in zip(devices, units, strict=True)) * len(devices)


def _units(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Per group, what all sizes are multiples of: devices are counted in it."""
    return [math.gcd(*group_sizes) if group_sizes else 1 for group_sizes in sizes]


def any_order(devices: Sequence[int], sizes: Sequence[Sequence[int]]) -> ResourceGraph:
    """Stages take any group at any time.

    Args:
      devices: per group.
      sizes: per group, the counts that a stage may take.
    """
    units = _units(sizes)
    shape = tuple(d // unit + 1 for d, unit in zip(devices, units, strict=True))
    count = math.prod(shape)
    left = np.indices(shape).reshape(len(shape), count)
    strides = [math.prod(shape[g + 1 :]) for g in range(len(shape))]
    moves: dict[tuple[int, int, int], Indices] = {}
    for g, group_sizes in enumerate(sizes):
        for n in group_sizes:
            step = n // units[g]
            after = np.where(left[g] >= step, np.arange(count) - step * strides[g], NO_STATE)
            for p in range(len(devices)):
                moves[p, g, n] = after
            moves[START, g, n] = after[-1:]  # the last state is that of all devices
    all_left = (left.sum(axis=0),) * len(devices)
    return ResourceGraph((count,) * len(devices), moves, all_left, "any order")


def one_run(
    devices: Sequence[int],
    sizes: Sequence[Sequence[int]],
    order: Sequence[int] | None = None,
) -> ResourceGraph:
    """Each group takes one contiguous run of stages.

    Args:
      devices, sizes: as in `any_order`.
      order: the groups in the only order that is allowed, some of them left out; None: any.
    """
    count = len(devices)
    units = _units(sizes)
    rooms = [d // unit + 1 for d, unit in zip(devices, units, strict=True)]
    masks = np.arange(1 << (count - 1))
    moves: dict[tuple[int, int, int], Indices] = {}
    for g, group_sizes in enumerate(sizes):
        for n in group_sizes:
            step = n // units[g]
            first = rooms[g] - 1 - step
            left = np.arange(rooms[g])
            same = np.where(left >= step, left - step, NO_STATE)
            states = masks[:, None] * rooms[g] + same[None, :]
            moves[g, g, n] = np.where(same[None, :] >= 0, states, NO_STATE).reshape(-1)
            moves[START, g, n] = np.array([first if first >= 0 else NO_STATE])
            for p in range(count):
                if p != g:
                    after = _begun(masks, p, g) * rooms[g] + first
                    legal = (_full(masks, p) >> g & 1 == 0) & (first >= 0) & _in_order(order, p, g)
                    after = np.where(legal, after, NO_STATE)
                    moves[p, g, n] = np.repeat(after, rooms[p])
    if order is not None:
        moves = {key: move for key, move in moves.items() if key[1] in order}
    counts = tuple(len(masks) * room for room in rooms)
    left_of = tuple(_left(masks, rooms, g) for g in range(count))
    return ResourceGraph(counts, moves, left_of, "one run")


def _left(masks: Indices, rooms: Sequence[int], group: int) -> Indices:
    """What is left in the group at work, and in those that are not done."""
    full = _full(masks, group)
    others = sum((full >> g & 1 ^ 1) * (room - 1) for g, room in enumerate(rooms) if g != group)
    left: Indices = (others + np.zeros_like(masks))[:, None] + np.arange(rooms[group])
    return left.reshape(-1)


def _full(masks: Indices, group: int) -> Indices:
    """Sets of done groups, which leave out the bit of the group at work, with that bit zero."""
    low = masks & ((1 << group) - 1)
    return low | (masks >> group) << (group + 1)


def _begun(masks: Indices, before: int, group: int) -> Indices:
    """The set of done groups once `group` is at work after `before`, without the bit of `group`."""
    full = _full(masks, before) | 1 << before
    low = full & ((1 << group) - 1)
    return low | full >> (group + 1) << group


def _in_order(order: Sequence[int] | None, before: int, group: int) -> bool:
    if order is None:
        return True
    places = list(order)
    return before in places and group in places and places.index(before) < places.index(group)
