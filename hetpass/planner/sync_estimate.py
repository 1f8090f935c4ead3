"""Seconds of summing gradients in mixtures of two sorts of columns, estimated. No JAX.

Every layer is summed in a ring over all hosts that hold it; how fast depends on the groups that
these hosts are of, and on the shorter of the rows. A row does its layers one after another; all of
a host's rows together get what the host attains. The exact price of a plan with its devices placed
is `planner.pipelines`' business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetpass.planner.columns import Column
from hetpass.planner.pipelines import Market

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class SyncEstimate:
    """Estimates for columns of one market."""

    def __init__(self, market: Market, found: Sequence[Column]) -> None:
        self.market, self.found = market, found
        groups = market.cluster.groups
        hosts = sum(group.hosts for group in groups)
        self.passes = 2 * (hosts - 1) / hosts
        self.sizes = market.costs.gradient_bytes()
        self.ways = sorted({w for group in groups for w in range(1, group.devices_per_host + 1)})
        layers = market.costs.num_layers
        self.group_of = np.zeros((len(found), layers), dtype=np.int64)
        self.ways_of = np.zeros((len(found), layers), dtype=np.int64)
        for index, column in enumerate(found):
            for stage in column.stages:
                self.group_of[index, stage.first : stage.end] = stage.group
                self.ways_of[index, stage.first : stage.end] = stage.ways
        self.rates = self._rates()
        self.stages = [_members(column, layers, 1) for column in found]
        self.hosts = [
            _members(column, layers, max(g.devices_per_host for g in groups)) for column in found
        ]
        self.update_s = np.array([column.update_s for column in found])

    def alone_s(self) -> Floats:
        """Per column, in a plan of such columns only."""
        rows = self._layer_s(self.group_of, self.group_of, self.ways_of)
        whole = self._layer_s(self.group_of, self.group_of, None)
        seconds = [
            max((stages @ r).max(), (hosts @ h).max())
            for stages, hosts, r, h in zip(self.stages, self.hosts, rows, whole, strict=True)
        ]
        result: Floats = np.array(seconds) + self.update_s
        return result

    def pairs_s(self) -> Floats:
        """Entry [i, j]: of a column i among columns i and j."""
        count = len(self.found)
        result = np.zeros((count, count))
        for i in range(count):
            mine, theirs = self.group_of[i][None, :], self.group_of
            fewest = np.minimum(self.ways_of[i][None, :], self.ways_of)
            rows = self._layer_s(mine, theirs, fewest)
            whole = self._layer_s(mine, theirs, None)
            result[i] = np.maximum(
                (rows @ self.stages[i].T).max(axis=1), (whole @ self.hosts[i].T).max(axis=1)
            )
        result += self.update_s[:, None]
        return result

    def _rates(self) -> Floats:
        """[G, G, ways] bytes per second in a ring over hosts of two groups; the last entry is of
        whole hosts."""
        groups, network = self.market.cluster.groups, self.market.network
        typical = float(self.sizes.sum()) / 4
        return np.array(
            [
                [
                    [
                        self._between(network.ring_rate(a, b, typical, w), a.name, b.name)
                        for w in (*self.ways, min(a.devices_per_host, b.devices_per_host))
                    ]
                    for b in groups
                ]
                for a in groups
            ]
        )

    def _between(self, rate: float, one: str, other: str) -> float:
        """Nothing is sent inside a group of one host."""
        group = self.market.cluster.group(one)
        return np.inf if one == other and group.hosts == 1 else rate

    def _layer_s(self, one: Indices, other: Indices, ways: Indices | None) -> Floats:
        """Per layer, for columns on groups `one` and `other`; None: whole hosts are at it."""
        place = np.searchsorted(self.ways, ways) if ways is not None else len(self.ways)
        own = self.rates[one, one, place]
        rate = np.minimum(
            np.minimum(self.rates[one, other, place], own), self.rates[other, other, place]
        )
        seconds: Floats = self.passes * self.sizes / rate
        return seconds


def _members(column: Column, layers: int, devices: int) -> Floats:
    """[parts, L]: the layers of each stage, or of stages that fill so many devices of a group."""
    parts: list[Floats] = []
    group, used = -1, 0
    for stage in column.stages:
        if stage.group != group or used + stage.ways > devices:
            parts.append(np.zeros(layers))
            group, used = stage.group, 0
        used += stage.ways
        parts[-1][stage.first : stage.end] = 1.0
    return np.array(parts)
