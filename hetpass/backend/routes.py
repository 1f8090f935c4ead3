"""What crosses between processes in a transfer: who sends which part to whom. No JAX.

The two sides of a transfer are meshes whose devices belong to *places* (processes, numbered over
the whole cluster). Bytes are dear between groups and cheap inside one, so that:

- every part of the value is sent once, whatever number of devices, or places, wants it;
- a part that several places of the target want is cut into one *parcel* per place; each place
  gets one and passes it to the others, inside the group (a scatter, then an all-gather);
- of the source's copies the one whose place has sent the least so far sends (and one at the same
  place if there is one), and senders begin at different receivers.

The planning of cross-mesh resharding as in Zhuang et al., "On Optimizing the Communication of Model
Parallelism" (MLSys 2023): broadcast-based, balanced over the hosts' links, ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpass.backend.pieces import Box, elements, intersection

_CUT_ELEMENTS = 1024
"""Parts below this size are not cut: a message costs more than they do."""


@dataclass(frozen=True)
class Side:
    """One end of a transfer: per device of the mesh, its box of the value and its place."""

    boxes: tuple[Box, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Parcel:
    """One message.

    Attributes:
      number: within its transfer; the order in which a sender posts.
      box: the part, in elements of the whole value.
      source: the position, in the source's mesh, of the device whose shard holds it.
      sender: the place of that device.
      receivers: places; the first gets it from the sender, and passes it to the others.
    """

    number: int
    box: Box
    source: int
    sender: int
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """All parcels of a transfer.

    Attributes:
      source, target: the two ends.
      parcels: by number. At every target place, those it receives fill the boxes of its devices.
    """

    source: Side
    target: Side
    parcels: tuple[Parcel, ...]

    @property
    def crossing_elements(self) -> int:
        """Elements that go from a sender to another place."""
        return sum(elements(p.box) for p in self.parcels if p.sender != p.receivers[0])

    @property
    def passed_elements(self) -> int:
        """Elements that places of the target pass to each other."""
        return sum(elements(p.box) * (len(p.receivers) - 1) for p in self.parcels)


def route(source: Side, target: Side) -> Route:
    """The parcels of a transfer between two meshes of any shapes.

    The boxes of one side are equal or disjoint, and fill the value.
    """
    holders: dict[Box, list[int]] = {}
    for position, box in enumerate(source.boxes):
        holders.setdefault(box, []).append(position)
    wanted: dict[Box, list[int]] = {}
    for box, place in zip(target.boxes, target.places, strict=True):
        places = wanted.setdefault(box, [])
        if place not in places:
            places.append(place)
    sent = dict.fromkeys(range(len(source.boxes)), 0)
    sent_by_place = dict.fromkeys(source.places, 0)
    parts: list[tuple[Box, int, tuple[int, ...]]] = []
    for box, places in wanted.items():
        for held, positions in sorted(holders.items()):
            part = intersection(held, box)
            if part is None:
                continue
            for piece, receivers in _shared(part, places):
                near = [p for p in positions if source.places[p] == receivers[0]]
                position = min(
                    near or positions, key=lambda p: (sent_by_place[source.places[p]], sent[p])
                )
                if not near:
                    sent[position] += elements(piece)
                    sent_by_place[source.places[position]] += elements(piece)
                parts.append((piece, position, receivers))
    senders = sorted(set(source.places))
    parts = _in_turns(parts, [senders.index(place) for place in source.places])
    parcels = tuple(
        Parcel(number, box, position, source.places[position], receivers)
        for number, (box, position, receivers) in enumerate(parts)
    )
    return Route(source, target, parcels)


def naive_elements(source: Side, target: Side) -> int:
    """Elements that cross between places if every target device is sent its whole box."""
    return sum(
        elements(box)
        for box, place in zip(target.boxes, target.places, strict=True)
        if place not in source.places
    )


def _shared(part: Box, places: Sequence[int]) -> list[tuple[Box, tuple[int, ...]]]:
    """The part cut into one piece per place that wants it, each with its receivers."""
    count = len(places)
    sizes = [stop - start for start, stop in part]
    dim = max(range(len(sizes)), key=lambda d: sizes[d], default=0)
    if count == 1 or elements(part) < _CUT_ELEMENTS or sizes[dim] < count:
        first = places[0]
        return [(part, (first, *(p for p in places if p != first)))]
    pieces = []
    start = part[dim][0]
    for index, first in enumerate(places):
        stop = part[dim][0] + sizes[dim] * (index + 1) // count
        piece = (*part[:dim], (start, stop), *part[dim + 1 :])
        pieces.append((piece, (first, *(p for p in places if p != first))))
        start = stop
    return pieces


def _in_turns(
    parts: Sequence[tuple[Box, int, tuple[int, ...]]], rank: Sequence[int]
) -> list[tuple[Box, int, tuple[int, ...]]]:
    """Senders begin at different receivers, so that no receiver is everyone's first."""
    receivers = sorted({first for _, _, (first, *_) in parts})

    def turn(part: tuple[Box, int, tuple[int, ...]]) -> int:
        _, position, (first, *_) = part
        return (receivers.index(first) - rank[position]) % len(receivers)

    return sorted(parts, key=turn)
