from __future__ import annotations

import pytest

from benchmarks.gpt_facts import SIZES, gpt_facts
from benchmarks.planning import harp, share_of_peak


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("pieces", [2, 3])
def test_flops_are_those_that_alpa_counts(name, pieces):
    """(24 + 48 + 24) · B S H² L (1 + S / 6H) + 6 · B S H V, with recomputation."""
    size, batch = SIZES[name], 64
    facts = gpt_facts(size, batch, pieces)
    s, h = size.sequence, size.hidden
    blocks = 96 * batch * s * h * h * size.layers * (1 + s / (6 * h))
    expected = blocks + 6 * batch * s * h * size.vocabulary
    one = harp(2, 1)
    peak = sum(g.kind.peak_flops["float16"] * g.num_devices for g in one.groups)
    assert share_of_peak(facts, one, 1.0) * peak == pytest.approx(expected)
    assert facts.num_layers == pieces * size.layers + 2


def test_parameters_of_the_names():
    for name, size in SIZES.items():
        facts = gpt_facts(size, 8)
        parameters = sum(layer.parameter_bytes for layer in facts.layers) / 2
        # two embedding tables are counted, where the names count one
        untied = parameters - size.hidden * size.vocabulary
        scale = {"M": 1e6, "B": 1e9}[name[-1]]
        assert untied == pytest.approx(float(name[:-1]) * scale, rel=0.05)
