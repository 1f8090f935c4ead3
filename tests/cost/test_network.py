from __future__ import annotations

import json
import math

import pytest

from hetpass.cost.network import Curve, LinkNetwork, MeasuredNetwork
from hetpass.errors import FactsError
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link

KIND = DeviceKind("a", {"float32": 1e12}, 10**9, 1e11)
OTHER = DeviceKind("b", {"float32": 1e12}, 10**9, 1e11)
A = DeviceGroup("a", KIND, 2, 4, Link(1.0, 10.0), Link(2.0, 5.0))
B = DeviceGroup("b", OTHER, 2, 4, Link(1.0, 10.0), Link(2.0, 5.0))


def test_links_are_shared_by_streams():
    network = LinkNetwork(Cluster((A, B), default_link=Link(3.0, 2.0)))
    assert network.inside_s(A, 20.0) == 3.0
    assert network.stream_s(A, A, 10.0, 1) == 4.0
    assert network.stream_s(A, A, 10.0, 3) == 8.0
    assert network.stream_s(A, B, 10.0, 1) == 8.0
    assert network.ring_rate(A, B, 10.0, 1) == 10.0 / 8.0


def test_a_curve_is_linear_in_the_logarithm_of_the_size():
    curve = Curve((1.0, 4.0, 16.0), (1.0, 3.0, 4.0))
    assert curve.rate(0.1) == 1.0
    assert curve.rate(2.0) == pytest.approx(2.0)
    assert curve.rate(8.0) == pytest.approx(3.5)
    assert curve.rate(100.0) == 4.0


def measured(between, inside=None):
    return MeasuredNetwork(
        {end: Curve((1.0,), (rate,)) for end, rate in (inside or {}).items()},
        {ends: Curve((1.0,), (rate,)) for ends, rate in between.items()},
    )


def test_streams_share_what_the_host_attains_and_get_no_more_than_a_pair():
    network = measured({(("a", 1), ("a", 1)): 3.0, (("a", 4), ("a", 4)): 8.0})
    assert network.stream_s(A, A, 24.0, 1) == 8.0
    assert network.stream_s(A, A, 24.0, 2) == 8.0
    assert network.stream_s(A, A, 24.0, 4) == 12.0
    assert network.ring_rate(A, A, 24.0, 4) == 8.0
    assert network.ring_rate(A, A, 24.0, 2) == 4.0
    assert network.ring_rate(A, A, 24.0, 1) == 3.0


def test_measurements_that_cannot_be_are_overruled():
    # four pairs get 8 together: one alone gets 2 at least, and eight pairs no less than four
    between = {(("a", 1), ("b", 1)): 0.1, (("a", 4), ("b", 4)): 8.0, (("b", 8), ("a", 8)): 0.2}
    network = measured(between)
    assert network.stream_s(A, B, 8.0, 1) == 4.0
    assert network.ring_rate(B, A, 8.0, 8) == 8.0


def test_the_slower_direction_counts():
    network = measured({(("a", 1), ("b", 1)): 2.0, (("b", 1), ("a", 1)): 1.0})
    assert network.stream_s(A, B, 2.0, 1) == 2.0


def test_inside_a_host_the_nearest_count_holds():
    network = measured({}, {("a", 2): 4.0, ("a", 8): 16.0})
    assert network.inside_rate(A, 4, 1.0) == 4.0
    assert network.inside_rate(A, 8, 1.0) == 16.0
    assert network.inside_s(A, 8.0) == 2.0


def test_what_was_not_measured_is_refused():
    with pytest.raises(FactsError) as caught:
        measured({}).stream_s(A, B, 1.0, 1)
    assert caught.value.code == "HP-NETWORK-KIND"


def test_reading_a_file(tmp_path):
    data = {
        "unit": "GB/s",
        "sizes_MB": [1, 4],
        "inside_node": {"A 100 x2": [1, 2, 9]},
        "between_nodes_one_zone": {"A 100 x2 - b x1": [3, 4, 9]},
    }
    path = tmp_path / "network.json"
    path.write_text(json.dumps(data))
    found = MeasuredNetwork.read(path)
    assert found.inside == {("A 100", 2): Curve((1e6, 4e6), (1e9, 2e9))}
    assert found.between == {(("A 100", 2), ("b", 1)): Curve((1e6, 4e6), (3e9, 4e9))}


@pytest.mark.parametrize("name", ["a", "a x", "x2 - b x1"])
def test_names_that_are_no_ends_are_refused(tmp_path, name):
    data = {"sizes_MB": [1], "inside_node": {}, "between_nodes_one_zone": {name: [1]}}
    path = tmp_path / "network.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FactsError):
        MeasuredNetwork.read(path)


def test_without_a_link_nothing_arrives():
    one = DeviceGroup("a", KIND, 1, 1)
    assert math.isinf(LinkNetwork(Cluster((one,))).stream_s(one, one, 1.0, 1))
