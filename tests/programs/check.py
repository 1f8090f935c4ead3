"""Runs a Program through the whole compile flow in chosen layouts and holds it to its promise."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import hetpass as hp
from tests.equality import GROUPS, Layout, differences, plan_text
from tests.programs.program import Program, Run


def check(program: Program, layouts: Iterable[Layout]) -> None:
    """Fails with every layout whose result is neither equal nor refused as the program allows."""
    expected: dict[int, Any] = {}
    failures = []
    if program.make().batch_size() is None:  # nothing to cut into microbatches
        layouts = {Layout(1, layout.num_groups) for layout in layouts}
    for layout in layouts:
        key = layout.num_microbatches if program.reference else 0
        if key not in expected:
            expected[key] = _expected(program, layout.num_microbatches)
        failures += [f"{layout}: {why}" for why in faults(program, layout, expected[key])]
    assert not failures, f"{program}\n" + "\n".join(f"  {failure}" for failure in failures)


def faults(program: Program, layout: Layout, expected: Any) -> list[str]:
    """What is wrong with the program's outcome in a layout; [] if nothing is."""
    run = program.make()
    try:
        text, compiled = _compiled(run, layout, str(program))
    except hp.HetpassError as refusal:
        return _faults_of_refusal(program, layout, refusal)
    if program.expect == "refused" and layout.num_microbatches > 1:
        return ["was not refused"]
    actual = compiled(*run.args, **run.kwargs)
    found = differences(actual, expected, program.precision, program.zeros, program.tolerance)
    return [f"{text}: {difference}" for difference in found]


def _expected(program: Program, num_microbatches: int) -> Any:
    run = program.make()
    if program.reference is not None:
        return program.reference(run, num_microbatches)
    return run.jitted()(*run.args, **run.kwargs)


def _compiled(run: Run, layout: Layout, name: str) -> tuple[str, Any]:
    """The plan's text and the compiled step."""
    step = hp.het_parallelize(
        run.step,
        cluster=hp.Cluster.emulated(GROUPS[layout.num_groups]),
        num_microbatches=layout.num_microbatches,
        **run.options,
    )
    traced = step.trace(*run.args, **run.kwargs)
    num_layers = traced.plan().layered.num_layers
    size = run.batch_size()
    rows = None if size is None else size // layout.num_microbatches
    draw = random.Random(f"{name} {layout}")
    text = plan_text(num_layers, layout.num_groups, draw, rows)
    return text, traced.with_plan(text).compile()


def _faults_of_refusal(program: Program, layout: Layout, refusal: hp.HetpassError) -> list[str]:
    if program.expect == "equal" or (program.expect == "either" and layout.num_microbatches == 1):
        return [f"was refused: {refusal}"]
    faults = []
    if not refusal.code.startswith(program.refusal):
        faults.append(f"was refused as {refusal.code}, not {program.refusal}-…: {refusal}")
    if ".py:" not in refusal.where:
        faults.append(f"the refusal names no source line: {refusal}")
    if not refusal.ways_out:
        faults.append(f"the refusal names no way out: {refusal}")
    return faults
