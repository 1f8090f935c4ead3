"""The known answers again, from jaxprs of whole steps: each layer solved, the model chained."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.models import gpt_linen, gpt_nnx
from benchmarks.models.sizes import GPT_SIZES
from hetpass.analysis.operation_graph import operation_graphs
from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.frontend.microbatch import split
from hetpass.frontend.segment import segment
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import Link
from hetpass.planner.intra_op.boundary import boundary_table
from hetpass.planner.intra_op.chain import chained
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.setting import Setting

A100, V100 = find_kind("A100-40"), find_kind("V100-32")
NVLINK, PCIE = Link(5e-6, 250e9), Link(1e-5, 12e9)
HALF = 2


def array(*shape, dtype="float16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def graphs(step, state, batch, num_microbatches):
    traced = trace(step, (state, batch), {}, Signature(batch_argnums=(1,)))
    layered = segment(split(traced, num_microbatches))
    return operation_graphs(layered), tuple(layered.layer_kinds)


def line(link=NVLINK, **capabilities):
    return LinkedMesh((("data", 4),), (link,), **{"reduce_scatter": False, **capabilities})


def priced(layers, setting, price=0.0):
    """One evaluation per layer, of the best assignment of the whole model.

    Args:
      price: of memory, seconds of a step per byte.
    """
    found, kinds = layers
    tables = [boundary_table(program(graph, setting), price) for graph in found]
    chain = chained(tables, kinds)
    assert np.isclose(chain.costs[0, -1], chain.lower[0, -1])
    evaluations = []
    for kind, (left, right) in zip(kinds, chain.path(0, len(kinds)), strict=True):
        table = chain.tables[kind]
        assignment = table.made.assignment(table.choices(left, right))
        evaluations.append(evaluate(found[kind], setting, assignment))
        assert evaluations[-1].violations == ()
    return evaluations


def mlp_step(ws, x):
    def loss(ws):
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return (y.astype("float32") ** 2).mean()

    gradients = jax.grad(loss)(ws)
    return [w - (0.1 * g).astype(w.dtype) for w, g in zip(ws, gradients, strict=True)]


@pytest.mark.parametrize("layers", [2, 4, 6])
def test_an_mlp_has_one_all_reduce_less_than_layers(layers):
    width, microbatches, examples = 4096, 8, 64
    ws, x = [array(width, width)] * layers, array(microbatches * examples, width)
    found = priced(
        graphs(mlp_step, ws, x, microbatches),
        Setting(line(), A100, microbatches, alone=False),
    )
    assert {kind for e in found for _, kind, _ in e.collectives} == {"all_reduce"}
    assert sum(e.count_of("all_reduce", "forward") for e in found) == layers // 2
    assert sum(e.count_of("all_reduce", "backward") for e in found) == layers // 2 - 1
    size = examples * width * HALF
    assert sum(e.bytes_of("all_reduce") for e in found) == (layers - 1) * size


def test_an_mlp_of_many_examples_reduces_its_gradients_once():
    width, microbatches, layers = 256, 8, 4
    ws, x = [array(width, width)] * layers, array(microbatches * 65536, width)
    found = priced(
        graphs(mlp_step, ws, x, microbatches),
        Setting(line(), A100, microbatches, alone=False),
    )
    assert {when for e in found for when, _, _ in e.collectives} == {"once"}
    assert sum(e.bytes_of("all_reduce", "once") for e in found) == layers * width * width * 4


@cache
def gpt(library, batch, num_microbatches, length=1024):
    """GPT 2.6B with two blocks; attention and MLP are layers of their own."""
    config = dataclasses.replace(
        GPT_SIZES["2.6B"],
        layers=2,
        seq=length,
        remat=False,
        dtype="float16",
        param_dtype="float32",
    )
    optimizer = optax.adam(1e-3)
    if library == "linen":
        create, step = gpt_linen.make_create_state(config, optimizer), gpt_linen.train_step
    else:
        create = gpt_nnx.make_create_state(config, optimizer)
        step = gpt_nnx.make_train_step(config, optimizer)
    state = jax.eval_shape(create, jax.random.key(0))
    tokens = array(batch, length, dtype="int32")
    return graphs(step, state, {"tokens": tokens, "labels": tokens}, num_microbatches)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_a_gpt_block_has_two_all_reduces_each_way(library):
    """One each way for attention, one each way for the MLP."""
    length = 512
    layers = gpt(library, 2, 2, length)
    found = priced(layers, Setting(line(), A100, 2, alone=False))
    for layer in found[1:-1]:
        assert {kind for _, kind, _ in layer.collectives} == {"all_reduce"}
        for phase in ("forward", "backward"):
            assert layer.count_of("all_reduce", phase) == 1
            assert layer.bytes_of("all_reduce", phase) == length * 2560 * HALF
        assert layer.count_of("all_reduce", "once") == 0


def test_gpt_is_cut_otherwise_on_a100_with_nvlink_and_on_v100_with_pcie():
    """Four examples a microbatch: tensor parallel MLPs on one, data parallelism on the other."""
    layers = gpt("linen", 32, 8)

    def blocks(link, kind):
        mesh = line(link, reduce_scatter=True, merges_reductions=True)
        return priced(layers, Setting(mesh, kind, 8, 4, alone=False))[2:-1]

    for layer in blocks(PCIE, V100):
        assert {when for when, _, _ in layer.collectives} == {"once"}
    fast = blocks(NVLINK, A100)
    size = 4 * 1024 * 2560 * HALF
    assert any(layer.bytes_of("all_gather", "forward") == size for layer in fast)
    assert any(layer.bytes_of("reduce_scatter", "forward") == size / 4 for layer in fast)


def test_whole_blocks_are_tensor_parallel_on_nvlink_and_data_parallel_on_pcie():
    """2,048 tokens a microbatch, 32 microbatches; 100 MB are worth 10 ms of a step on both.

    Without that price attention on NVLink does better than tensor parallelism: forward runs on
    whole weights, that are gathered once per step, and only the products of backward are cut.
    """
    length, microbatches = 512, 32
    layers = gpt("linen", 4 * microbatches, microbatches, length)
    size = 4 * length * 2560 * HALF

    def blocks(link, kind, price):
        mesh = line(link, reduce_scatter=True, merges_reductions=True)
        setting = Setting(mesh, kind, microbatches, 4, alone=False)
        return priced(layers, setting, price)[1:-1]

    for layer in blocks(NVLINK, A100, 1e-10):  # attention and MLP, twice
        for phase in ("forward", "backward"):
            assert layer.bytes_of("all_gather", phase) >= size
            assert layer.count_of("reduce_scatter", phase) == 1
            assert layer.bytes_of("reduce_scatter", phase) == size / 4
        assert layer.bytes_of("all_gather", "once") < 1e5  # biases and norms alone
    for layer in blocks(PCIE, V100, 1e-10)[1:]:
        assert {when for when, _, _ in layer.collectives} == {"once"}
        assert layer.bytes_of("all_gather", "once") > 5e7  # the weights
    attention = blocks(NVLINK, A100, 0.0)[2]
    assert attention.bytes_of("all_gather", "forward") == 0
    assert attention.bytes_of("all_gather", "once") > 5e7
