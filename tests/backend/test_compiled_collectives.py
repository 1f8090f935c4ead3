"""Collectives in compiled text: replica groups in every printed form, loops, priced differences."""

from __future__ import annotations

import pytest

from hetpass.backend.compiled_collectives import compiled_collectives, replica_groups
from hetpass.backend.laid_out import Emitted
from hetpass.backend.priced_collectives import collective_differences

MESH = (("data", 2), ("model", 4))

ALONG_MODEL = frozenset({frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})})
ALONG_DATA = frozenset(frozenset({k, k + 4}) for k in range(4))
PAIRS = frozenset(frozenset({k, k + 1}) for k in range(0, 8, 2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ALONG_MODEL),
        ("replica_groups=[2,4]<=[8]", ALONG_MODEL),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ALONG_DATA),
        ("replica_groups=[4,2]<=[8]", PAIRS),
        ("replica_groups={}", frozenset({frozenset(range(8))})),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ALONG_MODEL),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ALONG_DATA),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", PAIRS),
        (
            "replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}",
            frozenset(frozenset({k, k + 2}) for k in (0, 1, 4, 5)),
        ),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'a':(1)2}", None),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ALONG_DATA),
    ],
)
def test_groups_in_every_form(text: str, expected: frozenset[frozenset[int]] | None) -> None:
    groups = replica_groups(f"  %x = f32[4] all-reduce(%y), {text}, to_apply=%add", 8)
    if expected is not None:
        assert groups == expected
    assert sorted(d for group in groups for d in group) == list(range(8))


TEXT = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %g = f32[8]{0} get-tuple-element(%p), index=1
  %ar = f32[8]{0} all-reduce(%g), replica_groups=[2,4]<=[8], metadata={op_name="hetpass.0.1/add"}
  ROOT %t = (s32[], f32[8]) tuple(%i, %ar)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, {"known_trip_count":{"n":"5"}}
  %ag = f32[16]{0} all-gather(%v), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %at = (f32[4]{0}, f32[4]{0}) all-to-all(%a, %b), replica_groups=mesh['a'=2,'b'=4] {'a'}
  %cp = bf16[4]{0} collective-permute(%a), source_target_pairs={{0,4},{4,0},{1,1}}
  ROOT %r = f32[8] copy(%x)
}
"""


def test_kinds_bytes_axes_and_how_often() -> None:
    found = compiled_collectives(TEXT, MESH)
    assert {(c.kind, c.axes, c.result_bytes, c.count) for c in found} == {
        ("all_reduce", ("model",), 32, 5),
        ("all_gather", ("data",), 64, 1),
        ("all_to_all", ("data",), 32, 1),
        ("permute", ("data",), 8, 1),
    }
    assert any("hetpass.0.1" in c.operation for c in found)


def emitted(kind: str, axes: tuple[str, ...], size: float, count: int = 1) -> Emitted:
    return Emitted(kind, axes, size, count, "a reason")


def test_what_is_as_priced_is_not_told() -> None:
    asked = (
        emitted("reduce_scatter", ("model",), 8, 5),  # shows as an all-reduce of 4 times as much
        emitted("all_gather", ("data",), 64),
        emitted("all_to_all", ("data",), 32),
        emitted("permute", ("data", "model"), 8),
    )
    assert collective_differences(asked, compiled_collectives(TEXT, MESH), MESH) == ()


def test_what_is_not_as_priced_is_told_by_kind_and_axes() -> None:
    asked = (emitted("all_reduce", ("model",), 32, 4), emitted("all_gather", ("data",), 64))
    found = collective_differences(asked, compiled_collectives(TEXT, MESH)[:2], MESH)
    (difference,) = found
    assert (difference.kind, difference.axes) == ("all_reduce", ("model",))
    assert difference.priced == (4, 128)
    assert difference.compiled == (5, 160)
    assert difference.difference_bytes == 32
    assert "hetpass.0.1" in " ".join(difference.reasons)
