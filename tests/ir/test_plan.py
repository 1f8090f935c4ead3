from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.ir.stage_plan import StagePrice

finite = st.floats(allow_nan=False, allow_infinity=False)
CLUSTER = Cluster.emulated({"fast": 8, "slow": 6, "H100-80-2": 4})
TEXT = "fast[4](data=2,model=2): 0-13 | slow: 14-24"


def parse(text, num_layers=25, **other):
    return Plan.parse(text, cluster=CLUSTER, num_layers=num_layers, num_microbatches=4, **other)


def placed(plan):
    return [
        (s.first_layer, s.last_layer, [(r.group, r.devices, r.mesh) for r in s.replicas])
        for s in plan.pipelines[0].stages
    ]


# -- one line of text -------------------------------------------------------------------------


def test_the_example_of_the_design():
    plan = parse(TEXT)
    assert placed(plan) == [
        (0, 13, [("fast", (0, 1, 2, 3), (("data", 2), ("model", 2)))]),
        (14, 24, [("slow", (0, 1, 2, 3, 4, 5), (("data", 6),))]),
    ]
    assert (plan.num_stages, plan.num_microbatches, plan.num_layers) == (2, 4, 25)
    assert plan.schedule == "1f1b"
    assert parse(TEXT, schedule="gpipe").schedule == "gpipe"


def test_stages_share_a_group_in_turn():
    plan = parse("fast[2]: 0 | slow[2]: 1-3 | fast[4]: 4 | fast: 5-24")
    assert [r[0][:2] for _, _, r in placed(plan)] == [
        ("fast", (0, 1)),
        ("slow", (0, 1)),
        ("fast", (2, 3, 4, 5)),
        ("fast", (6, 7)),
    ]


def test_devices_by_number_and_several_replicas():
    plan = parse("fast[0-1,6-7] + slow[4-4](data=1) : 0-9|fast[3,2]:10-20|H100-80-2[2]:21-24")
    assert placed(plan)[0][2] == [
        ("fast", (0, 1, 6, 7), (("data", 4),)),
        ("slow", (4,), (("data", 1),)),
    ]
    assert placed(plan)[1][2][0][1] == (3, 2)
    assert placed(plan)[2][2][0][1] == (0, 1)


BAD_TEXT = {
    # text: (word, position from 1, part of the message)
    "": ("TEXT", 1, "a name is needed"),
    "fast": ("TEXT", 5, "':' is needed"),
    "fast:": ("TEXT", 6, "a number is needed"),
    "fats: 0-24": ("GROUP", 1, "did you mean 'fast'"),
    "fast[9]: 0-24": ("DEVICES", 6, "take between 1 and 8"),
    "fast[0]: 0-24": ("DEVICES", 6, "take between 1 and 8"),
    "fast[4](data=3): 0-24": ("MESH", 8, "data=4"),
    "fast[4](data=0): 0-24": ("MESH", 14, "at least one"),
    "fast[4](data=2,data=2): 0-24": ("MESH", 16, "stands twice"),
    "fast[4](2): 0-24": ("TEXT", 9, "a name is needed"),
    "fast[4: 0-24": ("TEXT", 7, "']' is needed"),
    "fast: 1-24": ("LAYERS", 7, "start the stage at 0"),
    "fast: 0-25": ("LAYERS", 9, "end it between 0 and 24"),
    "fast: 0-23": ("LAYERS", 11, "let the last stage end at 24"),
    "fast: 0-9 | slow: 11-24": ("LAYERS", 19, "start the stage at 10"),
    "fast: 0-9 | slow: 9-24": ("LAYERS", 19, "start the stage at 10"),
    "fast: 0-9 | fast: 10-24": ("DEVICES", 13, "use another group"),
    "fast[6]: 0-9 | fast[3]: 10-24": ("DEVICES", 21, "take between 1 and 2"),
    "fast[6]: 0-9 | fast[5-7]: 10-24": ("DEVICES", 21, "unused: 6-7"),
    "fast[6-8]: 0-24": ("DEVICES", 8, "devices 0 to 7"),
    "fast[3-2]: 0-24": ("DEVICES", 8, "devices 0 to 7"),
    "fast[1,1]: 0-24": ("DEVICES", 6, "twice"),
    "fast: 0-24 |": ("TEXT", 13, "a name is needed"),
    "fast: 0-24 slow": ("TEXT", 12, "the end is needed"),
    "fast: 0-24; import os": ("TEXT", 11, "no meaning"),
    "fast: -1-24": ("TEXT", 7, "a number is needed"),
    "fast[99999999999]: 0-24": ("TEXT", 6, "no meaning"),
    "fast: 0-\x00": ("TEXT", 9, "no meaning"),
}


