"""Known answers, in bytes: each comes out of one free solve, with the costs that ask for it.

The compiler forms no reduce-scatters here unless a test says so; with them, an all-reduce may be
taken apart (sequence parallelism), which moves the same bytes and holds less.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import Link
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.intra_op.memory_sweep import pareto
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.setting import Setting
from hetpass.planner.intra_op.solve import solve
from tests.planner.intra_op.layer_graphs import (
    mlp,
    moe,
    tied_embedding,
    transformer_block,
)

A100, V100 = find_kind("A100-40"), find_kind("V100-32")
NVLINK, PCIE, NETWORK = Link(5e-6, 250e9), Link(1e-5, 12e9), Link(1e-5, 2e9)
HALF = 2  # bytes of an item


def line(devices, link=NVLINK, **capabilities):
    return LinkedMesh((("data", devices),), (link,), **{"reduce_scatter": False, **capabilities})


def repeated(graph):
    """A layer among equal ones: what comes in lies as what goes out."""
    inputs = [v for v, value in enumerate(graph.values) if value.role == "activation"]
    cotangents = [v for v, value in enumerate(graph.values) if value.role == "cotangent"]
    ties = (
        *zip(inputs, graph.activations_out, strict=True),
        *zip(cotangents, graph.cotangents_out, strict=True),
    )
    return replace(graph, ties=ties)


def priced(graph, mesh, kind=A100, num_microbatches=8, **more):
    setting = Setting(mesh, kind, num_microbatches, **more)
    answer = solve(graph, setting)
    found = evaluate(graph, setting, answer.assignment)
    assert found.violations == ()
    assert answer.gap < 1e-9
    return found


def kinds(found):
    return {kind for _, kind, _ in found.collectives}


@pytest.mark.parametrize("layers", [2, 4, 6, 8])
def test_an_mlp_under_tensor_parallelism(layers):
    """L/2 all-reduces of B·h forward, L/2 - 1 backward: L - 1 in all, and nothing else."""
    batch, width = 64, 4096
    found = priced(mlp(batch, width, layers, first=True), line(4), alone=False)
    assert kinds(found) <= {"all_reduce"}
    assert found.count_of("all_reduce", "forward") == layers // 2
    assert found.count_of("all_reduce", "backward") == layers // 2 - 1
    assert found.bytes_of("all_reduce") == (layers - 1) * batch * width * HALF


def test_a_block_with_fused_qkv_has_two_all_reduces_each_way():
    length, width = 512, 4096
    found = priced(repeated(transformer_block(1, length, width, 32)), line(4))
    assert kinds(found) == {"all_reduce"}
    for phase in ("forward", "backward"):
        assert found.count_of("all_reduce", phase) == 2
        assert found.bytes_of("all_reduce", phase) == 2 * length * width * HALF


def test_with_recomputation_one_more_all_reduce_comes_back():
    """Forward runs again up to the MLP's product: its own all-reduce is no more needed there.

    In a stage the layer's output is needed again as well, for the layers behind it.
    """
    graph = repeated(transformer_block(1, 512, 4096, 32))
    found = priced(graph, line(4), recompute=True, num_microbatches=1)
    assert found.count_of("all_reduce", "forward") == 2
    assert found.count_of("all_reduce", "backward") == 2 + 1
    inside = priced(graph, line(4), recompute=True, num_microbatches=1, alone=False)
    assert inside.count_of("all_reduce", "backward") == 2 + 2


def test_separate_q_k_v_are_merged_only_where_the_compiler_does_that():
    """Their three gradients of the input are one sum of all-reduces, or one all-reduce of a sum."""
    graph = repeated(transformer_block(1, 512, 4096, 32, fused=False))
    merged = priced(graph, line(4, merges_reductions=True))
    assert kinds(merged) == {"all_reduce"}
    assert merged.count_of("all_reduce", "backward") == 2
    apart = priced(graph, line(4))
    assert apart.step_s(8) > merged.step_s(8)


def test_reduce_scatters_take_all_reduces_apart():
    """Sequence parallelism: as many gathers and scatters, of the same bytes; less is held."""
    length, width = 512, 4096
    graph = repeated(transformer_block(1, length, width, 32))
    found = priced(graph, line(4, reduce_scatter=True))
    size = length * width * HALF
    for phase in ("forward", "backward"):
        assert found.bytes_of("all_gather", phase) == 2 * size
        assert found.bytes_of("reduce_scatter", phase) == 2 * size / 4
        assert found.count_of("all_reduce", phase) == 0
    assert found.residual_bytes < priced(graph, line(4)).residual_bytes


def test_data_parallelism_reduces_gradients_once_per_step():
    graph = repeated(transformer_block(64, 512, 256, 8))
    found = priced(graph, line(4))
    assert {when for when, _, _ in found.collectives} == {"once"}
    parameters = sum(p.accumulator_bytes for p in graph.parameters)
    assert found.bytes_of("all_reduce", "once") == parameters
    scattered = priced(graph, line(4, reduce_scatter=True))
    assert scattered.bytes_of("reduce_scatter", "once") == parameters / 4
    assert {when for when, _, _ in scattered.collectives} == {"once"}


@pytest.mark.parametrize("fast", ["data", "model"])
def test_tensor_parallelism_takes_the_fast_axis(fast):
    links = tuple(NVLINK if axis == fast else NETWORK for axis in ("data", "model"))
    mesh = LinkedMesh((("data", 2), ("model", 2)), links, reduce_scatter=False)
    found = priced(repeated(transformer_block(2, 512, 4096, 32)), mesh)
    per_microbatch = {axes for when, _, axes in found.collectives if when != "once"}
    assert per_microbatch == {(fast,)}


def test_experts_cost_two_all_to_alls_each_way():
    groups, tokens, experts, capacity, width = 8, 1024, 8, 256, 1024
    graph = moe(groups, tokens, experts, capacity, width, 4096)
    found = priced(repeated(graph), line(8))
    assert kinds(found) == {"all_to_all"}
    size = groups * experts * capacity * width * HALF / 8
    for phase in ("forward", "backward"):
        assert found.count_of("all_to_all", phase) == 2
        assert found.bytes_of("all_to_all", phase) == 2 * size


def test_a_table_over_the_vocabulary_costs_one_all_reduce():
    """A tied table is cut where the logits are; a lookup then is a sum of parts.

    Backward adds the one for the gradient of what the logits read, and none for the table's.
    """
    batch, length, width = 4, 64, 4096
    found = priced(tied_embedding(batch, length, 50304, width), line(4), alone=False)
    assert kinds(found) == {"all_reduce"}
    assert found.count_of("all_reduce", "forward") == 1
    assert found.count_of("all_reduce", "backward") == 1
    assert found.bytes_of("all_reduce", "forward") == batch * length * width * HALF


def test_zero_1_2_3_appear_as_memory_tightens():
    """State is always cut; then accumulators (a scatter in every microbatch); then parameters."""
    devices, width = 8, 1024
    graph = repeated(transformer_block(64, 512, width, 16))
    setting = Setting(line(devices, Link(5e-6, 25e9), reduce_scatter=True), A100, 8)
    answers = [
        (answer, evaluate(graph, setting, answer.assignment))
        for answer in pareto(program(graph, setting))
    ]
    weights = 12 * width**2
    first, last = answers[0][1], answers[-1][1]
    assert {when for when, _, _ in first.collectives} == {"once"}  # ZeRO-1
    assert first.bytes_of("reduce_scatter", "once") == pytest.approx(
        weights * 4 / devices, rel=1e-2
    )
    assert first.bytes_of("all_gather", "once") == pytest.approx(weights * HALF, rel=1e-2)
    second = next(
        found
        for _, found in answers
        if found.bytes_of("reduce_scatter", "backward") >= weights * HALF / devices
    )
    assert second.bytes_of("all_gather", "backward") == 0  # ZeRO-2
    assert last.bytes_of("reduce_scatter", "backward") == pytest.approx(
        weights * HALF / devices, rel=1e-2
    )
    for phase in ("forward", "backward"):  # ZeRO-3
        assert last.bytes_of("all_gather", phase) == pytest.approx(weights * HALF, rel=1e-2)
    memories = [answer.memory_bytes for answer, _ in answers]
    assert memories == sorted(memories, reverse=True)
    state = sum(p.state_bytes + p.accumulator_bytes for p in graph.parameters)
    assert last.state_bytes == pytest.approx(state / devices, rel=1e-2)


def test_few_examples_are_tensor_parallel_and_many_are_data_parallel():
    mesh = line(4, reduce_scatter=True)

    def per_microbatch(batch):
        graph = repeated(mlp(batch, 2048, 2, 8192))
        found = priced(graph, mesh, num_microbatches=16)
        return {kind for when, kind, _ in found.collectives if when == "forward"}

    assert "reduce_scatter" in per_microbatch(64)
    assert per_microbatch(1 << 16) == set()


def test_the_same_layer_is_cut_otherwise_on_other_links():
    """GPT 2.6B: A100 with NVLink talk in every microbatch, V100 with PCIe once per step."""
    graph = repeated(transformer_block(4, 1024, 2560, 32))

    def whens(link, kind):
        mesh = line(4, link, reduce_scatter=True, merges_reductions=True)
        found = priced(graph, mesh, kind, num_microbatches=4)
        return {when for when, _, _ in found.collectives}

    assert whens(PCIE, V100) == {"once"}
    assert whens(NVLINK, A100) == {"forward", "backward", "once"}
