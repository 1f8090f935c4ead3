from __future__ import annotations

import json

import pytest

from hetpass.errors import FactsError
from hetpass.ir.profile import LayerSize, LayerTime, ModelProfile

SIZES = {1: (LayerSize(10.0, 2.0, 5.0),) * 2}


def profile(**seconds):
    times = {
        (b, 1): (LayerTime(f, 2 * f, 0.1),) * 2
        for b, f in ((int(k[1:]), v) for k, v in seconds.items())
    }
    return ModelProfile("m", {"fast": times}, SIZES)


def test_between_measured_microbatches_seconds_are_interpolated():
    found = profile(b2=2.0, b4=3.0).times("fast", 1, 3)
    assert found is not None
    assert (found[0].forward_s, found[0].backward_s, found[0].update_s) == (2.5, 5.0, 0.1)


def test_the_ends_of_what_was_measured():
    known = profile(b2=2.0, b4=3.0)
    assert known.times("fast", 1, 1) == known.times("fast", 1, 2)
    assert known.times("fast", 1, 5) is None
    assert known.times("fast", 2, 2) is None
    assert known.times("slow", 1, 2) is None
    assert known.examples("fast", 1) == (2, 4)
    assert known.ways("fast") == (1,)


def test_a_smaller_microbatch_that_was_measured_slower_is_overruled():
    settled = profile(b1=5.0, b2=2.0, b4=3.0).settled()
    assert [settled.seconds["fast"][b, 1][0].forward_s for b in (1, 2, 4)] == [2.0, 2.0, 3.0]


def write(folder, seconds, sizes):
    (folder / "profiles").mkdir()
    record = {"model": "m", "device": "fast", "seconds": seconds}
    (folder / "profiles" / "m__fast.json").write_text(json.dumps(record))
    (folder / "layer_bytes.json").write_text(json.dumps({"m": sizes}))


SIZE = {"params_bytes": 8, "act_output_bytes": 4, "act_input_bytes": 4, "act_mem_bytes": 16}


def test_reading_the_two_files(tmp_path):
    write(tmp_path, {"2": {"1": [[0.1, 0.2, 0.3]], "2": [[0.06, 0.1, 0.2]]}}, {"1": [SIZE]})
    found = ModelProfile.read(tmp_path, "m")
    assert found.num_layers == 1
    assert found.seconds["fast"][2, 2] == (LayerTime(0.06, 0.1, 0.2),)
    assert found.sizes[1] == (LayerSize(8, 4, 16),)
    assert found.ways("fast") == (1,)  # of rows of two the bytes are not known


@pytest.mark.parametrize(
    ("seconds", "sizes", "code"),
    [
        ({"2": {"1": [[0.1, 0.2, 0.3]] * 2}}, {"1": [SIZE]}, "HP-PROFILE-LAYERS"),
        ({"2": {"1": [[0.1, -0.2, 0.3]]}}, {"1": [SIZE]}, "HP-PROFILE-VALUE"),
        ({"2": {"1": [[0.1, 0.2]]}}, {"1": [SIZE]}, "HP-PROFILE-VALUE"),
        ({"x": {"1": [[0.1, 0.2, 0.3]]}}, {"1": [SIZE]}, "HP-PROFILE-VALUE"),
        ({"2": {"1": [[0.1, "a", 0.3]]}}, {"1": [SIZE]}, "HP-PROFILE-TYPE"),
        ({"2": {"1": [[0.1, 0.2, 0.3]]}}, {"1": [{"params_bytes": 1}]}, "HP-PROFILE-MISSING"),
    ],
)
def test_what_is_refused(tmp_path, seconds, sizes, code):
    write(tmp_path, seconds, sizes)
    with pytest.raises(FactsError) as caught:
        ModelProfile.read(tmp_path, "m")
    assert caught.value.code == code


def test_a_model_that_is_not_there_names_those_that_are(tmp_path):
    write(tmp_path, {"2": {"1": [[0.1, 0.2, 0.3]]}}, {"1": [SIZE]})
    with pytest.raises(FactsError) as caught:
        ModelProfile.read(tmp_path, "n")
    assert caught.value.code == "HP-PROFILE-FILE"
    assert any("m" in way for way in caught.value.ways_out)
