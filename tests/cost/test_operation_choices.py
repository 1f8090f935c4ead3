from __future__ import annotations

import math

import pytest

from hetpass.cost.analytic import Assumptions
from hetpass.cost.operation_choices import (
    KERNEL_S,
    compute_ways,
    natural_layouts,
    operation_s,
    sort_of,
    touched_share,
    wanted_layouts,
)
from hetpass.cost.operations import SORTS, Curve, Efficiency
from hetpass.ir.devices import DeviceKind
from hetpass.ir.operation_graph import Layout, Operation, OperationChoice, ShardingRule, Value

MESH = (("data", 2), ("model", 4))
KIND = DeviceKind("k", {"float16": 1e12}, 1 << 30, 1e9)
PRODUCT = ShardingRule((8, 16, 32), (((0,), (1,)), ((1,), (2,))), (((0,), (2,)),), frozenset({1}))
BATCHED = ShardingRule(
    (4, 8, 16, 32),
    (((0,), (1,), (2,)), ((0,), (2,), (3,))),
    (((0,), (1,), (3,)),),
    frozenset({2}),
)
VALUES = (Value((8, 16), 2), Value((16, 32), 2), Value((8, 32), 2))


def dot(rule=PRODUCT, phase="forward", **more):
    return Operation("dot_general", phase, (0, 1), (2,), rule, dtype="float16", sums=True, **more)


def test_what_a_choice_makes_of_operands_and_results():
    choice = OperationChoice((("data",), ("model",), ()), ())
    assert wanted_layouts(dot(), VALUES, choice) == (
        Layout((("data",), ("model",))),
        Layout((("model",), ())),
    )
    (natural,) = natural_layouts(dot(), VALUES, choice)
    assert natural == Layout((("data",), ()), frozenset({"model"}))
    assert compute_ways(choice, MESH) == 8
    # 128 of 256 bytes over 8 devices, 1024 over 4, 512 over 2.
    share = touched_share(dot(), VALUES, (wanted_layouts(dot(), VALUES, choice), (natural,)), MESH)
    assert share == pytest.approx((256 / 8 + 1024 / 4 + 512 / 2) / (256 + 1024 + 512))


def test_without_a_rule_everything_is_whole():
    operation = Operation("custom", "forward", (0,), (2,), None)
    choice = OperationChoice((), ())
    assert wanted_layouts(operation, VALUES, choice) == (Layout(((), ())),)
    assert natural_layouts(operation, VALUES, choice) == (Layout(((), ())),)


def test_summands_pass_through_linear_operations():
    rule = ShardingRule((8, 16), (((0,), (1,)),), (((1,), (0,)),))
    operation = Operation("transpose", "backward", (0,), (1,), rule, linear=True)
    choice = OperationChoice(((), ("model",)), (), frozenset({"data"}))
    assert wanted_layouts(operation, VALUES, choice)[0].partial == {"data"}
    assert natural_layouts(operation, VALUES, choice)[0].partial == {"data"}
    assert compute_ways(choice, MESH) == 4  # every device adds up what it has


def test_the_roofline():
    half = Assumptions(0.5, 0.5)
    slow = dot(flops=4e12, traffic_bytes=1.0)
    assert operation_s(slow, 4, 1.0, KIND, half) == pytest.approx(2.0 + KERNEL_S)
    wide = dot(flops=1.0, traffic_bytes=2e9)
    assert operation_s(wide, 1, 0.25, KIND, half) == pytest.approx(1.0 + KERNEL_S)
    assert operation_s(dot(), 1, 1.0, KIND) == 0.0
    assert operation_s(dot(flops=1e12), 1, 1.0, KIND, half) == pytest.approx(2.0)  # fused
    other = Operation("dot_general", "forward", (0, 1), (2,), PRODUCT, 1.0, "float64")
    assert operation_s(other, 1, 1.0, KIND) == math.inf


def test_curves_by_sort_and_size():
    curves = {sort: Curve(0.8, 1e9) for sort in SORTS}
    efficiency = Efficiency(curves, {sort: Curve(0.9, 1e3) for sort in SORTS}, 1e-5, 1.0, 0.0)
    operation = dot(flops=8e9, traffic_bytes=1e3)
    whole = operation_s(operation, 1, 1.0, KIND, efficiency)
    assert whole == pytest.approx(8e9 / (1e12 * 0.8 * 8 / 9) + 1e-5)
    part = operation_s(operation, 8, 1.0, KIND, efficiency)
    assert part > whole / 8  # small operations reach less


@pytest.mark.parametrize(
    ("operation", "sort"),
    [
        (dot(), "product"),
        (dot(BATCHED), "batched product"),
        (dot(BATCHED, "backward"), "batched product, backward"),
        (Operation("exp", "forward", (0,), (2,), None), "memory"),
        (
            Operation(
                "reduce_sum",
                "forward",
                (0,),
                (1,),
                ShardingRule((8, 16), (((0,), (1,)),), (((0,),),), frozenset({1})),
                sums=True,
            ),
            "memory",
        ),
    ],
)
def test_sorts(operation, sort):
    assert sort_of(operation) == sort
    assert sort in SORTS
