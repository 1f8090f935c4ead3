"""Efficiency curves from measured seconds: robust least squares. No JAX.

The logarithm of predicted over measured seconds is made small, with a loss that grows linearly for
what is far off, so that a few odd measurements do not bend the curves. Every device kind has curves
of its own, drawn towards those that all kinds have in common, and these towards a start: what the
samples of a kind say nothing about is as on other kinds, and what no sample tells stays where it
was. So samples of one model on a kind move what they tell of it, and the others' shares among
products and passes stay.

Parameters are logarithms; no share is above 1, and none of plain products above `MOST`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.sparse import coo_matrix

from hetpass.cost.operations import (
    PRODUCTS,
    SORTS,
    Curve,
    Efficiency,
    HostPace,
    Work,
    product_rate,
)
from hetpass.ir.devices import DeviceKind

Floats = NDArray[np.float64]

MOST = 0.9
"""Of the peak rate, that matrix products reach in the best libraries on large operands."""

_FAR = 0.1
"""Relative errors beyond this count linearly."""


@dataclass(frozen=True)
class Sample:
    """Measured seconds of a work on a device kind, with products in `dtype`."""

    work: Work
    kind: DeviceKind
    dtype: str
    seconds: float


@dataclass(frozen=True)
class Pull:
    """How strongly logarithms of parameters are drawn, in errors of seconds.

    Attributes:
      kinds: a kind's towards what all have in common. 0.4: a fifth off counts as an error of 8 %.
      common: that towards the start.
    """

    kinds: float = 0.4
    common: float = 0.2


@dataclass(frozen=True)
class Fitted:
    """Curves that explain samples.

    Attributes:
      common: of a kind that nothing was measured of.
      kinds: by name, of those in the samples.
    """

    common: Efficiency
    kinds: Mapping[str, Efficiency] = field(hash=False)


ASSUMED = Efficiency(
    rate={
        sort: Curve(share, 2e8) for sort, share in zip(PRODUCTS, (0.8, 0.8, 0.5, 0.5), strict=True)
    },
    bandwidth={
        sort: Curve(share, 2e6)
        for sort, share in zip(SORTS, (0.8, 0.8, 0.8, 0.4, 0.8), strict=True)
    },
    overhead_s=4e-6,
    sums=1.0,
    message_s=8e-6,
    bus_sums=3.0,
    host=HostPace(1e-4, 1.2e-4, 1.5e-4),
)
"""Where nothing was measured: round numbers, from which fits start. Products and streams reach four
fifths; products of gradients for each head read one operand across, at half of that."""


def fitted(samples: Sequence[Sample], start: Efficiency = ASSUMED, pull: Pull = Pull()) -> Fitted:
    """The curves that explain the samples, drawn towards `start`."""
    design = _Design(samples)
    origin, kinds = _parameters(start), len(design.kinds)
    measured = np.log(np.array([sample.seconds for sample in samples]))
    count = origin.size

    def residuals(parameters: Floats) -> Floats:
        table = parameters.reshape(kinds + 1, count)
        off: Floats = np.log(design.seconds(table[1:])) - measured
        apart = (pull.kinds * (table[1:] - table[0])).ravel()
        return np.concatenate([off, apart, pull.common * (table[0] - origin)])

    most = np.tile(_most(count), kinds + 1)
    found = least_squares(
        residuals,
        np.minimum(np.tile(origin, kinds + 1), most - 1e-3),
        bounds=(np.full(most.shape, -40.0), most),
        loss="soft_l1",
        f_scale=_FAR,
        max_nfev=60,
        jac_sparsity=_sparsity(design.kind_of, kinds, count),
    )
    common, *own = found.x.reshape(kinds + 1, count)
    return Fitted(
        _efficiency(common),
        MappingProxyType({k: _efficiency(x) for k, x in zip(design.kinds, own, strict=True)}),
    )


def _most(count: int) -> Floats:
    """Upper bounds of the parameters."""
    most = np.full(count, 40.0)
    most[: 2 * (len(PRODUCTS) + len(SORTS)) : 2] = 0.0  # no operation does better than the peak
    most[:4:2] = np.log(MOST)
    return most


def _sparsity(kind_of: NDArray[np.int64], kinds: int, count: int) -> coo_matrix:
    """Which residuals depend on which parameters."""
    samples, each = len(kind_of), np.arange(count)
    rows = [np.repeat(np.arange(samples), count)]
    columns = [((kind_of + 1)[:, None] * count + each).ravel()]
    pulled = np.arange(kinds * count)
    rows += [samples + pulled, samples + pulled, samples + kinds * count + each]
    columns += [count + pulled, pulled % count, each]
    at = np.concatenate(rows), np.concatenate(columns)
    return coo_matrix(
        (np.ones(at[0].size), at), (samples + (kinds + 1) * count, (kinds + 1) * count)
    )


def _parameters(efficiency: Efficiency) -> Floats:
    curves = [efficiency.rate[sort] for sort in PRODUCTS]
    curves += [efficiency.bandwidth[sort] for sort in SORTS]
    numbers = [number for curve in curves for number in (curve.best, curve.half)]
    host = efficiency.host
    numbers += [efficiency.overhead_s, efficiency.sums, efficiency.message_s, efficiency.bus_sums]
    numbers += [host.forward_s, host.backward_s, host.sum_s]
    result: Floats = np.log(np.array(numbers))
    return result


def _efficiency(parameters: Floats) -> Efficiency:
    numbers = [float(number) for number in np.exp(parameters)]
    curves = [Curve(*numbers[i : i + 2]) for i in range(0, 2 * (len(PRODUCTS) + len(SORTS)), 2)]
    overhead_s, sums, message_s, bus_sums = numbers[-7:-3]
    return Efficiency(
        dict(zip(PRODUCTS, curves, strict=False)),
        dict(zip(SORTS, curves[len(PRODUCTS) :], strict=True)),
        overhead_s,
        sums,
        message_s,
        bus_sums,
        HostPace(*numbers[-3:]),
    )


class _Design:
    """All operations of all samples as arrays, so that a prediction is one expression."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        rows = [
            (index, SORTS.index(o.sort), o.flops, o.size_bytes, o.count)
            for index, sample in enumerate(samples)
            for o in sample.work.operations
        ]
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 5)
        self.row, self.sort = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        self.flops, self.size, self.count = table[:, 2], table[:, 3], table[:, 4]
        self.kinds = sorted({sample.kind.name for sample in samples})
        self.kind_of = np.array([self.kinds.index(sample.kind.name) for sample in samples])
        rates = np.array([product_rate(sample.kind, sample.dtype) for sample in samples])
        bandwidths = np.array([sample.kind.memory_bandwidth for sample in samples])
        self.rate, self.bandwidth = rates[self.row], bandwidths[self.row]
        works = [sample.work for sample in samples]
        self.calls = np.array([work.calls for work in works])
        self.backward = np.array([work.backward for work in works])
        self.sums = np.array([work.sums.count for work in works])
        self.link_s = np.array([work.sums.link_s for work in works])
        self.messages = np.array([work.sums.messages for work in works])
        self.bus = np.array([work.sums.bus for work in works])

    def seconds(self, parameters: Floats) -> Floats:
        """Per sample, as `operations.work_s` has them; one row of parameters per kind."""
        numbers = np.exp(parameters)
        kind, first = self.kind_of[self.row], 2 * len(PRODUCTS)
        sort = np.minimum(self.sort, len(PRODUCTS) - 1)
        best, half = numbers[kind, 2 * sort], numbers[kind, 2 * sort + 1]
        computing = (self.flops + half) / (self.rate * best) * (self.flops > 0)
        best = numbers[kind, first + 2 * self.sort]
        half = numbers[kind, first + 2 * self.sort + 1]
        moving = (self.size + half) / (self.bandwidth * best) * (self.size > 0)
        overhead_s, sums, message_s, bus, forward, backward, sum_s = numbers[self.kind_of, -7:].T
        each = self.count * (np.maximum(computing, moving) + overhead_s[self.row])
        device_s = np.bincount(self.row, each, minlength=len(self.kind_of))
        device_s = device_s + np.where(self.bus, bus, sums) * self.link_s
        device_s = device_s + message_s * self.messages
        host_s = np.where(self.backward, backward, forward) * self.calls + sum_s * self.sums
        result: Floats = (device_s**4 + host_s**4) ** 0.25
        return result
