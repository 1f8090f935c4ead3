"""A measured run as a Timeline, the same type as a simulated one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from hetpass.backend.compile import CompiledStep
from hetpass.ir.schedule import TaskKind
from hetpass.ir.timeline import MemoryCurve, Span, SpanKind, Timeline
from hetpass.runtime.dispatch import Dispatch, Move, Run, Wait
from hetpass.runtime.recorder import Observe

_KINDS: Mapping[str, TaskKind] = {"forward": "F", "backward": "B", "weight": "W"}

_Seen = tuple[Run | Move, float, float]


def measure(
    compiled: CompiledStep,
    program: Dispatch,
    observed: Callable[[Sequence[Any], Observe], list[jax.Array]],
    arguments: Sequence[Any],
    lane_names: Sequence[str],
) -> tuple[list[jax.Array], Timeline]:
    """One step, waited for, and what every lane and link did in it.

    Spans of kind "update" are what runs once per step. Links are named "0→1" by stages; a span on
    one lasts from when the value was there to when it had arrived. The memory curves count the
    slots that are occupied, by the driver's own book; what the compiler uses on the way is not in
    them.

    Args:
      compiled, program: what runs.
      observed: runs it with the arguments, and tells the times of every fragment and transfer.
      arguments: as for the runtime.
      lane_names: one per lane of the schedule.
    """
    seen: list[_Seen] = []
    lock = threading.Lock()

    def observe(instruction: Run | Move, start_s: float, end_s: float) -> None:
        with lock:
            seen.append((instruction, start_s, end_s))

    results = observed(arguments, observe)
    zero_s = min((start_s for _, start_s, _ in seen), default=0.0)
    seen = [(what, start_s - zero_s, end_s - zero_s) for what, start_s, end_s in seen]
    lane_of = compiled.schedule.lane_of
    spans = [_span(*row, lane_names, lane_of) for row in seen]
    links = sorted({s.track for s in spans if s.kind in ("send-F", "send-B")})
    memory = _curves(compiled, program, seen, lane_names)
    return results, Timeline(tuple(lane_names), tuple(links), tuple(spans), memory)


def _span(
    what: Run | Move,
    start_s: float,
    end_s: float,
    lane_names: Sequence[str],
    lane_of: Sequence[int],
) -> Span:
    number = -1 if what.microbatch is None else what.microbatch
    if isinstance(what, Move):
        source, target = what.stages
        kind: SpanKind = "send-F" if target > source else "send-B"
        return Span(f"{source}→{target}", kind, source, number, start_s, end_s)
    kind = _KINDS.get(what.name.split()[0], "update")
    return Span(lane_names[lane_of[what.stage]], kind, what.stage, number, start_s, end_s)


def _curves(
    compiled: CompiledStep, program: Dispatch, seen: Sequence[_Seen], lane_names: Sequence[str]
) -> tuple[MemoryCurve, ...]:
    """Per lane, the bytes of its slots: those of the whole step, and those of microbatches that
    are there from the start of what fills them to the end of what reads them last."""
    lane_of, count = compiled.schedule.lane_of, compiled.staged.num_microbatches
    fixed = [0.0] * len(lane_names)
    cells: dict[int, tuple[int, float]] = {}
    for slot, aval, first in zip(compiled.staged.slots, compiled.avals, program.slots, strict=True):
        size = float(aval.size * getattr(aval.dtype, "itemsize", 0))
        if slot.scope == "step":
            fixed[lane_of[slot.stage]] += size
        else:
            place = (lane_of[slot.stage], size)
            cells.update((cell, place) for cell in range(first, first + count))
    times = {id(what): (start_s, end_s) for what, start_s, end_s in seen}
    changes: list[tuple[float, int, float]] = []
    for step in program.instructions:
        if isinstance(step, Wait):
            continue
        start_s, end_s = times[id(step)]
        made = step.results if isinstance(step, Run) else (step.target,)
        moments = [(start_s, c, 1) for c in made] + [(end_s, c, -1) for c in step.drops]
        changes += [(t, cells[c][0], sign * cells[c][1]) for t, c, sign in moments if c in cells]
    curves = []
    for lane, name in enumerate(lane_names):
        times_s, held = [0.0], [fixed[lane]]
        for time_s, where, change in sorted(changes):
            if where == lane:
                times_s.append(time_s)
                held.append(held[-1] + change)
        curves.append(MemoryCurve(name, tuple(times_s), tuple(held)))
    return tuple(curves)
