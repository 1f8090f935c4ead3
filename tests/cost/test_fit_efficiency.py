"""Curves are found again from seconds that they made."""

from __future__ import annotations

import random

import pytest

from hetpass.cost.fit_efficiency import ASSUMED, Sample, fitted
from hetpass.cost.operations import SORTS, Curve, Efficiency, Operation, Work, work_s
from hetpass.ir.devices import DeviceKind

KINDS = [
    DeviceKind("one", {"float32": 2e13, "tf32": 1e14}, 10**10, 1e12),
    DeviceKind("two", {"float32": 1e13}, 10**10, 5e11),
]
TRUE = Efficiency(
    {sort: Curve(share, 2e8) for sort, share in zip(SORTS, (0.7, 0.5, 0.2), strict=False)},
    {sort: Curve(0.75, 3e7) for sort in SORTS},
    overhead_s=1e-5,
    sums=2.0,
    message_s=1e-5,
)


def samples(count, noise=0.0, seed=0):
    dice = random.Random(seed)
    results = []
    for _ in range(count):
        operations = tuple(
            Operation(
                sort,
                0.0 if sort == "memory" else 10 ** dice.uniform(8, 12),
                10 ** dice.uniform(5, 9),
                dice.randint(1, 4),
            )
            for sort in dice.sample(SORTS, 2)
        )
        ways = dice.choice((1, 2, 4))
        work = Work(operations, (ways - 1) * 1e-4, ways - 1)
        kind = dice.choice(KINDS)
        seconds = work_s(work, kind, TRUE, "tf32") * (1 + noise * dice.uniform(-1, 1))
        results.append(Sample(work, kind, "tf32", seconds))
    return results


def errors(efficiency, on):
    return sorted(abs(work_s(s.work, s.kind, efficiency, s.dtype) / s.seconds - 1) for s in on)


def test_what_made_the_seconds_is_found_again():
    efficiency = fitted(samples(200), pull=1e-3)
    unseen = errors(efficiency, samples(100, seed=1))
    assert unseen[50] < 0.01
    assert unseen[-1] < 0.1
    assert efficiency.rate["product"].best == pytest.approx(0.7, rel=0.05)


def test_a_few_odd_measurements_do_not_bend_the_curves():
    known = samples(200, noise=0.05)
    odd = [Sample(s.work, s.kind, s.dtype, 20 * s.seconds) for s in known[:10]]
    efficiency = fitted([*odd, *known[10:]], pull=1e-3)
    assert errors(efficiency, samples(100, seed=1))[50] < 0.05


def test_without_samples_of_a_sort_its_curves_stay():
    known = [s for s in samples(200) if all(o.sort == "memory" or o.sort == "product"
             for o in s.work.operations)]  # fmt: skip
    efficiency = fitted(known)
    for sort in SORTS[1:3]:
        assert efficiency.rate[sort].best == pytest.approx(ASSUMED.rate[sort].best, rel=1e-3)
        assert efficiency.bandwidth[sort].half == pytest.approx(ASSUMED.bandwidth[sort].half)


def test_no_share_is_above_the_peak():
    fast = [Sample(s.work, s.kind, s.dtype, s.seconds / 10) for s in samples(60)]
    efficiency = fitted(fast)
    assert all(curve.best <= 1.0 + 1e-9 for curve in efficiency.rate.values())
    assert all(curve.best <= 1.0 + 1e-9 for curve in efficiency.bandwidth.values())
