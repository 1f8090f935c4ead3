from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hetpass.cost.operations import (
    PRODUCTS,
    SORTS,
    Curve,
    Efficiency,
    HostPace,
    Operation,
    Sums,
    Work,
    longer_s,
    operation_s,
    product_rate,
    work_s,
)
from hetpass.ir.devices import DeviceKind

KIND = DeviceKind("k", {"float32": 100.0, "tf32": 400.0}, 10, 10.0)
HALF = Efficiency(
    {sort: Curve(0.5, 0.0) for sort in PRODUCTS},
    {sort: Curve(1.0, 0.0) for sort in SORTS},
    overhead_s=1.0,
    sums=2.0,
    message_s=0.25,
    bus_sums=3.0,
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
    for bus, times in ((False, 2), (True, 3)):
        work = Work((Operation("memory", 0.0, 10.0),) * 2, Sums(2, 3.0, 4, bus))
        assert work_s(work, KIND, HALF, "float32") == 2 * 2.0 + times * 3.0 + 4 * 0.25


def test_a_layer_takes_the_longer_of_device_and_host():
    operations = (Operation("memory", 0.0, 10.0),)  # 2 s on the device
    slow = replace(HALF, host=HostPace(forward_s=1.0, backward_s=10.0, sum_s=5.0))
    assert work_s(Work(operations, calls=0.1), KIND, slow, "float32") == pytest.approx(2.0, 1e-3)
    assert work_s(Work(operations, calls=20), KIND, slow, "float32") == pytest.approx(20.0, 1e-3)
    backward = Work(operations, calls=20, backward=True)
    assert work_s(backward, KIND, slow, "float32") == pytest.approx(200.0, 1e-3)
    summed = Work(operations, Sums(4))
    assert work_s(summed, KIND, slow, "float32") == pytest.approx(20.0, 1e-3)
    assert longer_s(3.0, 3.0) == pytest.approx(3.0 * 2**0.25)
    assert longer_s(math.inf, 1.0) == math.inf


def test_unknown_sorts_are_refused():
    with pytest.raises(ValueError, match="no sort"):
        Operation("convolution", 1.0, 1.0)
