"""Facts of programs: bytes against what partition makes of them, FLOPs against closed forms."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import optax
import pytest

from hetpass.analysis.region_recipes import region_recipes
from hetpass.analysis.summarize import summarize
from hetpass.cost.analytic import Submesh
from hetpass.cost.range_bytes import range_bytes
from hetpass.frontend.microbatch import split
from hetpass.frontend.segment import segment
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.facts import ProgramFacts
from hetpass.transforms.partition import partition_layers
from tests.analysis.partitioned_bytes import held_bytes, sent_bytes
from tests.frontend import layer_models as models
from tests.small_gpt import training

B = 8


def batch_of(model):
    tokens = jax.ShapeDtypeStruct((B, models.T), jnp.int32)
    return model, {"x": tokens, "y": tokens}


def llama(layers=3, **changes):
    shapes = models.llama_shapes(layers)
    return models.lm_step(models.llama), (*batch_of({**shapes, **changes}),)


def tied_llama():
    shapes = models.llama_shapes(3)
    del shapes["head"]
    return models.lm_step(models.llama), (*batch_of(shapes),)


def scan_llama(remat=False):
    shapes = models.llama_shapes(1)
    shapes["blocks"] = models.block_shapes(lead=(4,))

    def model(params, x):
        return models.scan_llama(params, x, remat)

    return models.lm_step(model), (*batch_of(shapes),)


def gpt(**shape):
    work = training(optimizer=optax.adamw(1e-3), **shape)
    state = jax.eval_shape(work.create, jax.random.key(0))
    batch = next(work.batches(B))
    return work.step, (state, jax.eval_shape(lambda: batch))


def mlp():
    x = jax.ShapeDtypeStruct((B, 6), jnp.float32)
    return models.mlp_step, (models.mlp_shapes(6, 10, 12, 4), {"x": x, "y": x.update(shape=(B, 4))})


STEPS = {
    "mlp": mlp,
    "llama": llama,
    "tied llama": tied_llama,
    "scan": scan_llama,
    "scan, recomputed": lambda: scan_llama(True),
    "gpt": gpt,
    "gpt, dropout": lambda: gpt(dropout=0.1),
    "gpt, recomputed": lambda: gpt(remat=True),
}


def facts_of(step, args, num_microbatches):
    traced = trace(step, args, {}, Signature())
    layered = segment(split(traced, num_microbatches))
    region = layered.program.region
    return layered, summarize(layered, region_recipes(region.eqns, region.invars))


def stage_of(cuts, count):
    return [sum(k >= cut for cut in cuts) for k in range(count)]


@pytest.mark.parametrize("name", STEPS)
def test_what_stages_hold_and_send_is_what_partition_makes(name):
    """Stages of some random cuts; at M = 4, and at M = 2 by the same facts."""
    step, args = STEPS[name]()
    layered, facts = facts_of(step, args, 4)
    other, _ = facts_of(step, args, 2)
    count = facts.num_layers
    draw = random.Random(name)
    for program, examples in ((layered, B // 4), (other, B // 2)):
        assert program.num_layers == count
        held = range_bytes(facts.layers, Submesh(1), examples, "none", facts.shared).per_microbatch
        for _ in range(3):
            stages = min(count, draw.randint(2, 4))
            cuts = sorted(draw.sample(range(1, count), stages - 1))
            staged = partition_layers(program, stage_of(cuts, count), stages)
            ends = itertools.pairwise([0, *cuts, count])
            assert [held[a, b] for a, b in ends] == pytest.approx(held_bytes(staged)), cuts
            forward, backward = sent_bytes(staged)
            for stage, cut in enumerate(cuts):
                layer = facts.layers[cut - 1]
                assert layer.boundary_bytes.of(examples) == pytest.approx(forward[stage])
                assert layer.gradient_boundary_bytes.of(examples) == pytest.approx(backward[stage])


@pytest.mark.parametrize("name", ["mlp", "tied llama", "scan", "gpt"])
def test_facts_from_any_number_of_microbatches_are_the_same(name):
    step, args = STEPS[name]()
    found = [facts_of(step, args, m)[1] for m in (1, 2, 4, 8)]
    for facts in found[1:]:
        assert facts.fingerprint == found[0].fingerprint
        for one, other in zip(found[0].layers, facts.layers, strict=True):
            assert one.kind == other.kind
            for examples in (1, 3, 8):
                for field in ("activation_bytes", "boundary_bytes", "gradient_boundary_bytes",
                              "forward_traffic_bytes", "backward_traffic_bytes"):  # fmt: skip
                    wanted = getattr(one, field).of(examples)
                    assert getattr(other, field).of(examples) == pytest.approx(wanted), field
                for direction in ("forward_flops", "backward_flops"):
                    wanted = {d: a.of(examples) for d, a in getattr(one, direction).items()}
                    got = {d: a.of(examples) for d, a in getattr(other, direction).items()}
                    assert got == pytest.approx(wanted)
            assert one.parameter_bytes == other.parameter_bytes
            assert one.state_bytes == other.state_bytes


@pytest.mark.parametrize("name", ["gpt", "gpt, dropout"])
def test_all_of_the_state_has_a_home(name):
    """Adam: two moments as large as the parameters that a layer owns, and nothing is lost."""
    step, (state, batch) = STEPS[name]()
    _, facts = facts_of(step, (state, batch), 4)
    leaves = jax.tree.leaves(state)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    twice = sum(pair.held_bytes for pair in facts.shared) / 2  # parameters, and as much gradient
    parameters = sum(layer.parameter_bytes for layer in facts.layers)
    assert parameters + sum(layer.state_bytes for layer in facts.layers) == pytest.approx(
        whole + twice, rel=1e-3
    )
    attention = next(x for x in facts.layers if "attn" in x.kind)
    assert attention.state_bytes == pytest.approx(2 * attention.parameter_bytes, rel=1e-2)
    assert attention.gradient_bytes == pytest.approx(attention.parameter_bytes, rel=1e-2)


def test_a_tied_embedding_is_held_once_by_a_stage_with_both_ends():
    step, args = tied_llama()
    _, facts = facts_of(step, args, 2)
    table = models.V * models.H * 4
    (pair,) = facts.shared
    assert (pair.first, pair.second) == (0, facts.num_layers - 1)
    assert pair.held_bytes == 2 * table  # the table and its accumulator
    ends = [facts.layers[0], facts.layers[-1]]
    assert all(layer.parameter_bytes >= table for layer in ends)
    assert all(layer.gradient_bytes >= table for layer in ends)


def test_flops_are_those_of_the_products():
    step, args = mlp()
    _, facts = facts_of(step, args, 4)
    per_example = [2 * a * b for a, b in ((6, 10), (10, 12), (12, 4))]
    forward = sum(x.forward_flops["float32"].per_example for x in facts.layers)
    backward = sum(x.backward_flops["float32"].per_example for x in facts.layers)
    assert forward == sum(per_example)
    # the first layer has no gradient of its input
    assert backward == 2 * sum(per_example) - per_example[0]
    assert all(x.forward_flops["float32"].per_microbatch == 0 for x in facts.layers)


def test_number_formats_are_told_apart():
    def step(params, batch):
        def loss(p):
            x = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16))
            return ((x.astype(jnp.float32) @ p["b"]) ** 2).mean()

        return models.sgd(params, jax.grad(loss)(params))

    args = ({"a": models.sds(6, 8), "b": models.sds(8, 4)}, {"x": models.sds(B, 6)})
    _, facts = facts_of(step, args, 2)
    formats = [dict(layer.forward_flops) for layer in facts.layers]
    total = {
        name: sum(f[name].of(1) for f in formats if name in f) for name in ("bfloat16", "float32")
    }
    assert total == {"bfloat16": 2 * 6 * 8, "float32": 2 * 8 * 4}


def test_a_step_that_runs_whole_has_amounts_per_microbatch_only():
    def step(params, batch):
        x = batch["x"]
        mixed = jax.nn.softmax(x @ x.T) @ x  # examples of the batch see each other
        loss, grads = jax.value_and_grad(lambda p: ((mixed @ p) ** 2).mean())(params)
        return params - grads, loss

    _, facts = facts_of(step, (models.sds(6, 4), {"x": models.sds(B, 6)}), 1)
    assert facts.batch_size == B
    for layer in facts.layers:
        for amount in (layer.activation_bytes, *layer.forward_flops.values()):
            assert amount.per_example == 0


def test_facts_travel_as_json(tmp_path):
    step, args = tied_llama()
    _, facts = facts_of(step, args, 2)
    facts.save(tmp_path / "facts.json")
    assert ProgramFacts.load(tmp_path / "facts.json") == facts


def test_tensor_parallelism_divides_the_matrices():
    step, args = llama()
    _, facts = facts_of(step, args, 2)
    inner = facts.layers[1:-1]
    assert {layer.most_tensor_parallel for layer in inner} == {16, 64}  # attention, MLP
    stream = models.T * models.H * 4
    assert {layer.reduced_bytes.of(1) for layer in inner} == {stream}
