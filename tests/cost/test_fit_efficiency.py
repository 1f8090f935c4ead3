"""Curves are found again from seconds that they made."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hetpass.cost.fit_efficiency import ASSUMED, MOST, Pull, Sample, fitted
from hetpass.cost.operations import (
    PRODUCTS,
    SORTS,
    Curve,
    Efficiency,
    HostPace,
    Operation,
    Sums,
    Work,
    work_s,
)
from hetpass.ir.devices import DeviceKind

KINDS = [
    DeviceKind("one", {"float32": 2e13, "tf32": 1e14}, 10**10, 1e12),
    DeviceKind("two", {"float32": 1e13}, 10**10, 5e11),
]
TRUE = Efficiency(
    {sort: Curve(share, 2e8) for sort, share in zip(PRODUCTS, (0.7, 0.6, 0.5, 0.2), strict=True)},
    {sort: Curve(0.75, 3e6) for sort in SORTS},
    overhead_s=1e-5,
    sums=2.0,
    message_s=1e-5,
    bus_sums=4.0,
    host=HostPace(5e-5, 8e-5, 1e-4),
)
LIGHT = Pull(0.1, 0.01)


def samples(count, noise=0.0, seed=0, truth=TRUE, kinds=KINDS):
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
        bus = dice.random() < 0.5
        sums = Sums(int(ways > 1), (ways - 1) * 1e-4, ways - 1, bus)
        work = Work(operations, sums, dice.randint(1, 9), dice.random() < 0.5)
        kind = dice.choice(kinds)
        seconds = work_s(work, kind, truth, "tf32") * (1 + noise * dice.uniform(-1, 1))
        results.append(Sample(work, kind, "tf32", seconds))
    return results


def errors(efficiency, on):
    return sorted(abs(work_s(s.work, s.kind, efficiency, s.dtype) / s.seconds - 1) for s in on)


def test_what_made_the_seconds_is_found_again():
    found = fitted(samples(300), pull=LIGHT)
    for efficiency in (found.common, *found.kinds.values()):
        unseen = errors(efficiency, samples(100, seed=1))
        assert unseen[50] < 0.02
        assert efficiency.rate["product"].best == pytest.approx(0.7, rel=0.05)
    assert found.kinds.keys() == {"one", "two"}


def test_a_few_odd_measurements_do_not_bend_the_curves():
    known = samples(300, noise=0.05)
    odd = [replace(s, seconds=20 * s.seconds) for s in known[:10]]
    found = fitted([*odd, *known[10:]], pull=LIGHT)
    for efficiency in (found.common, *found.kinds.values()):
        assert errors(efficiency, samples(100, seed=1))[50] < 0.05


def test_without_samples_of_a_sort_its_curves_stay():
    known = [
        s for s in samples(300) if {o.sort for o in s.work.operations} <= {"memory", "product"}
    ]
    efficiency = fitted(known).common
    for sort in PRODUCTS[2:]:
        assert efficiency.rate[sort].best == pytest.approx(ASSUMED.rate[sort].best, rel=1e-3)
        assert efficiency.bandwidth[sort].half == pytest.approx(ASSUMED.bandwidth[sort].half)


def test_what_a_kind_does_not_tell_is_as_on_others():
    """Kind "two" was measured with passes alone; its products are as slow as those of "one"."""
    slow = {**TRUE.rate, "product": Curve(0.3, 2e8)}
    others = samples(300, truth=replace(TRUE, rate=slow), kinds=KINDS[:1])
    wanted = {"memory", "product, backward"}
    passes = samples(300, kinds=KINDS[1:])
    passes = [s for s in passes if {o.sort for o in s.work.operations} == wanted]
    found = fitted([*others, *passes])
    assert found.kinds["two"].rate["product"].best == pytest.approx(0.3, rel=0.2)
    assert ASSUMED.rate["product"].best == 0.8


def test_kinds_that_differ_keep_their_own():
    fast = replace(TRUE, bandwidth={sort: Curve(0.9, 3e6) for sort in SORTS})
    slow = replace(TRUE, bandwidth={sort: Curve(0.45, 3e6) for sort in SORTS})
    known = [
        *samples(200, truth=fast, kinds=KINDS[:1]),
        *samples(200, seed=2, truth=slow, kinds=KINDS[1:]),
    ]
    found = fitted(known).kinds
    one, two = (found[name].bandwidth["memory"].best for name in ("one", "two"))
    assert one / two == pytest.approx(2.0, rel=0.2)


def test_no_share_is_above_the_peak():
    fast = [replace(s, seconds=s.seconds / 10) for s in samples(100)]
    for efficiency in fitted(fast).kinds.values():
        assert all(curve.best <= 1.0 + 1e-9 for curve in efficiency.rate.values())
        assert all(curve.best <= 1.0 + 1e-9 for curve in efficiency.bandwidth.values())
        assert efficiency.rate["product"].best <= MOST + 1e-9
