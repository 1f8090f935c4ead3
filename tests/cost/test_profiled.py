from __future__ import annotations

import json
import math

import pytest

from hetpass.cost.analytic import Submesh
from hetpass.cost.layer_costs import MemoryOverhead
from hetpass.cost.profiled import profiled_bytes, profiled_seconds
from hetpass.cost.tables import stage_table
from hetpass.errors import FactsError
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.facts import ProgramFacts
from hetpass.planner.evaluate import evaluate
from hetpass.planner.search import SearchOptions, search

FAST = DeviceKind("fast", {"float32": 1e12}, 10**11, 1e11)
SLOW = DeviceKind("slow", {"float32": 1e12}, 10**11, 1e11)
FAR = Link(0.0, 1e4)
CLUSTER = Cluster(
    (
        DeviceGroup("a", FAST, 1, 2, Link(0.0, 1e4)),
        DeviceGroup("b", SLOW, 1, 2, Link(0.0, 1e4)),
    ),
    default_link=FAR,
)


@pytest.fixture
def facts(tmp_path):
    """Six equal layers; a microbatch of one takes nearly as long as one of two."""
    (tmp_path / "profiles").mkdir()
    for kind, factor in (("fast", 1.0), ("slow", 2.0)):
        seconds = {
            str(b): {
                "1": 6 * [[factor * f, 2 * factor * f, 0.25]],
                "2": 6 * [[0.75 * factor * f, 1.5 * factor * f, 0.125]],
            }
            for b, f in ((1, 0.9), (2, 1.0), (4, 2.0))
        }
        record = {"model": "m", "device": kind, "seconds": seconds}
        (tmp_path / "profiles" / f"m__{kind}.json").write_text(json.dumps(record))
    sizes = {
        str(w): 6 * [{"params_bytes": 40 / w, "act_output_bytes": 4, "act_mem_bytes": 16 / w}]
        for w in (1, 2)
    }
    (tmp_path / "layer_bytes.json").write_text(json.dumps({"m": sizes}))
    return ProgramFacts.from_profiles(tmp_path, "m", 16)


def test_facts_hold_the_profile_and_what_is_known_of_one_device(facts):
    assert facts.num_layers == 6
    assert facts.layers[1].parameter_bytes == 40
    assert facts.layers[1].most_tensor_parallel == 2
    assert [layer.kind for layer in facts.layers] == ["embedding", *["block"] * 4, "head"]


def test_facts_travel_as_json(facts):
    again = ProgramFacts.from_json(facts.to_json())
    assert again.to_json() == facts.to_json()
    assert again.profile is not None
    assert again.profile.seconds == facts.profile.seconds


def test_seconds_are_of_the_share_and_the_row(facts):
    group = CLUSTER.group("a")
    whole = profiled_seconds(facts.profile, group, Submesh(1), 4)
    assert (whole[0].forward, whole[0].backward, whole[0].update) == (2.0, 4.0, 0.25)
    shared = profiled_seconds(facts.profile, group, Submesh(2), 4)
    assert shared[0].forward == 1.0
    assert shared[0].sync == pytest.approx(40 / 1e4)
    row = profiled_seconds(facts.profile, group, Submesh(1, 2), 4)
    assert (row[0].forward, row[0].sync) == (1.5, 0.0)
    assert math.isinf(profiled_seconds(facts.profile, group, Submesh(1), 8)[0].forward)


def test_bytes_are_of_a_device_of_the_row(facts):
    memory = MemoryOverhead(4.0, 1.0, 7.0)
    held = profiled_bytes(facts.profile, Submesh(1, 2), 3, "none", memory)
    assert held.fixed[0, 2] == 4 * 2 * 20 + 7
    assert held.per_microbatch[0, 2] == 3 * 2 * 8
    again = profiled_bytes(facts.profile, Submesh(1), 3, "full", memory)
    assert again.fixed[2, 4] == 4 * 2 * 40 + 7 + 3 * 2 * 16
    assert again.per_microbatch[2, 4] == 3 * 4
    assert math.isinf(profiled_bytes(facts.profile, Submesh(1, 4), 1, "none").fixed[0, 1])


def test_tables_read_the_profile(facts):
    table = stage_table(facts, CLUSTER, 1, Submesh(1), 8, "none", SearchOptions().tables.assumed)
    assert table.forward_s[0, 3] == pytest.approx(3 * 2.0)


def test_search_and_evaluation_agree_on_plans_from_profiles(facts):
    found = search(facts, CLUSTER, SearchOptions(schedule="1f1b"))
    again = evaluate(found.plan, facts, CLUSTER, SearchOptions().tables.assumed)
    assert again.step_s == pytest.approx(found.best.step_s, rel=1e-6)
    groups = {s.group for s in again.stages}
    assert groups == {"a", "b"}
    small = found.plan.num_microbatches > 8
    assert not small  # single examples cost nearly as much as pairs


def test_a_profile_of_other_layers_is_refused(facts):
    with pytest.raises(FactsError) as caught:
        ProgramFacts(facts.layers[1:], 16, profile=facts.profile)
    assert caught.value.code == "HP-FACTS-LAYERS"
