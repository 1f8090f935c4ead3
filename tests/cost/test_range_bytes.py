from __future__ import annotations

import numpy as np

from hetpass.cost.analytic import Submesh
from hetpass.cost.range_bytes import over_ranges, range_bytes
from hetpass.ir.facts import Amount, LayerFacts

LAYERS = [
    LayerFacts(
        f"l{i}",
        parameter_bytes=10.0 * (i + 1),
        state_bytes=20.0,
        gradient_bytes=5.0,
        activation_bytes=Amount(1.0, 2.0),
        boundary_bytes=Amount(0.0, 3.0),
        gradient_boundary_bytes=Amount(0.0, 1.0),
        most_tensor_parallel=2,
    )
    for i in range(3)
]


def test_closed_forms_without_recomputation():
    held = range_bytes(LAYERS, Submesh(2), 8, "none")
    # four examples a row: 4 · (3 + 1) bytes cross each cut
    # and the 5 that one layer at a time adds to its accumulators
    assert held.fixed[1, 3] == (20 + 25) + (30 + 25) + 16 + 5
    assert held.fixed[1, 2] == (20 + 25) + 2 * 16 + 5
    assert held.fixed[0, 3] == 60 + 75 + 5
    assert held.per_microbatch[0, 3] == 3 * 9


def test_tensor_parallelism_shares_state_and_activations():
    held = range_bytes(LAYERS, Submesh(1, 2), 4, "none")
    # and while the layer runs what it adds, half of 5, and the half of its parameters elsewhere
    assert held.fixed[0, 1] == 35 / 2 + 16 + 5 / 2 + 10 / 2
    assert held.per_microbatch[0, 2] == 9.0
    more = range_bytes(LAYERS, Submesh(1, 4), 4, "none")
    assert more.per_microbatch[0, 2] == 9.0  # the layers do not split into more than two


def test_recomputation_keeps_what_the_stage_reads():
    kept, held = (range_bytes(LAYERS, Submesh(1), 4, way) for way in ("full", "none"))
    assert kept.per_microbatch[1, 3] == 12.0
    assert kept.per_microbatch[0, 3] == 0.0
    # layer 1's activations beside layer 2, whose own are more than what it adds to accumulators
    assert kept.fixed[1, 3] == held.fixed[1, 3] - 5.0 + held.per_microbatch[1, 3]


def test_the_largest_workspace_of_a_range():
    sizes = (3.0, 1.0, 5.0)
    layers = [LayerFacts("l", workspace_bytes=Amount(0.0, size)) for size in sizes]
    fixed = range_bytes(layers, Submesh(2), 4, "none").fixed
    assert fixed[0, 2] == 6.0
    assert fixed[1, 2] == 2.0
    assert fixed[0, 3] == 10.0
    assert np.isinf(fixed[1, 1])


def test_what_a_layer_adds_to_its_accumulators_is_beside_its_workspace():
    layers = [
        LayerFacts("l", gradient_bytes=gradient, workspace_bytes=Amount(0.0, size))
        for gradient, size in ((9.0, 3.0), (2.0, 1.0), (2.0, 8.0))
    ]
    fixed = range_bytes(layers, Submesh(1), 1, "none").fixed
    assert fixed[0, 3] == 13 + max(3 + 9, 1 + 2, 8 + 2)
    assert fixed[1, 3] == 4 + 8 + 2
    assert fixed[1, 2] == 2 + 1 + 2


def test_recomputation_holds_the_layers_before_the_one_that_runs():
    """Activations of one microbatch; those behind are used up, a layer's own overwritten."""
    layers = [
        LayerFacts("l", activation_bytes=Amount(0.0, kept), workspace_bytes=Amount(0.0, needed))
        for kept, needed in ((5.0, 1.0), (4.0, 20.0), (6.0, 2.0))
    ]
    fixed = range_bytes(layers, Submesh(1), 1, "full").fixed
    assert fixed[0, 3] == max(5, 5 + 20, 9 + 6)
    assert fixed[1, 3] == max(20, 4 + 6)
    assert fixed[0, 1] == 5.0
    assert fixed[2, 3] == 6.0


def test_ranges():
    sums = over_ranges([1.0, np.inf, 2.0, 4.0])
    inf = np.inf
    expected = [
        [inf, 1, inf, inf, inf],
        [inf, inf, inf, inf, inf],
        [inf, inf, inf, 2, 6],
        [inf, inf, inf, inf, 4],
    ]
    assert np.array_equal(sums, expected)
    held = range_bytes(LAYERS, Submesh(1), 4, "none")
    for table in (held.fixed, held.per_microbatch):
        assert np.array_equal(np.isinf(table), np.isinf(over_ranges([1.0] * 3)))
    assert np.array_equal(
        np.isinf(range_bytes(LAYERS, Submesh(1), 4, "full").per_microbatch),
        np.isinf(over_ranges([1.0] * 3)),
    )
