"""Graphs of layers: what is a parameter, a residual, a boundary; loops; equal kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from hetpass.analysis.operation_graph import operation_graphs
from hetpass.analysis.state_groups import state_groups
from hetpass.frontend.microbatch import split
from hetpass.frontend.segment import segment
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.operation_graph import OperationGraph
from hetpass.ir.program import Layered

B, H = 16, 8


def layered(step: Callable[..., Any], state: Any, batch: Any, count: int = 2) -> Layered:
    traced = trace(step, (state, batch), {}, Signature(batch_argnums=(1,)))
    return segment(split(traced, count))


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp_step(layers: int, optimizer: Any) -> tuple[Callable[..., Any], Any]:
    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return (x**2).mean()

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        grads = jax.grad(loss)(params, x)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    params = [(array(H, H), array(H)) for _ in range(layers)]
    return step, (params, jax.eval_shape(optimizer.init, params))


def scan_step() -> tuple[Callable[..., Any], Any]:
    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))

    return step, array(4, H, H)


def check(graph: OperationGraph) -> None:
    """What every graph keeps: operations run in order, and rules fit their values."""
    made = {v for v, value in enumerate(graph.values) if value.role != "inner"}
    for operation in graph.operations:
        assert made.issuperset(operation.operands), operation
        assert not made.intersection(operation.results), operation
        made.update(operation.results)
        if operation.rule is not None:
            sides = (
                (operation.operands, operation.rule.operands),
                (operation.results, operation.rule.results),
            )
            for numbers, factors in sides:
                shapes = [graph.values[v].shape for v in numbers]
                assert [len(s) for s in shapes] == [len(f) for f in factors]
        assert operation.flops >= 0
        assert operation.traffic_bytes >= 0
    phases = [operation.phase for operation in graph.operations]
    assert phases == sorted(phases, reverse=True)  # forward, then backward
    assert made == set(range(len(graph.values)))


def test_parameters_have_gradients_and_state() -> None:
    program = layered(*mlp_step(3, optax.adam(1e-3)), array(B, H))
    graphs = operation_graphs(program)
    for graph in graphs:
        check(graph)
        assert graph.unknown == ()
    named = {graph.values[p.value].name: p for graph in graphs for p in graph.parameters}
    sizes = {
        graph.values[p.value].shape: p.state_bytes for graph in graphs for p in graph.parameters
    }
    assert all(p.gradient is not None for p in named.values())
    assert sizes[H, H] == 3 * 4 * H * H  # master copy, two moments
    assert {p.accumulator_bytes for p in named.values()} == {4.0 * H * H, 4.0 * H}


def test_gradients_that_the_epilogue_transposes_belong_to_their_parameter() -> None:
    program = layered(*mlp_step(2, optax.sgd(0.1)), array(B, H))
    groups = state_groups(program.program)
    assert [len(g.leaves) for g in groups] == [1, 1, 1, 1]
    assert all(len(g.gradients) == 1 and len(g.reads) == 1 for g in groups)


def test_a_scan_over_layers_is_one_iteration() -> None:
    program = layered(*scan_step(), array(B, H))
    assert program.num_layers >= 4
    kinds = program.layer_kinds
    graphs = operation_graphs(program)
    for graph in graphs:
        check(graph)
    graph = graphs[max(kinds, key=kinds.count)]
    (parameter,) = graph.parameters
    assert graph.values[parameter.value].shape == (H, H)
    assert parameter.state_bytes == 4 * H * H
    assert parameter.gradient is not None
    assert graph.values[parameter.gradient].shape == (H, H)
    assert len(graph.activations_out) == len(graph.cotangents_out) == 1
    ends = {graph.values[v].role for pair in graph.ties for v in pair}
    assert ends == {"activation", "cotangent", "inner"}


def test_a_loop_inside_a_layer_runs_many_times() -> None:
    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            def cell(h: Any, x: Any) -> Any:
                h = jnp.tanh(h @ w + x)
                return h, h

            return jax.lax.scan(cell, jnp.zeros((B, H)), batch.swapaxes(0, 1))[1].mean()

        return w - 0.1 * jax.grad(loss)(w)

    graphs = operation_graphs(layered(step, array(H, H), array(B, 5, H), 1))
    loops = [o for g in graphs for o in g.operations if o.count > 1]
    assert {o.count for o in loops} == {5}
    assert "dot_general" in {o.name for o in loops}
    for graph in graphs:
        check(graph)
    assert any(graph.ties for graph in graphs)
    entering = [o for g in graphs for o in g.operations if o.name == "scan unstack"]
    assert entering
    assert all(o.rule is not None and o.rule.whole for o in entering)


@pytest.mark.parametrize("name", ["while", "cond"])
def test_branches_and_open_loops_are_followed(name: str) -> None:
    def body(x: Any, w: Any) -> Any:
        if name == "cond":
            return jax.lax.cond(w.sum() > 0, lambda x: jnp.sin(x @ w), lambda x: x @ w, x)
        return jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x)
        )[1]

    def step(w: Any, x: Any) -> Any:
        return body(x, w)

    graphs = operation_graphs(layered(step, array(H, H), array(B, H)))
    for graph in graphs:
        check(graph)
    names = {o.name for g in graphs for o in g.operations}
    assert "dot_general" in names
    assert any(n.startswith(name) for n in names)


def test_traffic_leaves_out_what_is_fused() -> None:
    """tanh between two products is written once and read once; the sum in between never."""
    program = layered(*mlp_step(2, optax.sgd(0.1)), array(B, H))
    graph = operation_graphs(program)[0]
    forward = [o for o in graph.operations if o.phase == "forward"]
    total = sum(o.traffic_bytes for o in forward)
    unfused = sum(graph.values[v].size_bytes for o in forward for v in (*o.operands, *o.results))
    assert 0 < total < unfused
    flops = {o.name: o.flops for o in forward}
    assert flops["dot_general"] == 2 * (B // 2) * H * H


def test_equal_programs_give_equal_graphs() -> None:
    one = operation_graphs(layered(*mlp_step(3, optax.adam(1e-3)), array(B, H)))
    other = operation_graphs(layered(*mlp_step(3, optax.adam(1e-3)), array(B, H)))
    assert one == other
