from __future__ import annotations

import math

import pytest

from hetpass.cost.operations import (
    SORTS,
    Curve,
    Efficiency,
    Operation,
    Work,
    operation_s,
    product_rate,
    work_s,
)
from hetpass.ir.devices import DeviceKind

KIND = DeviceKind("k", {"float32": 100.0, "tf32": 400.0}, 10, 10.0)
HALF = Efficiency(
    {sort: Curve(0.5, 0.0) for sort in SORTS[:3]},
    {sort: Curve(1.0, 0.0) for sort in SORTS},
    overhead_s=1.0,
    sums=2.0,
    message_s=0.25,
)


def test_the_slower_of_computing_and_moving_counts():
    assert operation_s(Operation("product", 200.0, 10.0), KIND, HALF, "float32") == 4.0 + 1.0
    assert operation_s(Operation("product", 200.0, 90.0), KIND, HALF, "float32") == 9.0 + 1.0
    assert operation_s(Operation("product", 200.0, 1.0, 3), KIND, HALF, "tf32") == 3 * 2.0
    assert operation_s(Operation("memory", 0.0, 30.0), KIND, HALF, "float32") == 3.0 + 1.0


def test_small_operations_reach_less():
    curve = Curve(0.8, 100.0)
    assert curve.share(100.0) == pytest.approx(0.4)
    assert curve.share(1e9) == pytest.approx(0.8)


def test_a_format_that_is_lacking_takes_for_ever():
    assert math.isinf(operation_s(Operation("product", 1.0, 1.0), KIND, HALF, "bfloat16"))
    plain = DeviceKind("p", {"float32": 100.0}, 10, 10.0)
    assert product_rate(plain, "tf32") == 100.0


def test_work_adds_sums_of_activations():
    work = Work((Operation("memory", 0.0, 10.0),) * 2, sum_s=3.0, messages=4)
    assert work_s(work, KIND, HALF, "float32") == 2 * 2.0 + 2 * 3.0 + 4 * 0.25


def test_unknown_sorts_are_refused():
    with pytest.raises(ValueError, match="no sort"):
        Operation("convolution", 1.0, 1.0)
