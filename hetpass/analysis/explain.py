"""A plan for a program, as people read it: who computes what, and how much."""

from __future__ import annotations

from collections.abc import Sequence

from hetpass.ir.plan import Plan
from hetpass.ir.program import Layered, SliceInput
from hetpass.ir.quantities import counted, spelled


def explain(layered: Layered, plan: Plan, notes: Sequence[str] = ()) -> str:
    """A table with one row per stage, and what the step does around it."""
    program = layered.program
    traced = program.traced
    pipeline = plan.pipelines[0]
    total = sum(layered.forward_flops) + sum(layered.backward_flops)
    head = ("stage", "group", "mesh", "layers", "FLOPs", "share", "sends")
    rows = [head]
    for number, stage in enumerate(pipeline.stages):
        span = slice(stage.first_layer, stage.last_layer + 1)
        flops = sum(layered.forward_flops[span]) + sum(layered.backward_flops[span])
        last = stage.last_layer
        sends = layered.cut_bytes[last] if last < layered.num_layers - 1 else 0.0
        rows.append(
            (
                str(number),
                ", ".join(f"{r.group}[{len(r.devices)}]" for r in stage.replicas),
                ", ".join(f"{name}={size}" for name, size in stage.replicas[0].mesh),
                _layers(layered, stage.first_layer, last),
                _scaled(flops),
                f"{100 * flops / total:.0f} %" if total else "",
                spelled(sends, "bytes") if sends else "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        f"{traced.name}: {counted(layered.num_layers, 'layer')} on "
        f"{counted(len(pipeline.stages), 'stage')}, {_batch(layered)}, schedule {_schedule(plan)}"
    ]
    lines += [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.append("  FLOPs and bytes sent are per microbatch, forward and backward, forward only")
    lines.append(
        f"  once per step: {counted(len(program.prologue), 'equation')} before the microbatches, "
        f"{len(program.epilogue)} after"
    )
    full = _full_batch(layered)
    if full:
        lines.append(f"  computed on the full batch before the microbatches: {', '.join(full)}")
    lines += [f"  note: {note}" for note in notes]
    return "\n".join(lines)


def _schedule(plan: Plan) -> str:
    counts = [stage.in_flight for stage in plan.pipelines[0].stages]
    if all(count is None for count in counts):
        return plan.schedule
    held = ", ".join("-" if count is None else str(count) for count in counts)
    return f"{plan.schedule} with at most {held} in flight per stage"


def _batch(layered: Layered) -> str:
    program = layered.program
    size, count = program.traced.batch_size, program.num_microbatches
    if size is None:
        return "no batch"
    return f"batch {size} = {counted(count, 'microbatch')} of {size // count}"


def _layers(layered: Layered, first: int, last: int) -> str:
    names = (layered.names[first], layered.names[last])
    text = f"{first}" if first == last else f"{first}-{last}"
    return f"{text} ({names[0]})" if first == last else f"{text} ({names[0]} … {names[1]})"


def _full_batch(layered: Layered) -> list[str]:
    """Values that the prologue computes on the whole batch and the region reads in slices."""
    made = {v for e in layered.program.prologue for v in e.outvars}
    return [
        s.var.aval.str_short()
        for s in layered.program.region_inputs
        if isinstance(s, SliceInput) and s.var in made
    ]


def _scaled(value: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} P"
