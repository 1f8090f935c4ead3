"""`hetpass dryrun`: a plan compiled for devices that are not here."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hetpass.tools.answer import Answer, Command
from hetpass.tools.sorts import CLUSTER, PLAN
from hetpass.tools.steps import declare_step, on_this_processor, stepped
from hetpass.tools.target import load_target
from hetpass.tools.terminal import Terminal


def dryrun(arguments: Namespace, terminal: Terminal) -> Answer:
    """What the compiler for each device kind makes of a plan: memory, and whether it fits."""
    on_this_processor()
    cluster = CLUSTER.load(arguments.cluster)
    plan = PLAN.load(arguments.plan) if arguments.plan else None
    target = load_target(arguments)
    step = stepped(target, cluster, arguments, status=terminal.progress)
    with terminal.working("tracing"):
        traced = step.trace(*target.arguments)
    with terminal.working("planning"):
        planned = traced.plan() if plan is None else traced.with_plan(plan)
    with terminal.working("compiling"):
        found = planned.dryrun()
    stages = [
        {
            "group": stage.group,
            "kind": stage.kind,
            "peak_bytes": stage.peak_bytes,
            "limit_bytes": stage.limit_bytes,
            "fits": stage.fits,
        }
        for stage in found.stages
    ]
    data = {"programs": found.programs, "compiled": found.compiled, "stages": stages}
    return Answer([str(planned.plan), str(found)], data, good=found.fits)


def _declare(parser: ArgumentParser) -> None:
    declare_step(parser)
    parser.add_argument("--cluster", metavar="FILE", required=True, help=".toml or .json")
    parser.add_argument("--plan", metavar="FILE", help="default: the one that is found")


COMMANDS = (Command("dryrun", "compile a plan for devices that are not here", _declare, dryrun),)
