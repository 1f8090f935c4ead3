"""The lanes of all processes together do what the one order does, and never wait in a circle."""

from __future__ import annotations

import pytest

from hetpass.backend.compile import compile
from hetpass.runtime.dispatch import Move, Run, Wait, dispatch
from hetpass.runtime.distributed.lanes import Hand, Post, Take, lane_steps
from hetpass.schedules.make import make_schedule
from tests.backend.handmade import devices_of, mlp, plan_of

PLACEMENTS = {
    "a process per stage": ({0: 0, 1: 1, 2: 2}),
    "two stages in one process": ({0: 0, 1: 0, 2: 1}),
    "the outer ones in one process": ({0: 0, 1: 1, 2: 0}),
    "all in one process": ({0: 0, 1: 0, 2: 0}),
}


@pytest.fixture(scope="module")
def programs():
    found = {}
    for name in ("1f1b", "gpipe"):
        step = mlp(3, 4)
        plan = plan_of((), (), (), microbatches=4)
        schedule = make_schedule(name, num_stages=3, num_microbatches=4)
        compiled = compile(step.staged, plan, devices_of(plan), schedule)
        found[name] = (dispatch(compiled), schedule.lane_of, compiled.staged)
    return found


def lanes_of(program, lane_of, staged, placement):
    """Per process, its lanes."""
    routed = {
        number
        for number, t in enumerate(staged.transfers)
        if placement[staged.slots[t.source].stage] != placement[staged.slots[t.target].stage]
    }
    return {
        process: lane_steps(
            program, lane_of, [s for s, p in placement.items() if p == process], routed
        )
        for process in set(placement.values())
    }


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_run_happens_once_in_the_order_of_its_lane(programs, schedule, placement):
    program, lane_of, staged = programs[schedule]
    for lanes in lanes_of(program, lane_of, staged, placement).values():
        for lane, steps in lanes.items():
            expected = [
                s.name
                for s in program.instructions
                if isinstance(s, Run) and lane_of[s.stage] == lane
            ]
            assert [s.name for s in steps if isinstance(s, Run)] == expected


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_all_lanes_come_to_their_end(programs, schedule, placement):
    """Played in any order of lanes, with every cell there when it is read."""
    program, lane_of, staged = programs[schedule]
    processes = lanes_of(program, lane_of, staged, placement)
    tracks = [(p, steps) for p, lanes in processes.items() for steps in lanes.values()]
    cells = {p: {c for f in staged.feeds for c in (program.slots[f.slot],)} for p in processes}
    for held in cells.values():
        held.update(cell for cell, _ in program.numbers)
    sent, at = set(), [0] * len(tracks)
    moved = True
    while moved:
        moved = False
        for number, (process, steps) in reversed(list(enumerate(tracks))):
            while at[number] < len(steps):
                step = steps[at[number]]
                if isinstance(step, Take) and (step.transfer, step.microbatch) not in sent:
                    break
                play(step, cells[process], sent)
                at[number] += 1
                moved = True
    assert at == [len(steps) for _, steps in tracks]


def play(step, cells, sent):
    if isinstance(step, Take):
        sent.remove((step.transfer, step.microbatch))
        cells.add(step.target)
        return
    if isinstance(step, Run):
        assert set(step.arguments) <= cells, step.name
        cells.update(step.results)
    elif isinstance(step, Move):
        assert step.source in cells
        cells.add(step.target)
    elif isinstance(step, Hand):
        assert step.move.source in cells
        sent.add((step.move.transfer, step.move.microbatch))
    elif isinstance(step, Post):
        assert step.source in cells
        sent.add((step.transfer, step.microbatch))
    else:
        assert isinstance(step, Wait)
        assert step.token in cells
    cells.difference_update(step.drops)
