"""Devices of other speeds compute the same, later."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest

import hetpass as hp
from hetpass.analysis.flops import jaxpr_flops
from hetpass.backend.emulate import Emulation
from hetpass.errors import ExecutionError
from hetpass.runtime.distributed.crew import ThreadCrew
from tests.backend.handmade import devices_of, mlp, plan_of


def part(emulation):
    from hetpass.backend.compile_part import compile_part
    from hetpass.schedules.make import make_schedule

    step, plan = mlp(1, 2), plan_of((), microbatches=2)
    schedule = make_schedule("1f1b", num_stages=1, num_microbatches=2)
    devices = devices_of(plan)
    (group,) = devices
    places = {group: (0,) * len(devices[group])}
    return step, compile_part(step.staged, plan, schedule, devices, places, 0, emulation)


def forward(compiled):
    return next(e for e in compiled.executables if e.program.role == "forward")


def arguments(compiled):
    program = forward(compiled).program
    made = [
        jax.device_put(
            np.ones(compiled.avals[s].shape, compiled.avals[s].dtype), compiled.shardings[s]
        )
        for s in program.arguments
    ]
    return [*made, compiled.numbers[0][0]]


@pytest.mark.parametrize("emulation", [Emulation(repeats=3), Emulation(flops_per_s=1e9)])
def test_the_same_is_computed(emulation):
    _, plain = part(Emulation())
    _, slow = part(emulation)
    expected = forward(plain).call(*arguments(plain))
    found = forward(slow).call(*arguments(slow))
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, other)


def test_repeated_executables_take_over_nothing():
    _, compiled = part(Emulation(repeats=2))
    assert all(e.donated == () for e in compiled.executables)


def test_a_rate_is_kept():
    """A lower bound: the machine may be as slow as it likes."""
    step, compiled = part(Emulation())
    flops = sum(jaxpr_flops(f.jaxpr) for f in step.staged.fragments if f.role == "forward")
    _, compiled = part(Emulation(flops_per_s=flops / 0.2))
    values = arguments(compiled)
    begin = time.perf_counter()
    forward(compiled).call(*values)
    assert time.perf_counter() - begin >= 0.2


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"flops_per_s": 0.0}, {"flops_per_s": -1.0}])
def test_no_device_is_like_that(wrong):
    with pytest.raises(ExecutionError, match="HP-RUN-EMULATION"):
        Emulation(**wrong)


def test_groups_that_are_not_there_are_refused():
    options = hp.WorkerOptions(emulation={"fats": Emulation(repeats=2)})
    workers = hp.Workers(options=options, crew=lambda c: ThreadCrew(c, c.bind(jax.devices())))
    with pytest.raises(hp.HetpassError, match="fats"):
        workers.talk(hp.Cluster.emulated({"fast": 1}))
    with pytest.raises(ExecutionError, match="HP-RUN-TRANSPORT"):
        hp.WorkerOptions(transport="pigeon")
