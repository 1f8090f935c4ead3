"""Merge layers that are too light to be worth one, and cap their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

LIGHT = 1 / 20
"""Of the mean time of a layer, below which a layer joins a neighbour."""


@dataclass(frozen=True)
class LayerWeight:
    """One layer before merging.

    Attributes:
      time_s: of its heavy equations on the reference device.
      forced: the user marked the cut before it.
      iteration: it continues the scan over layers that the layer before belongs to.
      lookup: it holds an embedding, which stays apart (it costs memory, not time).
    """

    time_s: float
    forced: bool = False
    iteration: bool = False
    lookup: bool = False

    def plus(self, time_s: float) -> LayerWeight:
        return replace(self, time_s=self.time_s + time_s)

    def force(self) -> LayerWeight:
        return replace(self, forced=True)


def merge_layers(layers: Sequence[LayerWeight], max_layers: int) -> list[int]:
    """New layer number per old one.

    A cut that the user marked and the cuts between iterations of a scan always stay. The first
    and the last layer (embedding, head) join others only for the cap's sake.
    """
    groups = [[k] for k in range(len(layers))]
    light = LIGHT * sum(layer.time_s for layer in layers) / max(len(layers), 1)
    while (choice := _light_pair(groups, layers, light)) is not None:
        _join(groups, choice)
    while len(groups) > max_layers:
        pairs = [i for i in range(len(groups) - 1) if _may_join(groups, i, layers)]
        if not pairs:
            break
        pairs = [i for i in pairs if 0 < i < len(groups) - 2] or pairs
        _join(groups, min(pairs, key=lambda i: (_time(groups[i] + groups[i + 1], layers), i)))
    return [g for g, group in enumerate(groups) for _ in group]


def _time(group: Sequence[int], layers: Sequence[LayerWeight]) -> float:
    return sum(layers[k].time_s for k in group)


def _may_join(groups: Sequence[Sequence[int]], i: int, layers: Sequence[LayerWeight]) -> bool:
    after = layers[groups[i + 1][0]]
    return not after.forced and not after.iteration


def _light_pair(
    groups: Sequence[Sequence[int]], layers: Sequence[LayerWeight], light: float
) -> int | None:
    """The left one of two neighbours of which one is light and may join the other."""
    best: tuple[float, float, int] | None = None
    for i in range(1, len(groups) - 1):
        time_s = _time(groups[i], layers)
        if time_s >= light or any(layers[k].lookup for k in groups[i]):
            continue
        for left, other in ((i - 1, i - 1), (i, i + 1)):
            if not _may_join(groups, left, layers) or other in (0, len(groups) - 1):
                continue
            option = (time_s, _time(groups[other], layers), left)
            best = option if best is None or option < best else best
    return None if best is None else best[2]


def _join(groups: list[list[int]], i: int) -> None:
    groups[i : i + 2] = [groups[i] + groups[i + 1]]
