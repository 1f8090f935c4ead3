"""Commands on plans that are there: explain, simulate, plot, trace, diff. No JAX."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetpass.cost.analytic import ASSUMED
from hetpass.errors import ExecutionError, ToolError
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import counted, spelled
from hetpass.ir.timeline import Timeline
from hetpass.pictures.plot_memory import plot_memory
from hetpass.pictures.plot_sharding import plot_sharding
from hetpass.pictures.plot_timelines import plot_timelines
from hetpass.planner.evaluate import Evaluation, evaluate
from hetpass.tools.answer import Answer, Command, Table
from hetpass.tools.bundle import Bundle, declare_origin, declare_plan, not_written, read_bundle
from hetpass.tools.play import planned_timeline
from hetpass.tools.sorts import PLAN
from hetpass.tools.terminal import Terminal

PICTURES = ("timeline", "memory", "sharding")


# -- explain ----------------------------------------------------------------------------------


def explain(arguments: Namespace, terminal: Terminal) -> Answer:
    """Stage by stage: who computes what, how long, what bounds the step."""
    bundle = read_bundle(arguments)
    with terminal.working("simulating"):
        evaluation = evaluate(bundle.plan, bundle.facts, bundle.cluster, ASSUMED)
    return Answer(
        [f"{bundle.name}: {_head(bundle.plan)}", stage_table(evaluation), *_remarks(evaluation)],
        evaluation_data(evaluation),
        good=not evaluation.violations,
    )


def _head(plan: Plan) -> str:
    return (
        f"{counted(plan.num_layers, 'layer')} on {counted(plan.num_stages, 'stage')}, "
        f"{counted(plan.num_microbatches, 'microbatch')}, schedule {plan.schedule}"
    )


def stage_table(evaluation: Evaluation, title: str = "") -> Table:
    """One row per stage."""
    rows = []
    for index, s in enumerate(evaluation.stages):
        mesh = evaluation.plan.pipelines[0].stages[index].replicas[0].mesh
        held = s.fixed_bytes + s.activation_bytes
        rows.append(
            (
                str(index),
                f"{s.devices} {s.kind}",
                s.group,
                " ".join(f"{name}={size}" for name, size in mesh),
                f"{s.first_layer}-{s.last_layer}",
                seconds(s.forward_s),
                seconds(s.backward_s),
                seconds(s.send_s) if s.send_s else "",
                seconds(s.once_s),
                str(s.in_flight),
                f"{spelled(held, 'bytes')} of {spelled(s.limit_bytes, 'bytes')}",
                f"{s.busy:.0%}" + (" ←" if index == evaluation.bottleneck else ""),
            )
        )
    head = ("stage", "devices", "group", "mesh", "layers", "F", "B", "send", "once", "in flight",
            "memory", "busy")  # fmt: skip
    return Table(head, tuple(rows), title)


def _remarks(evaluation: Evaluation) -> list[str]:
    if evaluation.violations:
        return [f"cannot run: {text}" for text in evaluation.violations]
    slowest = evaluation.stages[evaluation.bottleneck]
    return [
        f"step {seconds(evaluation.step_s)} by simulation ({evaluation.schedule}); balance "
        f"{evaluation.balance:.0%}; stage {evaluation.bottleneck} on {slowest.group} bounds it",
        "F, B, send per microbatch; once: gradient sync and update; memory per device",
    ]


def evaluation_data(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as JSON can hold it."""
    fields = ("group", "kind", "first_layer", "last_layer", "devices", "forward_s", "backward_s",
              "once_s", "send_s", "in_flight", "fixed_bytes", "activation_bytes", "limit_bytes",
              "busy")  # fmt: skip
    return {
        "step_s": finite(evaluation.step_s),
        "objective_s": finite(evaluation.objective_s),
        "schedule": evaluation.schedule,
        "balance": evaluation.balance if not evaluation.violations else None,
        "bottleneck": evaluation.bottleneck,
        "violations": list(evaluation.violations),
        "stages": [
            {name: finite(getattr(stage, name)) for name in fields} for stage in evaluation.stages
        ],
    }


