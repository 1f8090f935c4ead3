from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import Link
from hetpass.ir.operation_graph import Layout, OperationChoice
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.intra_op.setting import Setting
from hetpass.planner.intra_op.solve import solve
from tests.planner.intra_op.layer_graphs import transformer_block

LINK = Link(5e-6, 1e11)
MESH = LinkedMesh((("data", 2), ("model", 2)), (LINK, LINK), reduce_scatter=False)
GRAPH = transformer_block(4, 8, 16, 4)
SETTING = Setting(MESH, find_kind("A100-40"), 4)
WHOLE = Layout(((), (), ()))


@cache
def assignment():
    return solve(GRAPH, SETTING).assignment


def with_choice(found, number, **changes):
    operations = list(found.operations)
    operations[number] = replace(operations[number], **changes)
    return replace(found, operations=tuple(operations))


def number_of(name):
    return next(k for k, o in enumerate(GRAPH.operations) if o.name == name)


def broken(name):
    found = assignment()
    norm, dot = number_of("norm"), number_of("dot_general")
    kept = OperationChoice(((), (), ()), (WHOLE,))
    if name == "another mesh":
        return replace(found, mesh=(("data", 4),))
    if name == "fewer operations":
        return replace(found, operations=found.operations[:-1])
    if name == "recomputes":
        return replace(found, recompute=True)
    if name == "cuts what must stay whole":
        return with_choice(found, norm, factors=((), (), ("data",)), results=(WHOLE,))
    if name == "an axis twice":
        factors = (("data",), ("data",), ())
        return with_choice(found, norm, factors=factors, results=(WHOLE,))
    if name == "an unknown axis":
        return with_choice(found, norm, factors=(("other",), (), ()), results=(WHOLE,))
    if name == "too few factors":
        return with_choice(found, norm, factors=((),), results=(WHOLE,))
    if name == "partial operands of what is not linear":
        return with_choice(found, norm, partial=frozenset({"data"}))
    if name == "a partial result that is read":
        layout = Layout(((), (), (), ()), frozenset({"data"}))
        count = len(GRAPH.operations[dot].rule.sizes)
        return with_choice(found, dot, factors=((),) * count, results=(layout,))
    if name == "no layout of a residual":
        return replace(found, stored={v: x for v, x in found.stored.items() if v})
    if name == "a layout of another rank":
        return replace(found, stored={**found.stored, 0: Layout(((),))})
    if name == "no way back to partial":
        return with_choice(found, norm, factors=kept.factors, results=(Layout(((),) * 2),))
    if name == "a partial parameter":
        return replace(found, at_rest={**found.at_rest, 0: Layout(((),), frozenset({"data"}))})
    if name == "no accumulator":
        return replace(found, accumulators={})
    raise AssertionError(name)


@pytest.mark.parametrize(
    "name",
    [
        "another mesh",
        "fewer operations",
        "recomputes",
        "cuts what must stay whole",
        "an axis twice",
        "an unknown axis",
        "too few factors",
        "partial operands of what is not linear",
        "a partial result that is read",
        "no layout of a residual",
        "a layout of another rank",
        "no way back to partial",
        "a partial parameter",
        "no accumulator",
    ],
)
def test_what_cannot_run_is_listed(name):
    found = evaluate(GRAPH, SETTING, broken(name))
    assert found.violations
    assert found.step_s(4) == float("inf")


def test_ties_are_kept():
    out, given = GRAPH.activations_out[0], 0
    graph = replace(GRAPH, ties=((given, out),))
    found = assignment()
    stored = {**found.stored, given: Layout((("data",), (), ())), out: WHOLE}
    assert any(
        "tied" in v for v in evaluate(graph, SETTING, replace(found, stored=stored)).violations
    )


def test_a_worse_layout_of_a_parameter_costs_its_gathers():
    """At rest cut along data, in use whole: gathered once per step, or four times each way."""
    graph = transformer_block(4, 8, 16, 4)
    found = assignment()
    parameter = next(
        k for k, p in enumerate(graph.parameters) if graph.values[p.value].name == "up"
    )
    value = graph.parameters[parameter].value
    cut, whole = Layout((("data",), ())), Layout(((), ()))
    moved = replace(
        found,
        stored={**found.stored, value: whole},
        at_rest={**found.at_rest, parameter: cut},
        gathered_once=found.gathered_once | {parameter},
    )
    once = evaluate(graph, SETTING, moved)
    often = evaluate(
        graph, SETTING, replace(moved, gathered_once=found.gathered_once - {parameter})
    )
    size = graph.values[value].size_bytes
    gathers = once.bytes_of("all_gather", "once") - often.bytes_of("all_gather", "once")
    assert gathers == size
    for phase in ("forward", "backward"):
        assert often.bytes_of("all_gather", phase) - once.bytes_of("all_gather", phase) == size
    assert once.state_bytes - often.state_bytes == size
    assert often.gathered_bytes >= size
