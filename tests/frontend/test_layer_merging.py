"""Merging of light layers and the cap, on plain numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetpass.frontend.layer_merging import LayerWeight, merge_layers

layers = st.lists(
    st.builds(
        LayerWeight,
        st.floats(0, 10),
        forced=st.booleans(),
        iteration=st.booleans(),
        lookup=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(layers, st.integers(1, 12))
def test_numbers_are_contiguous_and_fixed_cuts_stay(weights, most):
    numbers = merge_layers(weights, most)
    assert numbers[0] == 0
    for before, after, layer in zip(numbers, numbers[1:], weights[1:], strict=False):
        assert after - before in (0, 1)
        if layer.forced or layer.iteration:
            assert after == before + 1
    fixed = sum(layer.forced or layer.iteration for layer in weights[1:])
    assert numbers[-1] + 1 <= max(most, fixed + 1)


def test_light_layers_join_their_lighter_neighbour():
    weights = [LayerWeight(t) for t in (1.0, 5.0, 0.01, 3.0, 1.0)]
    assert merge_layers(weights, 256) == [0, 1, 2, 2, 3]


def test_embedding_and_head_stay_apart():
    weights = [LayerWeight(0.0, lookup=True), *[LayerWeight(1.0)] * 4, LayerWeight(0.001)]
    assert merge_layers(weights, 256) == [0, 1, 2, 3, 4, 5]
    assert merge_layers(weights, 4) == [0, 1, 1, 2, 2, 3]
