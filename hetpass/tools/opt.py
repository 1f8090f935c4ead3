"""`hetpass opt`: the passes one by one, each value printed, as a compiler's own `opt` does."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from hetpass.tools.answer import Answer, Command
from hetpass.tools.sorts import CLUSTER
from hetpass.tools.steps import declare_step, stepped
from hetpass.tools.target import load_target
from hetpass.tools.terminal import Terminal

if TYPE_CHECKING:
    from hetpass.pipeline import PassRecord

PASSES = ("trace", "split", "segment", "summarize", "plan", "schedule", "partition", "compile")
_MOST_LINES = 60


class _Stop(Exception):
    """The pass that was asked for is done."""


def opt(arguments: Namespace, terminal: Terminal) -> Answer:
    """Runs the passes up to one of them, and prints what each made."""
    last = arguments.stop_after
    records: list[PassRecord] = []

    def observe(record: PassRecord) -> None:
        records.append(record)
        if record.name == last:
            raise _Stop

    target = load_target(arguments)
    cluster = CLUSTER.load(arguments.cluster) if arguments.cluster else None
    step = stepped(target, cluster, arguments, observe, status=terminal.progress)
    try:
        traced = step.trace(*target.arguments)
        planned = traced.plan()
        staged = step.settings.passes.partition(planned.layered, planned.plan)
        if last == "compile":
            devices = planned.traced.cluster.bind(step.settings.devices())
            step.settings.passes.compile(staged, planned.plan, devices)
    except _Stop:
        pass
    shown = records[-1:] if arguments.only else records
    parts = [_shown(record, None if arguments.full else _MOST_LINES) for record in shown]
    data = {"passes": [{"name": r.name, "seconds": r.seconds, "value": _text(r.value)}
                       for r in shown]}  # fmt: skip
    return Answer(parts, data)


def _text(value: Any) -> str:
    return str(value)


def _shown(record: PassRecord, most_lines: int | None) -> str:
    lines = _text(record.value).splitlines()
    if most_lines is not None and len(lines) > most_lines:
        left = len(lines) - most_lines
        lines = [*lines[:most_lines], f"… {left} more lines (--full shows all)"]
    head = f"== {record.name} ({type(record.value).__name__}, {record.seconds:.2f} s)"
    return "\n".join([head, *lines, ""])


def _declare(parser: ArgumentParser) -> None:
    declare_step(parser)
    parser.add_argument("--cluster", metavar="FILE", help="default: the devices that are here")
    parser.add_argument("--stop-after", choices=PASSES, default="partition", metavar="PASS",
                        help=f"one of {', '.join(PASSES)}; default: partition")  # fmt: skip
    parser.add_argument("--only", action="store_true", help="print the last value alone")
    parser.add_argument("--full", action="store_true", help="print long values to the end")


COMMANDS = (Command("opt", "the passes one by one, each value printed", _declare, opt),)
