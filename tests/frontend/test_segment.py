"""segment: legality over many programs, and the quality that the planner relies on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hetpass._jax import Literal, name_stack
from hetpass.analysis.duplicable import duplicable_equations
from hetpass.analysis.flops import equation_flops, equation_matmul_flops
from hetpass.frontend.boundary import stage_boundary
from hetpass.frontend.segment import segment
from tests.frontend import layer_models as m
from tests.frontend.layer_checks import faults
from tests.frontend.step_programs import step_program

LM = m.lm_step(m.llama)
RESIDUAL_BYTES = 4.0 * m.B * m.T * m.H


def tied(layers):
    shapes = m.llama_shapes(layers)
    del shapes["head"]
    return shapes


def scanned(layers):
    return {**m.llama_shapes(1), "blocks": m.block_shapes(lead=(layers,))}


def eval_loss(params, batch):
    return m.entropy(m.llama(params, batch["x"]), batch["y"])


def grads_only(params, batch):
    return jax.grad(eval_loss)(params, batch)


def remat_lm(params, batch):
    def model(p, x):
        x = p["embed"][x]
        table = m.rotary(m.H // m.HEADS)
        for block in p["blocks"]:
            x = jax.checkpoint(lambda b, x: m.block(b, x, table))(block, x)
        return m.norm(p["norm"], x) @ p["head"]

    return m.lm_step(model)(params, batch)


def penalty_of_gradient(params, batch):
    """A gradient inside the loss: backward equations in the forward pass of the outer one."""

    def loss(p):
        inner = jax.grad(lambda x: m.mlp(p, x).sum())(batch["x"])
        return (inner**2).mean() + (m.mlp(p, batch["x"]) ** 2).mean()

    return m.sgd(params, jax.grad(loss)(params))


def linear_transpose_only(params, batch):
    _, pull = jax.vjp(lambda w: batch["x"] @ w, params)
    return pull(jnp.ones((m.B, 8)))


PROGRAMS = {
    "mlp": (m.mlp_step, m.mlp_shapes(16, 32, 64, 8), m.vectors(16, 8)),
    "llama": (LM, m.llama_shapes(3), m.tokens()),
    "tied": (LM, tied(2), m.tokens()),
    "remat": (remat_lm, m.llama_shapes(3), m.tokens()),
    "scan": (m.lm_step(m.scan_llama), scanned(4), m.tokens()),
    "scan remat": (m.lm_step(lambda p, x: m.scan_llama(p, x, True)), scanned(4), m.tokens()),
    "unet": (m.unet_step, m.unet_shapes(), m.images()),
    "resnet": (m.resnet_step, m.resnet_shapes(4), m.images()),
    "distill": (
        m.distill_step,
        {"teacher": m.llama_shapes(4), "student": m.llama_shapes(2)},
        m.tokens(),
    ),
    "gan": (
        m.gan_step,
        {"g": m.mlp_shapes(4, 16, 16, 12), "d": m.mlp_shapes(12, 16, 16, 1)},
        {"z": m.sds(4, 4), "x": m.sds(4, 12)},
    ),
    "metrics": (m.metrics_step, m.mlp_shapes(16, 16, 16, 16, 16), m.vectors(16, 16)),
    "lora": (m.lora_step, m.lora_shapes(2), m.tokens()),
    "forward only": (eval_loss, m.llama_shapes(2), m.tokens()),
    "gradients only": (grads_only, m.llama_shapes(2), m.tokens()),
    "gradient penalty": (penalty_of_gradient, m.mlp_shapes(8, 8, 8), m.vectors(8, 8)),
    "backward only": (linear_transpose_only, m.sds(8, 8), m.vectors(8, 8)),
    "elementwise": (lambda s, b: (s + b["x"].sum(), jnp.tanh(b["x"])), m.sds(), m.vectors(3, 3)),
    "identity": (lambda s, b: (s, b), m.sds(3), m.vectors(3, 3)),
}
_LAYERED = {}


def layered(name):
    if name not in _LAYERED:
        _LAYERED[name] = segment(step_program(*PROGRAMS[name]))
    return _LAYERED[name]


def heavy(value):
    """(equation number, equation) of the products and convolutions."""
    eqns = value.program.region.eqns
    return [(n, e) for n, e in enumerate(eqns) if equation_matmul_flops(e) > 0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_legal(name):
    assert faults(layered(name)) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_flops_add_up(name):
    value = layered(name)
    total = sum(equation_flops(e) for e in value.program.region.eqns)
    assert sum(value.forward_flops) + sum(value.backward_flops) == pytest.approx(total)


@pytest.mark.parametrize("name", ["llama", "gan", "scan", "unet"])
def test_the_new_program_computes_the_same(name):
    step, state, batch = PROGRAMS[name]
    before = step_program(step, state, batch)
    after = segment(before).program
    draw = np.random.default_rng(0)
    values = [
        draw.integers(0, 8, v.aval.shape).astype(v.aval.dtype)
        if np.issubdtype(v.aval.dtype, np.integer)
        else draw.normal(size=v.aval.shape).astype(v.aval.dtype) * 0.3
        for v in before.region.invars
    ]
    want = jax.core.eval_jaxpr(before.region, (), *values)
    got = jax.core.eval_jaxpr(after.region, (), *values)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_deterministic():
    first, second = (segment(step_program(*PROGRAMS["llama"])) for _ in range(2))
    assert first.spans == second.spans
    assert first.backward == second.backward
    assert first.layer_kinds == second.layer_kinds
    assert first.names == second.names
    assert first.cut_bytes == second.cut_bytes


# ---------------------------------------------------------------------------------------------
# Quality


def test_transformer_layers_are_embedding_attention_mlp_head():
    value = segment(step_program(LM, m.llama_shapes(12), m.tokens()))
    assert value.num_layers == 26
    assert value.layer_kinds == (0, *(1, 2) * 12, 3)
    assert value.cut_bytes == (RESIDUAL_BYTES,) * 25


@pytest.mark.parametrize("name", ["llama", "remat", "scan", "scan remat", "lora"])
def test_only_the_residual_stream_crosses(name):
    value = layered(name)
    assert value.cut_bytes == (RESIDUAL_BYTES,) * (value.num_layers - 1)
    backward = backward_cut_bytes(value)
    crossed = [b for b in backward if b]
    assert crossed == [RESIDUAL_BYTES] * len(crossed)
    frozen_layers = 1 if name == "lora" else 0  # nothing trains below the first adapter
    assert len(crossed) == len(backward) - frozen_layers


def backward_cut_bytes(value):
    """Entry i: bytes of backward values that travel from above cut i to below."""
    eqns = value.program.region.eqns
    total = [0.0] * (value.num_layers - 1)
    duplicable = duplicable_equations(value.program)
    for number, eqn in enumerate(eqns):
        if not value.backward[number] or duplicable[number]:
            continue
        if value.spans[number].first < value.spans[number].last:
            for cut in range(value.spans[number].first, value.spans[number].last):
                total[cut] += RESIDUAL_BYTES  # the carry
        for var in eqn.outvars:
            readers = [
                value.spans[r].last
                for r, e in enumerate(eqns)
                if any(a is var for a in e.invars if not isinstance(a, Literal))
            ]
            lowest = min(readers, default=value.num_layers)
            for cut in range(lowest, value.spans[number].first):
                total[cut] += 4.0 * var.aval.size
    return total


@pytest.mark.parametrize("name", ["llama", "lora", "resnet", "unet", "mlp", "gan", "metrics"])
def test_a_parameter_is_read_on_one_layer_only(name):
    """Then also every backward equation of a block lies in that block's layers."""
    value = layered(name)
    readers = {}
    for number, eqn in heavy(value):
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom in value.program.region.invars:
                readers.setdefault(atom, set()).add(value.spans[number].first)
    weights = {v: r for v, r in readers.items() if len(v.aval.shape) != 1}
    batch = value.program.region.invars[-2:]
    assert {v: r for v, r in weights.items() if len(r) > 1 and v not in batch} == {}


