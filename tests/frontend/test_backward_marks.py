"""Which equations are backward, and that no other choice holds fewer bytes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from hetpass.analysis.flops import aval_bytes
from hetpass.frontend.backward_marks import backward_marks, move_to_backward
from hetpass.frontend.dataflow import dataflow
from tests.frontend import layer_models as m
from tests.frontend.step_programs import step_program


def silu_tower(params, batch):
    def loss(p):
        x = batch["x"]
        for w in p:
            x = x @ w
            x = x * jax.nn.sigmoid(x) + jnp.sin(x) ** 2
        return (x**2).mean()

    return m.sgd(params, jax.grad(loss)(params))


def held_bytes(flow, backward):
    """Bytes of forward results that backward equations read."""
    return sum(
        aval_bytes(v.aval)
        for n, e in enumerate(flow.eqns)
        if not backward[n]
        for v in e.outvars
        if any(backward[r] for r in flow.readers.get(v, ()))
    )


def marked(step, state, batch):
    program = step_program(step, state, batch)
    return dataflow(program.region), backward_marks(program)


def test_everything_after_a_transposed_equation_is_backward():
    flow, marks = marked(m.mlp_step, m.mlp_shapes(4, 8, 2), m.vectors(4, 2))
    assert any(marks)
    assert not all(marks)
    for number, operands in enumerate(flow.operands):
        assert marks[number] or not any(marks[o] for o in operands)


def test_moves_hold_no_more_bytes_and_keep_the_order():
    flow, marks = marked(silu_tower, [m.sds(8, 8)] * 2, m.vectors(8, 8))
    moved = move_to_backward(flow, marks, [False] * len(marks))
    assert sum(moved) > sum(marks)
    assert held_bytes(flow, moved) < held_bytes(flow, marks)
    assert all(new for new, old in zip(moved, marks, strict=True) if old)
    for number, operands in enumerate(flow.operands):
        assert moved[number] or not any(moved[o] for o in operands)


def test_no_choice_of_moves_holds_fewer_bytes():
    flow, marks = marked(silu_tower, [m.sds(8, 8)], m.vectors(8, 8))
    moved = move_to_backward(flow, marks, [False] * len(marks))
    # Light equations that only backward ones read, directly or not, may move.
    heavy = {"dot_general"}
    movable = [False] * len(marks)
    for n in reversed(range(len(marks))):
        movable[n] = (
            not marks[n]
            and flow.eqns[n].primitive.name not in heavy
            and bool(flow.successors[n])
            and all(marks[r] or movable[r] for r in flow.successors[n])
        )
    free = [n for n, may in enumerate(movable) if may]
    assert 3 <= len(free) <= 14
    best = held_bytes(flow, marks)
    for choice in itertools.product((False, True), repeat=len(free)):
        late = list(marks)
        for n, is_late in zip(free, choice, strict=True):
            late[n] = is_late
        legal = all(late[n] or not any(late[o] for o in ops) for n, ops in enumerate(flow.operands))
        if legal:
            best = min(best, held_bytes(flow, late))
    assert held_bytes(flow, moved) == pytest.approx(best)


def test_recomputed_equations_are_backward():
    def step(w, batch):
        block = jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w)
        return jax.grad(lambda w: block(w, batch["x"]).sum())(w)

    program = step_program(step, m.sds(8, 8), m.vectors(8, 8))
    marks = backward_marks(program)
    again = [program.traced.recomputed[s] for s in program.origin]
    assert any(again)
    assert all(late for late, flag in zip(marks, again, strict=True) if flag)
