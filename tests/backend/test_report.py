"""Collectives, read from compiled text in the forms that compilers print."""

from __future__ import annotations

from types import SimpleNamespace

import jax

from hetpass.backend.report import CollectiveCount, collectives, fragment_report

TEXT = """
HloModule jit_f, is_scheduled=true
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %a = f32[] add(%x, %y)
}
ENTRY %main {
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(%p0), channel_id=1, replica_groups=[1,2]<=[2]
  %ar = (bf16[8]{0}, s32[]) all-reduce(%p1, %p2), replica_groups={{0,1}}, to_apply=%add
  ag = pred[16]{0} all-gather(%p3), dimensions={0}
  %s = (f32[2]{0}, f32[4]{0}) all-gather-start(%p4), dimensions={0}
  %d = f32[4]{0} all-gather-done(%s)
  %rs = f32[3]{0:T(128)} all-reduce-start(%p5), to_apply=%add
  %c = (f32[5]{0}, f32[5]{0}, u32[], u32[]) collective-permute-start(%p6)
  ROOT %g = f32[4]{0} get-tuple-element(%all-reduce.1), index=0
}
"""


def test_counts_and_bytes():
    assert collectives(TEXT) == {
        "all-reduce": CollectiveCount(3, 8 * 4 * 4 + 8 * 2 + 4 + 3 * 4),
        "all-gather": CollectiveCount(2, 16 + 4 * 4),
        "collective-permute": CollectiveCount(1, 5 * 4),
    }


def test_text_without_collectives():
    assert collectives("ENTRY %main { %a = f32[4]{0} add(%all-reduce.1, %b) }") == {}


def test_what_this_jax_cannot_print_is_unknown_and_not_none():
    def as_text():
        raise jax.errors.JaxRuntimeError("INTERNAL: an instruction of a newer compiler")

    call = SimpleNamespace(as_text=as_text, memory_analysis=lambda: None)
    program = SimpleNamespace(stage=0, role="forward", phase=0, mesh=None)
    found = fragment_report(SimpleNamespace(program=program, call=call, compile_s=0.0))
    assert found.collectives is None
    assert "collectives unknown" in str(found)