def test_tied_embedding_is_read_at_both_ends_only():
    value = layered("tied")
    table = next(v for v in value.program.region.invars if v.aval.shape == (m.V, m.H))
    layers = {
        value.spans[n].first
        for n, e in enumerate(value.program.region.eqns)
        if any(a is table for a in e.invars)
    }
    assert layers == {0, value.num_layers - 1}


def test_product_flops_in_closed_form():
    value = segment(step_program(LM, m.llama_shapes(2), m.tokens()))
    b, t, h, v = m.B, m.T, m.H, m.V
    attention = 4 * 2 * b * t * h * h + 2 * 2 * b * t * t * h
    mlp = 3 * 2 * b * t * h * 4 * h
    head = 2 * b * t * h * v
    forward = [0.0] * value.num_layers
    backward = [0.0] * value.num_layers
    for number, eqn in heavy(value):
        side = backward if value.backward[number] else forward
        side[value.spans[number].first] += equation_matmul_flops(eqn)
    assert forward == [0, attention, mlp, attention, mlp, head]
    assert backward == [2 * f for f in forward]


def test_checkpointed_block_is_one_layer_and_recomputes_itself():
    value = layered("remat")
    assert value.num_layers == 5
    assert value.layer_kinds == (0, 1, 1, 1, 2)
    forward = layered("llama")
    block = forward.forward_flops[3] + forward.forward_flops[4]
    assert value.backward_flops[2] > 2.5 * block


