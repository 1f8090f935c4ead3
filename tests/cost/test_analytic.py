from __future__ import annotations

import math

import pytest

from hetpass.cost.analytic import PEAK, Assumptions, Submesh, layer_seconds
from hetpass.ir.devices import DeviceGroup, DeviceKind, Link
from hetpass.ir.facts import Amount, LayerFacts, Seconds

INSIDE, ACROSS = Link(1e-3, 100.0), Link(1e-2, 10.0)


def group(hosts=1, per_host=4, name="g"):
    kind = DeviceKind("k", {"float32": 10.0}, 1000, 50.0)
    return DeviceGroup(name, kind, hosts, per_host, INSIDE, ACROSS)


def layer(**changes):
    facts = dict(
        kind="mlp",
        forward_flops={"float32": Amount(0.0, 100.0)},
        backward_flops={"float32": Amount(0.0, 200.0)},
        parameter_bytes=50.0,
        state_bytes=100.0,
        gradient_bytes=50.0,
        reduced_bytes=Amount(0.0, 40.0),
        most_tensor_parallel=4,
    )
    return LayerFacts(**{**facts, **changes})


def test_one_device_at_peak():
    got = layer_seconds(layer(), group(), Submesh(1), 8, PEAK)
    assert (got.forward, got.backward) == (80.0, 160.0)
    assert got.sync == 0
    assert got.update == (2 * (50 + 100) + 50) / 50


def test_data_parallel_shares_examples_and_sums_gradients():
    got = layer_seconds(layer(), group(), Submesh(4), 8, PEAK)
    assert (got.forward, got.backward) == (20.0, 40.0)
    assert got.sync == pytest.approx(6 * (1e-3 + 50 / 4 / 100))


def test_tensor_parallel_sums_activations():
    got = layer_seconds(layer(), group(), Submesh(2, 2), 8, PEAK)
    reduced_s = 2 * (1e-3 + 4 * 40 / 2 / 100)
    assert got.forward == pytest.approx(20.0 + reduced_s)
    assert got.backward == pytest.approx(40.0 + reduced_s)
    assert got.sync == pytest.approx(2 * (1e-3 + 25 / 2 / 100))
    assert got.update == pytest.approx(7.0 / 2)


def test_a_layer_that_cannot_be_split_further_is_not():
    alone = layer_seconds(layer(most_tensor_parallel=1), group(), Submesh(1, 4), 8, PEAK)
    assert alone.forward == 80.0


def test_rings_across_hosts_share_the_hosts_link():
    got = layer_seconds(layer(), group(hosts=2), Submesh(2, 4), 8, PEAK)
    assert got.sync == pytest.approx(2 * (1e-2 + 50 / 2 / 10))


def test_memory_bound_layers_take_as_long_as_their_bytes():
    facts = layer(forward_traffic_bytes=Amount(0.0, 1e4), backward_traffic_bytes=Amount(7.0, 0.0))
    got = layer_seconds(facts, group(), Submesh(1), 8, PEAK)
    assert got.forward == (8e4 + 50) / 50
    assert got.backward == 160.0


def test_assumed_shares_of_the_peak():
    got = layer_seconds(layer(), group(), Submesh(1), 8, Assumptions(0.5, 0.25, 1.0))
    assert got.forward == 160.0
    assert got.update == 28.0


def test_a_missing_format_is_never_possible():
    facts = layer(backward_flops={"bfloat16": Amount(0.0, 1.0)})
    assert math.isinf(layer_seconds(facts, group(), Submesh(1), 8, PEAK).backward)


def test_known_seconds_override_by_group_then_by_kind():
    known = {
        "g": Seconds(Amount(1.0, 0.5), Amount(2.0, 1.0)),
        "k": Seconds(Amount(9.0), Amount(9.0)),
    }
    facts = layer(seconds=known)
    got = layer_seconds(facts, group(), Submesh(4), 8, PEAK)
    assert (got.forward, got.backward) == (2.0, 4.0)
    assert layer_seconds(facts, group(name="other"), Submesh(1), 8, PEAK).forward == 9.0
    only = LayerFacts("x", seconds=known)
    elsewhere = DeviceGroup("h", DeviceKind("q", {"float32": 1.0}, 1, 1.0), 1, 1)
    assert math.isinf(layer_seconds(only, elsewhere, Submesh(1), 8, PEAK).forward)
