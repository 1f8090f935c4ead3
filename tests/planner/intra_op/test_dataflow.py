from __future__ import annotations

from dataclasses import replace

from hetpass.ir.operation_graph import Operation, OperationGraph, Parameter, Value
from hetpass.planner.intra_op.dataflow import Dataflow, Reader
from tests.planner.intra_op.layer_graphs import mlp, transformer_block


def names(graph, numbers):
    return [graph.operations[k].name for k in sorted(numbers)]


def test_readers_and_producers():
    graph = mlp(4, 8, 1)
    flow = Dataflow(graph)
    assert flow.producers[graph.operations[0].results[0]] == (0, 0)
    assert Reader(0, 1) in flow.readers[1]
    assert flow.reading_phases(1) == {"forward", "backward"}


def test_residuals_are_what_backward_reads_of_forward():
    graph = mlp(4, 8, 2)
    flow = Dataflow(graph)
    roles = {graph.values[v].role for v in flow.residuals}
    assert roles == {"activation", "inner"}  # no parameters, no cotangents
    assert 0 in flow.residuals
    assert flow.residuals <= flow.canonical


def test_what_is_remade_is_not_held():
    graph = mlp(4, 8, 2)
    tanh = next(k for k, o in enumerate(graph.operations) if o.name == "tanh")
    result = graph.operations[tanh].results[0]
    remade = Dataflow(
        replace(
            graph,
            operations=tuple(replace(o, remade=k == tanh) for k, o in enumerate(graph.operations)),
        )
    )
    assert result in Dataflow(graph).residuals
    assert remade.residuals == Dataflow(graph).residuals - {result} | {
        *graph.operations[tanh].operands
    }
    assert remade.phases[tanh] == {"forward", "backward"}
    assert all(remade.phases[k] == {o.phase} for k, o in enumerate(graph.operations) if k != tanh)


def test_what_runs_again_serves_backward_or_the_next_layer():
    graph = mlp(4, 8, 2)
    flow = Dataflow(graph)
    assert names(graph, flow.repeated(alone=True)) == ["dot_general", "tanh", "dot_general"]
    assert names(graph, flow.repeated(alone=False)) == ["dot_general", "tanh"] * 2


def test_summands_lead_to_accumulators_through_linear_operations():
    graph = transformer_block(2, 4, 8, 2)
    flow = Dataflow(graph)
    gradients = {p.gradient for p in graph.parameters}
    found = flow.summands(merging=False)
    assert found
    assert found <= gradients | {
        v for o in graph.operations for v in o.results if o.phase == "backward"
    }
    assert gradients & found
    assert found < flow.summands(merging=True)
    assert not found & flow.canonical


def test_nothing_is_left_partial_inside_a_loop():
    graph = mlp(4, 8, 1)
    looped = replace(graph, operations=tuple(replace(o, count=3) for o in graph.operations))
    assert Dataflow(graph).summands(merging=True)
    assert not Dataflow(looped).summands(merging=True)


def test_a_parameter_that_is_read_in_two_forms_has_one_accumulator():
    values = (Value((4, 4), 2, "parameter"), Value((16,), 2, "parameter"), Value((4, 4), 2))
    operation = Operation("copy", "backward", (0,), (2,), None)
    graph = OperationGraph(
        values,
        (operation,),
        (Parameter(0, 2, 96.0, 64.0), Parameter(1, 2, 0.0, 64.0)),
        accumulated=(2,),
    )
    flow = Dataflow(graph)
    assert flow.owners == {2: 0}
    assert [flow.gradient(0), flow.gradient(1)] == [2, None]