def finite(value: Any) -> Any:
    """None for an infinite number, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def seconds(value: float) -> str:
    """ "12.3 ms"."""
    return spelled(value, "time") if math.isfinite(value) else "never"


# -- simulate, plot, trace --------------------------------------------------------------------


def simulate(arguments: Namespace, terminal: Terminal) -> Answer:
    """What every lane does in one step: busy, exposed transfers, bubbles, memory."""
    bundle = _scheduled(read_bundle(arguments), arguments.schedule)
    with terminal.working("simulating"):
        timeline = planned_timeline(bundle)
    shares = timeline.shares()
    peaks = {curve.track: curve.peak_bytes for curve in timeline.memory}
    rows = tuple(
        (
            lane,
            f"{s.busy:.1%}",
            f"{s.exposed:.1%}",
            f"{s.bubble:.1%}",
            spelled(peaks[lane], "bytes") if lane in peaks else "",
        )
        for lane, s in zip(timeline.lanes, shares, strict=True)
    )
    return Answer(
        [
            f"{bundle.name}: {seconds(timeline.makespan_s)} a step by simulation, schedule "
            f"{bundle.plan.schedule}, {counted(bundle.plan.num_microbatches, 'microbatch')}",
            Table(("lane", "busy", "exposed transfer", "bubble", "holds up to"), rows),
        ],
        {
            "step_s": timeline.makespan_s,
            "lanes": {
                lane: {"busy": s.busy, "exposed": s.exposed, "bubble": s.bubble,
                       "peak_bytes": peaks.get(lane)}
                for lane, s in zip(timeline.lanes, shares, strict=True)
            },
        },
    )  # fmt: skip


def _scheduled(bundle: Bundle, schedule: str | None) -> Bundle:
    if schedule is None:
        return bundle
    pipelines = tuple(
        replace(p, stages=tuple(replace(s, in_flight=None) for s in p.stages))
        for p in bundle.plan.pipelines
    )
    plan = replace(bundle.plan, pipelines=pipelines, schedule=schedule, tasks=(), predictions={})
    return replace(bundle, plan=plan)


def plot(arguments: Namespace, terminal: Terminal) -> Answer:
    """A picture of a plan."""
    out = Path(arguments.output or f"{arguments.what}.png")
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ToolError(
            "HP-TOOL-PICTURE",
            f"the suffix {out.suffix!r} says no format of a picture",
            where=str(out),
            ways_out=["name the file .png, .svg or .pdf"],
        )
    bundle = read_bundle(arguments)
    with terminal.working("drawing"):
        try:
            if arguments.what == "timeline":
                plot_timelines({f"{bundle.name}, {_head(bundle.plan)}": planned_timeline(bundle)},
                               out)  # fmt: skip
            elif arguments.what == "memory":
                evaluation = evaluate(bundle.plan, bundle.facts, bundle.cluster, ASSUMED)
                plot_memory(evaluation.stages, out, title=bundle.name)
            else:
                plot_sharding(bundle.plan, bundle.cluster, out)
        except ExecutionError as error:
            if isinstance(error.__cause__, OSError):
                raise not_written(error.__cause__) from None
            raise
    return Answer([f"wrote {out}"], {"path": str(out), "what": arguments.what})


def trace(arguments: Namespace, terminal: Terminal) -> Answer:
    """The simulated step for ui.perfetto.dev and chrome://tracing."""
    bundle = read_bundle(arguments)
    with terminal.working("simulating"):
        timeline: Timeline = planned_timeline(bundle)
    out = Path(arguments.output)
    try:
        timeline.save_trace(out)
    except OSError as error:
        raise not_written(error) from None
    events = len(timeline.spans)
    return Answer(
        [f"wrote {out}: {counted(events, 'span')}; open it at ui.perfetto.dev"],
        {"path": str(out), "spans": events},
    )


# -- diff -------------------------------------------------------------------------------------


