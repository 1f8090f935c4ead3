"""The pieces of a transfer: which part of which source shard goes to which device. No JAX.

A *box* is a slice of the value per dimension. Both sides are partitions of the value into boxes,
each box held by one or more devices (copies). Every distinct target box is brought once to one of
its devices, from the boxes that it meets; further devices of the same box copy it from there, so
that each byte crosses between the groups once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""(start, stop) per dimension, in elements."""


@dataclass(frozen=True)
class Piece:
    """`box`, in elements of the whole value, from one shard of the source."""

    source: int
    box: Box


@dataclass(frozen=True)
class Assembly:
    """How one target device gets its shard.

    Attributes:
      device: the target device.
      box: its shard.
      pieces: a grid that fills the box, row-major; () if the shard is copied from `copy_of`.
      copy_of: another target device with the same box, or None.
    """

    device: int
    box: Box
    pieces: tuple[Piece, ...]
    copy_of: int | None = None


def assemblies(sources: Mapping[int, Box], targets: Mapping[int, Box]) -> tuple[Assembly, ...]:
    """One per target device, in the order of `targets`; copies come after what they copy.

    Args:
      sources, targets: the box of each device. The boxes of one side are equal or disjoint, and
        fill the value.

    Pieces come from the target device itself where it holds them; else from the holder that has
    sent the fewest elements so far (the first of equals).
    """
    holders: dict[Box, list[int]] = {}
    for device, box in sources.items():
        holders.setdefault(box, []).append(device)
    first: dict[Box, int] = {}
    for device, box in targets.items():
        # A device that already holds the whole box is the best one to copy from.
        if box not in first or (sources.get(device) == box != sources.get(first[box])):
            first[box] = device
    sent = dict.fromkeys(sources, 0)
    made, copied = [], []
    for device, box in targets.items():
        if first[box] != device and sources.get(device) != box:
            copied.append(Assembly(device, box, (), first[box]))
            continue
        pieces = []
        for held, devices in sorted(holders.items()):
            part = intersection(held, box)
            if part is None:
                continue
            source = device if device in devices else min(devices, key=lambda d: sent[d])
            if source != device:
                sent[source] += elements(part)
            pieces.append(Piece(source, part))
        pieces.sort(key=lambda piece: piece.box)
        made.append(Assembly(device, box, tuple(pieces)))
    return (*made, *copied)


def mesh_boxes(
    names: Sequence[Sequence[str]], axes: Mapping[str, int], shape: Sequence[int]
) -> tuple[Box, ...]:
    """The box of every device of a mesh, devices in row-major order of the mesh's axes.

    Args:
      names: per dimension, the mesh axes that cut it, the major one first; dimensions beyond are
        whole.
      axes: sizes of the mesh's axes, in order.
      shape: of the value; cut dimensions divide.
    """
    boxes = []
    for place in itertools.product(*(range(size) for size in axes.values())):
        at = dict(zip(axes, place, strict=True))
        box = []
        for dim, size in enumerate(shape):
            part, parts = 0, 1
            for name in names[dim] if dim < len(names) else ():
                part, parts = part * axes[name] + at[name], parts * axes[name]
            box.append((size // parts * part, size // parts * (part + 1)))
        boxes.append(tuple(box))
    return tuple(boxes)


def intersection(left: Box, right: Box) -> Box | None:
    """None if the boxes share no element. (Equal empty spans meet: an empty value is one piece.)"""
    both = []
    for (a, b), (c, d) in zip(left, right, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop and (a, b) != (c, d):
            return None
        both.append((start, stop))
    return tuple(both)


def elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def relative(box: Box, outer: Box) -> Box:
    """The box in the coordinates of a box that holds it."""
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
