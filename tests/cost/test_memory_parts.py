from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpass.cost.analytic import Submesh
from hetpass.cost.range_bytes import memory_parts, range_bytes
from hetpass.ir.facts import Amount, LayerFacts, ProgramFacts, SharedBytes

sizes = st.integers(0, 100).map(float)
amounts = st.builds(Amount, sizes, sizes)
layers = st.builds(
    LayerFacts,
    kind=st.just("layer"),
    parameter_bytes=st.just(200.0),
    state_bytes=sizes,
    gradient_bytes=sizes,
    batch_bytes=sizes,
    activation_bytes=st.just(Amount(50.0, 50.0)),
    workspace_bytes=amounts,
    boundary_bytes=amounts,
    gradient_boundary_bytes=amounts,
    most_tensor_parallel=st.sampled_from([1, 2, 4]),
)
pairs = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda p: p[0] < p[1]))


@given(
    st.lists(layers, min_size=5, max_size=5),
    pairs,
    st.sampled_from([Submesh(1), Submesh(2), Submesh(2, 4)]),
    st.sampled_from(["none", "full"]),
)
def test_parts_add_up_to_what_ranges_hold(layers, pairs, submesh, recompute):
    shared = tuple(SharedBytes(a, b, Amount(5.0, 1.0), 10.0) for a, b in sorted(pairs))
    facts = ProgramFacts(tuple(layers), 8, shared=shared)
    tables = range_bytes(facts.layers, submesh, 4, recompute, shared)
    for first in range(5):
        for end in range(first + 1, 6):
            parts = memory_parts(facts, submesh, 4, recompute, range(first, end))
            assert parts.fixed == pytest.approx(tables.fixed[first, end])
            assert parts.in_flight == pytest.approx(tables.per_microbatch[first, end])


def test_what_two_layers_share_is_held_once():
    layer = LayerFacts("layer", parameter_bytes=100.0, activation_bytes=Amount(0.0, 10.0))
    shared = (SharedBytes(0, 2, Amount(0.0, 4.0), 100.0), SharedBytes(2, 3, held_bytes=100.0))
    tables = range_bytes((layer,) * 4, Submesh(1), 2, "none", shared)
    assert tables.fixed[0, 2] == 200.0
    assert tables.fixed[0, 3] == 200.0
    assert tables.fixed[0, 4] == 200.0  # one of three is left
    assert tables.per_microbatch[0, 3] == 60.0 - 8.0
    assert tables.per_microbatch[1, 4] == 60.0
