"""Efficiency curves from measured seconds: robust least squares. No JAX.

The logarithm of predicted over measured seconds is made small, with a loss that grows linearly for
what is far off, so that a few odd measurements do not bend the curves. Parameters are logarithms,
shares are at most 1, and all are drawn towards a start, weakly: what the samples say nothing about
stays where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hetpass.cost.operations import SORTS, Curve, Efficiency, Work, product_rate
from hetpass.ir.devices import DeviceKind

Floats = NDArray[np.float64]

_PRODUCTS = SORTS[:3]
_FAR = 0.1
"""Relative errors beyond this count linearly."""


@dataclass(frozen=True)
class Sample:
    """Measured seconds of a work on a device kind, with products in `dtype`."""

    work: Work
    kind: DeviceKind
    dtype: str
    seconds: float


ASSUMED = Efficiency(
    rate={
        "product": Curve(0.6, 5e8),
        "batched product": Curve(0.4, 1e9),
        "batched product, backward": Curve(0.3, 1e9),
    },
    bandwidth={sort: Curve(0.8 if sort == "memory" else 0.7, 1e7) for sort in SORTS},
    overhead_s=30e-6,
    sums=1.5,
    message_s=5e-6,
)
"""Where nothing was measured: round numbers, from which fits start."""


def fitted(samples: Sequence[Sample], start: Efficiency = ASSUMED, pull: float = 0.1) -> Efficiency:
    """The curves that explain the samples, drawn towards `start` by `pull`."""
    design = _Design(samples)
    origin = _parameters(start)
    measured = np.log(np.array([sample.seconds for sample in samples]))

    def residuals(parameters: Floats) -> Floats:
        off: Floats = np.log(design.seconds(parameters)) - measured
        return np.concatenate([off, pull * (parameters - origin)])

    low, high = np.full(origin.shape, -40.0), np.full(origin.shape, 40.0)
    shares = [*range(0, 6, 2), *range(6, 6 + 2 * len(SORTS), 2)]
    high[shares] = 0.0  # no operation does better than the peak
    low[-2] = 0.0  # nor a sum better than its link
    found = least_squares(
        residuals,
        np.clip(origin, low + 1e-6, high - 1e-6),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_FAR,
        max_nfev=200,
    )
    return _efficiency(found.x)


def _parameters(efficiency: Efficiency) -> Floats:
    curves = [efficiency.rate[sort] for sort in _PRODUCTS]
    curves += [efficiency.bandwidth[sort] for sort in SORTS]
    numbers = [number for curve in curves for number in (curve.best, curve.half)]
    numbers += [efficiency.overhead_s, efficiency.sums, efficiency.message_s]
    result: Floats = np.log(np.array(numbers))
    return result


def _efficiency(parameters: Floats) -> Efficiency:
    numbers = [float(number) for number in np.exp(parameters)]
    curves = [Curve(*numbers[i : i + 2]) for i in range(0, 2 * (3 + len(SORTS)), 2)]
    return Efficiency(
        dict(zip(_PRODUCTS, curves, strict=False)),
        dict(zip(SORTS, curves[3:], strict=True)),
        *numbers[-3:],
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
        rates = np.array([product_rate(sample.kind, sample.dtype) for sample in samples])
        bandwidths = np.array([sample.kind.memory_bandwidth for sample in samples])
        self.rate, self.bandwidth = rates[self.row], bandwidths[self.row]
        self.samples = len(samples)
        self.sum_s = np.array([sample.work.sum_s for sample in samples])
        self.messages = np.array([sample.work.messages for sample in samples])

    def seconds(self, parameters: Floats) -> Floats:
        """Per sample, as `operations.work_s` has them."""
        numbers = np.exp(parameters)
        sort = np.minimum(self.sort, 2)
        best, half = numbers[2 * sort], numbers[2 * sort + 1]
        computing = (self.flops + half) / (self.rate * best) * (self.flops > 0)
        best, half = numbers[6 + 2 * self.sort], numbers[7 + 2 * self.sort]
        moving = (self.size + half) / (self.bandwidth * best) * (self.size > 0)
        each = self.count * (np.maximum(computing, moving) + numbers[-3])
        total = np.bincount(self.row, each, minlength=self.samples)
        result: Floats = total + numbers[-2] * self.sum_s + numbers[-1] * self.messages
        return result
