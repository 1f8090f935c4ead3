"""Executables: collectives, donation, memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hetpass.backend.compile import compile
from hetpass.backend.report import report
from hetpass.errors import PlanError
from hetpass.ir.kinds import Partial
from hetpass.schedules.make import make_schedule
from tests.backend.handmade import devices_of, mlp, plan_of

GPIPE = dict(num_stages=2, num_microbatches=2)


def compiled(*meshes, microbatches=2, **options):
    plan = plan_of(*meshes, microbatches=microbatches)
    schedule = make_schedule("gpipe", num_stages=len(meshes), num_microbatches=microbatches)
    staged = mlp(len(meshes), microbatches).staged
    return compile(staged, plan, devices_of(plan), schedule, **options)


def test_gradients_are_reduced_once_per_step():
    reports = report(compiled((("data", 2),), (("data", 3),)))
    for fragment in reports:
        if fragment.role in ("forward", "backward", "start"):
            assert not fragment.collectives, str(fragment)
    for stage in (0, 1):
        (sums,) = (r for r in reports if (r.stage, r.role, r.phase) == (stage, "epilogue", 0))
        assert set(sums.collectives) == {"all-reduce"}
        # Two gradients: 8 x 8 and 8 float32; one instruction or one each.
        assert sums.collectives["all-reduce"].count <= 2
        assert sums.collectives["all-reduce"].result_bytes == 4 * (64 + 8)


def test_accumulators_and_state_are_changed_in_place():
    step = compiled((), (("data", 2),))
    names = {slot.index: slot.name for slot in step.staged.slots}
    donated = {
        (e.program.stage, e.program.role, e.program.phase): {names[s] for s in e.donated}
        for e in step.executables
    }
    assert donated[1, "backward", 0] >= {"dw1", "dc1"}
    assert donated[1, "forward", 0] == {"outs", "loss", "top"}
    assert donated[0, "epilogue", 2] == {"w0", "c0"}
    assert donated[1, "backward", 0] & {"h0@1", "h1"}  # one of them becomes dh1
    sent = {names[t.source] for t in step.staged.transfers}
    assert not sent & set(itertools.chain(*donated.values()))
    for executable in step.executables:
        alias_bytes = executable.call.memory_analysis().alias_size_in_bytes
        assert (alias_bytes > 0) == bool(executable.donated)


def test_arguments_that_the_caller_keeps_are_never_donated():
    plan = plan_of((), ())
    staged = mlp(2, 1, donated=False).staged
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=1)
    step = compile(staged, plan, devices_of(plan), schedule)
    fed = {feed.slot for feed in staged.feeds}
    assert not fed & {slot for e in step.executables for slot in e.donated}


def test_what_lies_on_one_device_for_two_stages_is_not_donated():
    plan = plan_of((), ())
    device = devices_of(plan)["g0"]
    schedule = make_schedule("gpipe", **GPIPE)
    step = compile(mlp(2, 2).staged, plan, {"g0": device, "g1": device}, schedule)
    received = {transfer.target for transfer in step.staged.transfers}
    assert all(link.aliases for link in step.links)
    assert not received & {slot for e in step.executables for slot in e.donated}


def test_results_have_slots_of_their_own():
    step = compiled((("data", 2),), ())
    slots = [result.slot for result in step.staged.results]
    assert len(set(slots)) == len(slots)
    assert not any(isinstance(step.staged.slots[s].kind, Partial) for s in slots)


def test_seconds_come_from_the_clock_that_is_given():
    ticks = itertools.count()
    timed = compiled((), (), clock=lambda: float(next(ticks)), threads=1)
    assert all(r.compile_s > 0 for r in report(timed))
    assert all(r.compile_s == 0 for r in report(compiled((), ())))


def test_refused_before_anything_is_lowered(monkeypatch):
    monkeypatch.setattr("hetpass.backend.stored_slots.lower", None)
    with pytest.raises(PlanError, match="HP-PLAN-DATA-AXIS"):
        compiled((("data", 5),), ())


def test_memory_is_counted_per_device():
    one = {(r.stage, r.role, r.phase): r for r in report(compiled((("data", 1),), ()))}
    two = {(r.stage, r.role, r.phase): r for r in report(compiled((("data", 2),), ()))}
    alone, shared = one[0, "start", 0], two[0, "start", 0]
    assert alone.output_bytes == shared.output_bytes  # [D, …] over D devices
    whole, half = one[0, "forward", 0], two[0, "forward", 0]
    assert half.argument_bytes < whole.argument_bytes
    assert whole.peak_bytes >= np.float32().nbytes * 64
