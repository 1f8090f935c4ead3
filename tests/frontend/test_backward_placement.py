"""The linear program against every placement of small random programs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpass._jax import ShapedArray, make_var
from hetpass.frontend.backward_placement import PARAMETER_PRICE, Placed, place_backward
from hetpass.frontend.dataflow import dataflow
from hetpass.ir.program import LayerSpan

LAYERS = 3


@st.composite
def programs(draw):
    """(equations, number of forward ones, layers of these, parameter): a random DAG."""
    parameter = make_var(ShapedArray((draw(st.integers(1, 30)),), jnp.float32))
    sizes = st.integers(1, 40)
    num_forward, num_backward = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    layers = sorted(draw(st.lists(st.integers(0, 2), min_size=num_forward, max_size=num_forward)))
    made, eqns = [], []
    for _ in range(num_forward + num_backward):
        pool = [*made, parameter]
        read = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique_by=id))
        out = make_var(ShapedArray((draw(sizes),), jnp.float32))
        eqns.append(SimpleNamespace(invars=read, outvars=[out]))
        made.append(out)
    return eqns, num_forward, layers, parameter


def cost(eqns, num_forward, layers, parameter):
    """Bytes × distance in units of the largest value; None if a reader is above its producer."""
    largest = max(v.aval.size for e in eqns for v in e.invars)
    total = 0.0
    for var in [parameter, *(e.outvars[0] for e in eqns)]:
        readers = [n for n, e in enumerate(eqns) if any(a is var for a in e.invars)]
        late = [layers[r] for r in readers if r >= num_forward]
        early = [layers[r] for r in readers if r < num_forward]
        maker = next((n for n, e in enumerate(eqns) if e.outvars[0] is var), None)
        price = max(var.aval.size / largest, 1e-4)
        if not late:
            continue
        if maker is not None and maker >= num_forward:
            if max(late) > layers[maker]:
                return None
            total += price * (layers[maker] - min(late))
            continue
        if maker is None:
            price = PARAMETER_PRICE * (1 + price)
        else:
            early.append(layers[maker])
        if early:
            total += price * (max(0, max(late) - max(early)) + max(0, min(early) - min(late)))
    return total


@settings(deadline=None, max_examples=60)
@given(programs())
def test_optimal_and_integral(program):
    eqns, num_forward, layers, parameter = program
    flow = dataflow(SimpleNamespace(eqns=eqns, outvars=[]))
    placed = Placed(
        num_layers=LAYERS,
        spans={n: LayerSpan(k, k) for n, k in enumerate(layers)},
        backward=[n >= num_forward for n in range(len(eqns))],
        duplicable=[False] * len(eqns),
        inputs={parameter: (parameter,)},
        homes={},
    )
    found = place_backward(flow, placed)
    got = cost(eqns, num_forward, [*layers, *(found[n].first for n in sorted(found))], parameter)
    every = itertools.product(range(LAYERS), repeat=len(eqns) - num_forward)
    costs = (cost(eqns, num_forward, [*layers, *late], parameter) for late in every)
    assert got == pytest.approx(min(c for c in costs if c is not None), abs=1e-3)


def test_a_scan_that_cannot_be_where_it_is_is_reported():
    first, second = (make_var(ShapedArray((4,), jnp.float32)) for _ in range(2))
    eqns = [
        SimpleNamespace(invars=[], outvars=[first]),
        SimpleNamespace(invars=[first], outvars=[second]),
    ]
    spans = {0: LayerSpan(0, 1), 1: LayerSpan(1, 2)}  # the reader would be above its producer
    placed = Placed(4, spans, [True, True], [False, False], {}, {})
    assert place_backward(dataflow(SimpleNamespace(eqns=eqns, outvars=[])), placed) is None
