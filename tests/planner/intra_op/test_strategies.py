from __future__ import annotations

from hetpass.ir.operation_graph import Layout, Operation, ShardingRule, Value
from hetpass.planner.intra_op.strategies import Liberties, divides, strategies

LINE = (("data", 4),)
MESH = (("data", 2), ("model", 4))
NONE = Liberties(take=False, leave=False, scatter=False)
ALL = Liberties(take=True, leave=True, scatter=True)
PRODUCT = ShardingRule((8, 16, 32), (((0,), (1,)), ((1,), (2,))), (((0,), (2,)),), frozenset({1}))
VALUES = (Value((8, 16), 2), Value((16, 32), 2), Value((8, 32), 2))
DOT = Operation("dot_general", "forward", (0, 1), (2,), PRODUCT, sums=True)


def test_a_product_on_one_axis():
    found = strategies(DOT, VALUES, LINE, NONE)
    assert [s.choice.factors for s in found] == [
        ((), (), ()),
        (("data",), (), ()),
        ((), ("data",), ()),
        ((), (), ("data",)),
    ]
    reduced = found[2]
    assert reduced.natural[0].partial == {"data"}
    assert reduced.choice.results == (Layout(((), ())),)


def test_sums_are_reduced_scattered_or_left():
    found = strategies(DOT, VALUES, LINE, ALL)
    kept = [s.choice.results[0] for s in found if s.choice.factors[1]]
    assert kept == [
        Layout(((), ()), frozenset({"data"})),
        Layout(((), ())),
        Layout((("data",), ())),
        Layout(((), ("data",))),
    ]
    largest = Operation("reduce_max", "forward", (0, 1), (2,), PRODUCT)
    results = [
        s.choice.results[0] for s in strategies(largest, VALUES, LINE, ALL) if s.choice.factors[1]
    ]
    assert results == [Layout(((), ()))]  # no sum: neither left in parts nor scattered


def test_two_axes_may_cut_one_factor_or_two():
    found = {s.choice.factors for s in strategies(DOT, VALUES, MESH, NONE)}
    assert (("data", "model"), (), ()) in found
    assert (("data",), (), ("model",)) in found
    assert len(found) == 16


def test_factors_divide_evenly_and_axes_of_one_are_none():
    odd = ShardingRule((6, 1), (((0,), (1,)),), (((0,), (1,)),))
    operation = Operation("exp", "forward", (0,), (1,), odd)
    values = (Value((6, 1), 2), Value((6, 1), 2))
    assert [s.choice.factors for s in strategies(operation, values, LINE, NONE)] == [((), ())]
    found = [s.choice.factors for s in strategies(operation, values, MESH, NONE)]
    assert found == [((), ()), (("data",), ())]


def test_a_minor_factor_is_cut_only_once_the_major_one_is_used_up():
    merged = ShardingRule((2, 8), (((0, 1),),), (((0,), (1,)),))
    assert divides(merged, ((), ()), MESH)
    assert divides(merged, (("data",), ("model",)), MESH)
    assert not divides(merged, ((), ("model",)), MESH)
    assert not divides(merged, (("model",), ()), MESH)  # 2 is not divided by 4


def test_whole_and_permuted_factors_stay_whole():
    rule = ShardingRule(
        (8, 8, 8),
        (((0,), (1,), (2,)),),
        (((0,), (1,), (2,)),),
        whole=frozenset({1}),
        permutation=frozenset({2}),
    )
    operation = Operation("sort", "forward", (0,), (1,), rule)
    values = (Value((8, 8, 8), 2),) * 2
    found = [s.choice.factors for s in strategies(operation, values, LINE, NONE)]
    assert found == [((), (), ()), (("data",), (), ())]


def test_a_factor_that_a_result_lacks_without_summing_stays_whole():
    rule = ShardingRule((8, 8), (((0,), (1,)),), (((0,), ()),))
    operation = Operation("slice", "forward", (0,), (1,), rule)
    values = (Value((8, 8), 2), Value((8, 1), 2))
    found = [s.choice.factors for s in strategies(operation, values, LINE, NONE)]
    assert found == [((), ()), (("data",), ())]


def test_linear_operations_pass_summands_on():
    rule = ShardingRule((8, 8), (((0,), (1,)),) * 2, (((0,), (1,)),))
    operation = Operation("add_any", "backward", (0, 1), (2,), rule, linear=True)
    values = (Value((8, 8), 2),) * 3
    found = [s for s in strategies(operation, values, LINE, ALL) if s.choice.partial]
    assert {s.choice.results[0] for s in found} == {
        Layout(((), ()), frozenset({"data"})),
        Layout(((), ())),
        Layout((("data",), ())),
        Layout(((), ("data",))),
    }
    assert all(layout.partial == {"data"} for s in found for layout in s.operands)
    assert not [s for s in strategies(operation, values, LINE, NONE) if s.choice.partial]
