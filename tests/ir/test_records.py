from __future__ import annotations

import pytest

from hetpass.errors import ClusterError
from hetpass.ir.records import MAX_DEPTH, MAX_FILE_BYTES, Reader, at, nearest, place, shown

READER = Reader(ClusterError, "HP-CLUSTER")


def code(error: pytest.ExceptionInfo[ClusterError]) -> str:
    return error.value.code.removeprefix("HP-CLUSTER-")


def test_places_are_joined_from_the_outside():
    with pytest.raises(ClusterError) as error, at("file.toml:"), at("groups"), at("[1]"):
        READER.refuse("VALUE", "no", "hosts")
    assert error.value.where == "file.toml: groups[1].hosts"


def test_unknown_key_names_the_nearest():
    with pytest.raises(ClusterError) as error:
        READER.record({"bandwith": 1}, required=("bandwidth",), optional=("latency",))
    assert code(error) == "KEY"
    assert "'bandwidth'" in error.value.ways_out[0]


def test_missing_key():
    with pytest.raises(ClusterError) as error:
        READER.record({}, required=("bandwidth",))
    assert (code(error), error.value.where) == ("MISSING", "bandwidth")


@pytest.mark.parametrize(
    ("text", "suffix", "word"),
    [
        ('{"a": 1, "a": 2}', ".json", "DUPLICATE"),
        ("a = 1\na = 2", ".toml", "SYNTAX"),
        ('{"a": NaN}', ".json", "VALUE"),
        ('{"a": Infinity}', ".json", "VALUE"),
        ("{", ".json", "SYNTAX"),
        ("", ".json", "SYNTAX"),
        ("[" * 50 + "]" * 50, ".json", "DEPTH"),
        ("[" * 100_000, ".json", "DEPTH"),
        ("a = " + "[" * 100_000, ".toml", "DEPTH"),
        ("a = " + "[" * 50 + "]" * 50, ".toml", "DEPTH"),
        ("1" * 10_000, ".json", "SYNTAX"),
        (" " * (MAX_FILE_BYTES + 1), ".json", "FILE"),
        ("!!python/object/apply:os.system ['true']", ".toml", "SYNTAX"),
    ],
)
def test_bad_text(text, suffix, word):
    with pytest.raises(ClusterError) as error:
        READER.parse(text, suffix)
    assert code(error) == word


def test_depth_is_allowed_up_to_the_limit():
    nested: object = 1
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    assert READER.parse(repr(nested), ".json") == nested


@pytest.mark.parametrize("value", [True, "1", None, [], {}, float("nan"), float("inf"), 10**400])
def test_not_a_number(value):
    with pytest.raises(ClusterError):
        READER.number(value)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_not_an_integer(value):
    with pytest.raises(ClusterError):
        READER.integer(value)


def test_half_a_surrogate_pair_is_no_text():
    with pytest.raises(ClusterError):
        READER.text(READER.parse('"\\ud800"', ".json"))


def test_unreadable_files(tmp_path):
    with pytest.raises(ClusterError) as error:
        READER.load(tmp_path / "missing.toml")
    assert "No such file" in error.value.what
    with pytest.raises(ClusterError) as error:
        READER.load(tmp_path / "cluster.yaml")
    assert ".toml or .json" in error.value.ways_out[0]
    (tmp_path / "latin.json").write_bytes(b'"\xff"')
    with pytest.raises(ClusterError) as error:
        READER.load(tmp_path / "latin.json")
    assert "UTF-8" in error.value.what
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ClusterError):
        READER.load(tmp_path / "folder.json")


def test_what_a_message_shows_is_short_and_quoted():
    assert len(shown("x" * 1000)) <= 60
    assert shown({"a": 1}) == "a dict of 1"
    assert place("bandwidth") == "bandwidth"
    assert place("<script>\x1b[2J") == "'<script>\\x1b[2J'"
    assert nearest("qqqq", ["fast"]) == ("known: fast",)