def diff(arguments: Namespace, terminal: Terminal) -> Answer:
    """What two plans do differently; where facts are known, what that costs."""
    one, other = PLAN.load(arguments.plan), PLAN.load(arguments.other)
    rows = [
        (name, mine, theirs)
        for name, (mine, theirs) in _compared(one, other).items()
        if mine != theirs
    ]
    step_s: dict[str, float | None] = {}
    for path in (arguments.plan, arguments.other):
        try:
            bundle = read_bundle(arguments, path)
        except ToolError:  # no facts beside the plan: it is compared as it stands
            continue
        with terminal.working("simulating"):
            step_s[path] = finite(
                evaluate(bundle.plan, bundle.facts, bundle.cluster, ASSUMED).step_s
            )
    table = Table(("", arguments.plan, arguments.other), tuple(rows))
    parts: list[str | Table] = [table] if rows else ["the plans are equal"]
    parts += [
        f"{path}: {seconds(s) if s is not None else 'cannot run'}" for path, s in step_s.items()
    ]
    data = {"equal": not rows, "step_s": step_s,
            "differences": {name: [mine, theirs] for name, mine, theirs in rows}}  # fmt: skip
    return Answer(parts, data, good=not rows)


def _compared(one: Plan, other: Plan) -> Mapping[str, tuple[str, str]]:
    pairs = {
        "microbatches": (str(one.num_microbatches), str(other.num_microbatches)),
        "schedule": (one.schedule, other.schedule),
        "fingerprint": (str(one.fingerprint), str(other.fingerprint)),
        "order of tasks": (_tasks(one), _tasks(other)),
    }
    mine, theirs = _stage_texts(one), _stage_texts(other)
    for key in sorted(mine.keys() | theirs.keys()):
        pairs[f"stage {key[1]}" if not key[0] else f"stage {key[0]}.{key[1]}"] = (
            mine.get(key, ""),
            theirs.get(key, ""),
        )
    return pairs


def _tasks(plan: Plan) -> str:
    listed = sum(len(t.split()) for t in plan.tasks)
    return f"{counted(listed, 'task')} listed" if plan.tasks else "by name"


def _stage_texts(plan: Plan) -> dict[tuple[int, int], str]:
    texts = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            places = " + ".join(
                f"{r.group}[{len(r.devices)}]"
                f"({','.join(f'{name}={size}' for name, size in r.mesh)})"
                for r in stage.replicas
            )
            more = [f"recompute {stage.recompute}"] if stage.recompute != "none" else []
            more += [f"in flight {stage.in_flight}"] if stage.in_flight is not None else []
            notes = f" ({', '.join(more)})" if more else ""
            texts[p, s] = f"{stage.first_layer}-{stage.last_layer} on {places}{notes}"
    return texts


# ---------------------------------------------------------------------------------------------


def _declare_simulate(parser: ArgumentParser) -> None:
    declare_plan(parser)
    parser.add_argument("--schedule", metavar="NAME", help="instead of the plan's own")


def _declare_plot(parser: ArgumentParser) -> None:
    declare_plan(parser)
    parser.add_argument("--what", choices=PICTURES, default="timeline")
    parser.add_argument("-o", "--output", metavar="FILE", help=".png, .svg or .pdf")


def _declare_trace(parser: ArgumentParser) -> None:
    declare_plan(parser)
    parser.add_argument("-o", "--output", metavar="FILE", default="trace.json")


def _declare_diff(parser: ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN")
    parser.add_argument("other", metavar="PLAN")
    declare_origin(parser)


COMMANDS = (
    Command("explain", "who computes what, and what bounds the step", declare_plan, explain),
    Command("simulate", "play a plan on the simulator", _declare_simulate, simulate),
    Command("plot", "draw a plan's timeline, memory or sharding", _declare_plot, plot),
    Command("trace", "write the simulated step for Perfetto", _declare_trace, trace),
    Command("diff", "what two plans do differently", _declare_diff, diff),
)