def test_scan_iterations_are_layers_and_the_reversed_scan_has_the_same():
    for name in ("scan", "scan remat"):
        value = layered(name)
        scans = [
            (value.spans[n], value.backward[n])
            for n, e in enumerate(value.program.region.eqns)
            if e.primitive.name == "scan"
        ]
        assert [(s.first, s.last, late) for s, late in scans] == [(1, 4, False), (1, 4, True)]
        assert value.num_layers == 6
        assert value.layer_kinds == (0, 1, 1, 1, 1, 2)


def test_scan_over_time_is_one_layer():
    def step(params, batch):
        def cell(h, x):
            return jnp.tanh(x @ params["in"] + h @ params["rec"]), None

        def loss(p):
            def cell(h, x):
                h = jnp.tanh(x @ p["in"] + h @ p["rec"])
                return h, h

            start = jnp.zeros((batch["x"].shape[0], 8))
            _, hs = lax.scan(cell, start, batch["x"].swapaxes(0, 1))
            return (hs.swapaxes(0, 1) @ p["out"]).mean()

        return m.sgd(params, jax.grad(loss)(params))

    params = {"in": m.sds(6, 8), "rec": m.sds(8, 8), "out": m.sds(8, 3)}
    value = segment(step_program(step, params, {"x": m.sds(4, 5, 6)}))
    assert faults(value) == []
    assert all(s.first == s.last for s in value.spans)


def test_scan_longer_than_max_layers_stays_whole():
    program = step_program(m.lm_step(m.scan_llama), scanned(6), m.tokens())
    value = segment(program, max_layers=5)
    assert faults(value) == []
    assert value.num_layers == 3


def test_every_dense_is_a_layer():
    value = layered("mlp")
    assert [value.spans[n].first for n, _ in heavy(value) if not value.backward[n]] == [0, 1, 2]
    # Each weight gradient is made where its weight is; the first layer has no input gradient.
    assert sorted(value.spans[n].first for n, _ in heavy(value) if value.backward[n]) == [
        0,
        1,
        1,
        2,
        2,
    ]