@pytest.mark.parametrize("text", BAD_TEXT)
def test_bad_text_is_refused_by_position(text):
    word, position, part = BAD_TEXT[text]
    with pytest.raises(PlanError) as error:
        parse(text)
    assert error.value.code == f"HP-PLAN-{word}"
    assert error.value.where == f"character {position} of the plan"
    assert part in str(error.value)


def test_bad_text_points_at_the_place():
    with pytest.raises(PlanError) as error:
        parse("fast: 0-9 | slow: 11-24")
    line, caret = error.value.details[:2]
    assert line[caret.index("^") :].startswith("11-24")


def test_text_that_is_no_text():
    for text in (None, 5, "f" * 200_000):
        with pytest.raises(PlanError):
            parse(text)


@given(st.text(alphabet="fastslow0123456789[](),=|:+- ", max_size=40))
def test_any_text_gives_a_plan_or_a_plan_error(text):
    with suppress(PlanError):
        plan = parse(text)
        assert parse(plan.to_text()) == plan


@st.composite
def plans(draw, one_line=False):
    """Legal plans on CLUSTER, of one pipeline."""
    free = {g.name: list(range(g.num_devices)) for g in CLUSTER.groups}
    stages = []
    for _ in range(draw(st.integers(1, 5))):
        replicas = []
        for _ in range(draw(st.integers(1, 2))):
            names = [name for name, devices in free.items() if devices]
            if not names:
                break
            name = draw(st.sampled_from(names))
            count = draw(st.integers(1, len(free[name])))
            devices = draw(st.permutations(free[name]).map(lambda d, c=count: tuple(d[:c])))
            free[name] = [d for d in free[name] if d not in devices]
            sizes = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
            mesh = draw(
                st.sampled_from([(("data", count),), (("data", sizes), ("model", count // sizes))])
            )
            replicas.append(Replica(name, devices, mesh))
        if not replicas:
            break
        first = stages[-1].last_layer + 1 if stages else 0
        extra = {}
        if not one_line:
            axis = replicas[0].mesh[0][0]
            extra = {
                "recompute": draw(st.sampled_from(["none", "full"])),
                "in_flight": draw(st.none() | st.integers(1, 9)),
                "shardings": draw(
                    st.dictionaries(
                        st.text(max_size=8), st.sampled_from([((axis,), ()), ((), (axis,)), ()])
                    )
                ),
            }
        stages.append(StagePlan(first, first + draw(st.integers(0, 9)), tuple(replicas), **extra))
    pipeline = Pipeline(tuple(stages), draw(st.integers(1, 64)))
    if one_line:
        return Plan((pipeline,))
    return Plan(
        (pipeline,),
        draw(st.sampled_from(["auto", "1f1b"])),
        draw(st.none() | st.text(max_size=9)),
        draw(
            st.dictionaries(st.text(max_size=6), st.floats(allow_nan=False, allow_infinity=False))
        ),
    )


@given(plans(one_line=True))
def test_text_round_trip(plan):
    again = Plan.parse(
        plan.to_text(),
        cluster=CLUSTER,
        num_layers=plan.num_layers,
        num_microbatches=plan.num_microbatches,
    )
    assert again == plan


def test_one_line_cannot_hold_everything():
    stage = StagePlan(0, 3, (Replica("fast", (0,), (("data", 1),)),), recompute="full")
    with pytest.raises(PlanError, match="recomputation"):
        Plan((Pipeline((stage,), 1),)).to_text()
    with pytest.raises(PlanError, match="several pipelines"):
        Plan((parse(TEXT).pipelines[0],) * 2).to_text()


# -- JSON -------------------------------------------------------------------------------------


@given(plans())
def test_json_round_trip(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


@given(plans())
def test_what_a_plan_prints_names_every_group(plan):
    assert all(r.group in str(plan) for s in plan.pipelines[0].stages for r in s.replicas)


def test_a_price_travels_with_its_stage():
    plan = parse(TEXT)
    (pipeline,) = plan.pipelines
    price = StagePrice(1e-3, 2e-3, 5e-4, 1e6, 2e5)
    stages = (replace(pipeline.stages[0], price=price), *pipeline.stages[1:])
    priced = replace(plan, pipelines=(replace(pipeline, stages=stages),))
    assert Plan.from_json(priced.to_json()) == priced
    assert "price" not in plan.to_json()
    for wrong in (-1.0, float("nan"), "1"):
        with pytest.raises(PlanError, match="forward_s"):
            replace(price, forward_s=wrong)
    with pytest.raises(PlanError, match="price"):
        Plan.from_json(priced.to_json().replace('"once_s"', '"twice_s"'))


def test_save_and_load(tmp_path):
    plan = replace(parse(TEXT), predictions={"step_s": 0.31}, fingerprint="abc")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "predicted step: 310 ms" in str(plan)
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match="No such file"):
        Plan.load(tmp_path / "none.json")


def test_json_is_the_same_under_any_hash_seed():
    program = (
        "from hetpass.ir.plan import *;"
        "r = Replica('g', (0, 1), (('data', 1), ('model', 2)));"
        "s = StagePlan(0, 1, (r,), {n: (('model',),) for n in {'w', 'v', 'u', 't'}});"
        "print(Plan((Pipeline((s,), 2),), predictions={n: 1 for n in {'a_s', 'b_s', 'c_s'}})"
        ".to_json())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


def edited(*path, value):
    """The JSON of a good plan with one value changed; `...` removes it."""
    data = json.loads(parse(TEXT).to_json())
    target = data
    for step in path[:-1]:
        target = target[step]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(data)


STAGE = ("pipelines", 0, "stages", 0)
REPLICA = (*STAGE, "replicas", 0)
BAD_JSON = [
    (edited("format", value="hetpass-plan/2"), "FORMAT", "format"),
    (edited("format", value=...), "MISSING", "format"),
    (edited("colour", value=1), "KEY", "colour"),
    (edited("schedule", value=1), "TYPE", "schedule"),
    (edited("fingerprint", value=1), "TYPE", "fingerprint"),
    (edited("predictions", value={"x": "1"}), "TYPE", "predictions.x"),
    (edited("pipelines", value=[]), "VALUE", "pipelines"),
    (edited("pipelines", value={}), "TYPE", "pipelines"),
    (edited("pipelines", 0, "num_microbatches", value=0), "VALUE", "num_microbatches"),
    (edited("pipelines", 0, "num_microbatches", value=True), "TYPE", "num_microbatches"),
    (edited("pipelines", 0, "stages", value=[]), "VALUE", "pipelines[0].stages"),
    (edited(*STAGE, "first_layer", value=1), "LAYERS", "stages[0].first_layer"),
    (edited(*STAGE, "last_layer", value=14), "LAYERS", "stages[1].first_layer"),
    (edited(*STAGE, "last_layer", value=-1), "VALUE", "stages[0].last_layer"),
    (edited(*STAGE, "last_layer", value=1.5), "TYPE", "stages[0].last_layer"),
    (edited(*STAGE, "replicas", value=[]), "VALUE", "stages[0].replicas"),
    (edited(*STAGE, "recompute", value="some"), "VALUE", "stages[0].recompute"),
    (edited(*STAGE, "recompute", value=[]), "VALUE", "stages[0].recompute"),
    (edited(*STAGE, "in_flight", value=0), "VALUE", "stages[0].in_flight"),
    (edited(*STAGE, "in_fligth", value=1), "KEY", "stages[0].in_fligth"),
    (edited(*STAGE, "shardings", value={"w": [["tp"]]}), "MESH", "shardings.w"),
    (edited(*STAGE, "shardings", value={"w": [["data"], ["data"]]}), "MESH", "shardings.w"),
    (edited(*STAGE, "shardings", value={"w": "data"}), "TYPE", "shardings.w"),
    (edited(*REPLICA, "devices", value=[0, 1]), "MESH", "replicas[0].mesh"),
    (edited(*REPLICA, "devices", value=[0, 1, 2, 2]), "DEVICES", "replicas[0].devices"),
    (edited(*REPLICA, "devices", value=[0, 1, 2, -3]), "VALUE", "replicas[0].devices[3]"),
    (edited(*REPLICA, "devices", value=[]), "DEVICES", "replicas[0].devices"),
    (edited(*REPLICA, "mesh", value=[["data", 2], ["data", 2]]), "MESH", "replicas[0].mesh"),
    (edited(*REPLICA, "mesh", value=[["<b>", 4]]), "MESH", "replicas[0].mesh[0]"),
    (edited(*REPLICA, "mesh", value=[[4, "data"]]), "MESH", "replicas[0].mesh[0]"),
    (edited(*REPLICA, "mesh", value={"data": 4}), "TYPE", "replicas[0].mesh"),
    (edited(*REPLICA, "group", value=None), "TYPE", "replicas[0].group"),
    ("[]", "TYPE", ""),
    ("", "SYNTAX", ""),
    ("[" * 100_000, "DEPTH", ""),
    ('{"format": NaN}', "VALUE", ""),
]


@pytest.mark.parametrize(("text", "word", "place"), BAD_JSON)
def test_bad_json_is_refused_by_place(text, word, place):
    with pytest.raises(PlanError) as error:
        Plan.from_json(text)
    assert error.value.code == f"HP-PLAN-{word}"
    assert error.value.where.endswith(place), error.value.where


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=4,
    ),
    st.sampled_from(
        [
            ("pipelines",),
            ("pipelines", 0),
            ("pipelines", 0, "stages"),
            STAGE,
            (*STAGE, "replicas"),
            (*STAGE, "shardings"),
            REPLICA,
            (*REPLICA, "mesh"),
            (*REPLICA, "devices"),
            ("predictions",),
        ]
    ),
)
def test_edited_into_nonsense_only_plan_errors_come_out(value, path):
    with suppress(PlanError):
        Plan.from_json(edited(*path, value=value))


def test_records_made_by_hand_are_checked_too():
    replica = Replica("fast", [0, 1], [["data", 2]])
    assert (replica.devices, replica.mesh) == ((0, 1), (("data", 2),))
    assert (replica.axis_size("data"), replica.axis_size("model")) == (2, 1)
    for make in (
        lambda: Replica("fast", 5, ()),
        lambda: StagePlan(0, 0, None),
        lambda: StagePlan(0, 0, ("fast",)),
        lambda: StagePlan(0, 0, (replica, replica)),
        lambda: Pipeline((replica,), 1),
        lambda: Pipeline(None, 1),
        lambda: Plan(None),
        lambda: Plan(("p",)),
        lambda: Plan.from_json(None),
    ):
        with pytest.raises(PlanError):
            make()
    with pytest.raises(FrozenInstanceError):
        replica.group = "slow"


# -- against a cluster and a program ----------------------------------------------------------


def test_check_accepts_what_parse_made():
    parse(TEXT).check(CLUSTER, 25)
    parse(TEXT).check(CLUSTER, 25, "any", batch_size=24)
    replace(parse(TEXT), fingerprint="abc").check(CLUSTER, 25, "abc")


def test_check_refuses_what_clashes():
    plan = replace(parse(TEXT), fingerprint="abc")
    small = Cluster.emulated({"fast": 4, "slow": 3})
    renamed = Cluster.emulated({"fast": 4, "slwo": 6})
    for arguments, word, part in (
        ((CLUSTER, 25, "abd"), "FINGERPRINT", "program 'abd'"),
        ((CLUSTER, 24, "abc"), "LAYERS", "hold 25 layers, the program has 24"),
        ((small, 25), "DEVICES", "has no device 3"),
        ((renamed, 25), "GROUP", "did you mean 'slwo'"),
        ((CLUSTER, 25, None, 26), "MICROBATCHES", "microbatches: 1, 2"),
        ((CLUSTER, 25, None, 16), "BATCH", "legal sizes of the data axis: 1, 2, 4"),
    ):
        with pytest.raises(PlanError) as error:
            plan.check(*arguments)
        assert error.value.code == f"HP-PLAN-{word}"
        assert part in str(error.value)


def test_check_refuses_a_device_in_two_stages():
    first, second = parse("fast[4]: 0-9 | fast[4]: 10-24").pipelines[0].stages
    clash = replace(second, replicas=(Replica("fast", (3, 4), (("data", 2),)),))
    plan = Plan((Pipeline((first, clash), 4),))
    with pytest.raises(PlanError, match="device 3 of 'fast' is used twice") as error:
        plan.check(CLUSTER, 25)
    assert error.value.where == "pipelines[0].stages[1].replicas[0].devices"
    with pytest.raises(PlanError, match="used twice"):
        Plan((Pipeline((first, second), 2),) * 2).check(CLUSTER, 25)


def test_stages_of_one_pipeline_may_share_a_whole_submesh():
    text = "fast[4](data=2,model=2): 0-5 | slow[2]: 6-9 | fast[0-3](data=2,model=2): 10-24"
    plan = parse(text)
    assert plan.lane_of == (0, 1, 0)
    assert plan.lane_names == ("0 · fast[4]", "1 · slow[2]")
    plan.check(CLUSTER, 25)
    assert plan.to_text() == text
    assert parse(plan.to_text()) == plan


@pytest.mark.parametrize(
    "text",
    [
        "fast[0-3]: 0-5 | slow[2]: 6-9 | fast[0-1]: 10-24",  # a part of a submesh
        "fast[0-3]: 0-5 | slow[2]: 6-9 | fast[0-3](data=2,model=2): 10-24",  # another mesh
        "fast[0-3]: 0-5 | slow[2]: 6-9 | fast[1-4]: 10-24",
    ],
)
def test_parts_of_a_submesh_are_not_shared(text):
    with pytest.raises(PlanError) as caught:
        parse(text)
    assert caught.value.code == "HP-PLAN-DEVICES"
    assert "interleave" in str(caught.value)


def test_pipelines_do_not_share_devices():
    plan = Plan((parse(TEXT).pipelines[0],) * 2)
    with pytest.raises(PlanError, match="used twice"):
        plan.check(CLUSTER, 25)
