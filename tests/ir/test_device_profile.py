"""Profiles: the file, what is refused, and what the planner makes of one."""

from __future__ import annotations

import json

import pytest

from hetpass.cost.analytic import Assumptions, Submesh, layer_seconds
from hetpass.cost.calibrate import calibrated_cluster, measured_facts
from hetpass.errors import FactsError
from hetpass.ir.cluster import Cluster
from hetpass.ir.device_profile import DeviceProfile, KindProfile
from hetpass.ir.devices import Link
from hetpass.ir.facts import Amount, ProgramFacts, Seconds

PROFILE = DeviceProfile(
    "2026-11-30",
    "a machine",
    {"jax": "0.10.2"},
    {"cpu": KindProfile({"float32": 4e10}, 8e9, 1e-5, Link(1e-5, 2e9))},
    {"f1": {"cpu": {"block": Seconds(Amount(0.1, 0.01), Amount(0.2, 0.02))}}},
)


def test_a_file_reads_back_equal(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert DeviceProfile.load(path) == PROFILE
    assert DeviceProfile.load(path).to_json() == PROFILE.to_json()
    assert "cpu: float32 40 GFLOP/s" in str(PROFILE)


@pytest.mark.parametrize(
    ("change", "code", "place"),
    [
        ({"format": "x"}, "HP-PROFILE-FORMAT", "format"),
        ({"kinds": {"cpu": {"rates": {"float32": 0}}}}, "HP-PROFILE-MISSING", "kinds.cpu"),
        ({"more": 1}, "HP-PROFILE-KEY", "more"),
        ({"layers": {"f": {"cpu": {"b": {"forward": [1], "backward": [1, 2]}}}}},
         "HP-PROFILE-VALUE", "layers.f.cpu.b.forward"),
        ({"kinds": {"cpu": {"rates": {"float32": -1}, "memory_bandwidth": 1, "launch_s": 0}}},
         "HP-PROFILE-VALUE", "kinds.cpu.rates.float32"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(change, code, place):
    data = json.loads(PROFILE.to_json()) | change
    with pytest.raises(FactsError) as refusal:
        DeviceProfile.from_data(data)
    assert refusal.value.code == code
    assert refusal.value.where.startswith(place)


def test_the_model_gives_back_what_was_measured():
    cluster = calibrated_cluster(Cluster.emulated({"here": 2}), PROFILE)
    (group,) = cluster.groups
    assert group.intra_host == Link(1e-5, 2e9)
    flops = {"forward_flops": {"float32": 4e10}, "backward_flops": {"float32": 8e10}}
    facts = ProgramFacts.synthetic([{"kind": "block", **flops}], 1)
    seconds = layer_seconds(facts.layers[0], group, Submesh(1), 1, Assumptions())
    assert (seconds.forward, seconds.backward) == pytest.approx((1.0, 2.0))
    assert group.kind.source == "measured on 2026-11-30, a machine"
    unknown = Cluster.emulated({"slow": 1}, speeds={"slow": 0.5})
    assert calibrated_cluster(unknown, PROFILE) == unknown


def test_layers_of_this_program_get_their_seconds():
    facts = ProgramFacts.synthetic([{"kind": "block"}, {"kind": "other"}], 8)
    assert measured_facts(facts, PROFILE) == facts  # of no program in particular
    own = ProgramFacts(facts.layers, 8, "f1")
    first, second = measured_facts(own, PROFILE).layers
    assert first.seconds["cpu"].backward.of(10) == pytest.approx(0.4)
    assert not second.seconds