def test_unet_is_cut_between_its_convolutions():
    value = layered("unet")
    forward = [value.spans[n].first for n, _ in heavy(value) if not value.backward[n]]
    assert forward == list(range(11))


def test_residual_blocks_are_not_cut_inside():
    value = layered("resnet")
    forward = [value.spans[n].first for n, _ in heavy(value) if not value.backward[n]]
    assert forward == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_second_forward_passes_run_along_the_first():
    value = layered("metrics")
    forward = [value.spans[n].first for n, _ in heavy(value) if not value.backward[n]]
    assert value.num_layers == 4
    # The pass without dropout, then the training pass from the second product on; the first
    # product and the third pass are common subexpressions.
    assert forward == [0, 1, 2, 3, 1, 2, 3]


def test_discriminator_on_real_images_shares_the_layers_of_the_one_on_fakes():
    value = layered("gan")
    forward = [value.spans[n].first for n, _ in heavy(value) if not value.backward[n]]
    assert forward == [0, 1, 2, 3, 4, 5, 3, 4, 5]


def test_teacher_and_student_run_side_by_side():
    value = layered("distill")
    teacher, student = [], []
    names = {v: leaf for v, leaf in zip(value.program.region.invars, range(1000), strict=False)}
    students = len(jax.tree.leaves(m.llama_shapes(2)))
    for n, eqn in heavy(value):
        if not value.backward[n]:
            read = [names[a] for a in eqn.invars if not isinstance(a, Literal) and a in names]
            for leaf in read:
                (student if leaf < students else teacher).append(value.spans[n].first)
    assert value.num_layers == 10
    assert student == sorted(student)
    assert student[0] <= 2
    assert student[-1] == value.num_layers - 1
    assert sorted(set(teacher)) == list(range(1, 10))


def test_max_layers_merges_equal_blocks_equally():
    program = step_program(LM, m.llama_shapes(4), m.tokens())
    value = segment(program, max_layers=6)
    assert faults(value) == []
    assert value.num_layers == 6
    assert value.layer_kinds == (0, 1, 1, 1, 1, 2)
    assert segment(program, max_layers=1).num_layers == 1


def test_boundaries_are_cuts_before_their_marks():
    def model(params, x):
        x = jax.nn.relu(x @ params[0]["w"])
        x = stage_boundary(x, "middle")
        x = jax.nn.relu(x @ params[1]["w"])
        return x @ params[2]["w"]

    def step(params, batch):
        grads = jax.grad(lambda p: (model(p, batch["x"]) ** 2).mean())(params)
        return m.sgd(params, grads)

    program = step_program(step, m.mlp_shapes(16, 16, 16, 16), m.vectors(16, 16))
    value = segment(program)
    assert faults(value) == []
    assert value.boundaries == (1,)
    assert value.num_layers == 3
    capped = segment(program, max_layers=2)
    assert capped.num_layers == 2
    assert capped.boundaries == (1,)


def test_tiny_programs_have_one_layer():
    for name in ("elementwise", "identity"):
        assert layered(name).num_layers == 1
    assert len(layered("identity").program.region.eqns) == 0


def test_labels_stay_at_the_head_and_masks_do_not_count():
    """One-hot labels are made where they are read, not carried along the pipeline."""
    value = layered("llama")
    labels = value.program.region.invars[-1]
    assert labels.aval.dtype == jnp.int32
    for n, eqn in enumerate(value.program.region.eqns):
        if any(a is labels for a in eqn.invars):
            assert value.spans[n].first == value.num_layers - 1, name_stack(eqn)


def test_cut_bytes_hold_every_forward_value_that_crosses():
    value = layered("unet")
    skip, inner = 4 * 4 * 8 * 8 * 8, 4 * 4 * 4 * 4 * 16
    deepest = 4 * 4 * 2 * 2 * 32
    assert value.cut_bytes[1] == skip
    assert value.cut_bytes[3] == skip + inner
    assert value.cut_bytes[4] == skip + inner + deepest
