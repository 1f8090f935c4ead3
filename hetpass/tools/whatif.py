"""`hetpass whatif`: the same program on a changed cluster. No JAX."""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import Any

from hetpass.cost.analytic import ASSUMED
from hetpass.errors import ToolError
from hetpass.ir.catalogue import catalogue, find_kind
from hetpass.ir.cluster import DeviceGroup, Link
from hetpass.ir.device_records import read_quantity
from hetpass.ir.quantities import counted
from hetpass.planner.evaluate import evaluate
from hetpass.planner.search import SearchOptions
from hetpass.planner.what_if import (
    AddGroup,
    Change,
    Outcome,
    Prices,
    RemoveGroup,
    ReplaceGroup,
    SetLink,
    WhatIf,
    what_if,
)
from hetpass.tools.answer import Answer, Command, Table
from hetpass.tools.bundle import declare_plan, read_bundle
from hetpass.tools.plans import evaluation_data, seconds, stage_table
from hetpass.tools.terminal import Terminal

_GROUP = re.compile(r"(?P<name>[\w.-]+)=(?P<kind>[\w .-]+?)x(?P<one>\d+)(?:x(?P<two>\d+))?")
_LINK = re.compile(r"(?P<first>[\w.-]+):(?P<second>[\w.-]+)=(?P<latency>[^,]+),(?P<bandwidth>.+)")
_PRICE = re.compile(r"(?P<kind>[\w .-]+)=(?P<price>[0-9]+\.?[0-9]*|\.[0-9]+)")


def whatif(arguments: Namespace, terminal: Terminal) -> Answer:
    """Plans the program of a plan for its cluster as it is, and as it would be."""
    bundle = read_bundle(arguments)
    changes: list[Change] = [
        *(RemoveGroup(name) for name in arguments.remove),
        *(AddGroup(_group(text, "--add")) for text in arguments.add),
        *(_replacement(text) for text in arguments.replace),
        *(_link(text) for text in arguments.link),
    ]
    if not changes:
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            "nothing is changed",
            where="whatif",
            ways_out=[
                "--add NAME=KINDxN",
                "--remove NAME",
                "--replace NAME=KINDxN",
                "--link A:B=…",
            ],
        )
    if arguments.tokens is not None and arguments.tokens < 1:
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            f"{arguments.tokens} tokens in an example",
            where="--tokens",
            ways_out=["a whole number of at least 1"],
        )
    prices = Prices(dict(map(_price, arguments.price)), arguments.tokens)
    options = SearchOptions()
    options = replace(options, tables=replace(options.tables, assumed=ASSUMED))
    with terminal.working("planning twice"):
        found = what_if(bundle.facts, bundle.cluster, changes, options, prices)
    data = {
        "before": _data(found.before),
        "after": _data(found.after),
        "speedup": found.speedup if math.isfinite(found.speedup) else None,
    }
    own = evaluate(bundle.plan, bundle.facts, bundle.cluster, ASSUMED)
    parts: list[str | Table] = [
        f"planned anew for the cluster as it is, and as it would be; the plan itself takes "
        f"{seconds(own.step_s)}",
        str(found),
        *_unpriced(prices, found),
    ]
    after = found.after.evaluation
    if after is not None:
        count = counted(after.plan.num_microbatches, "microbatch")
        parts.append(stage_table(after, f"after, {count}"))
    return Answer(parts, data)


def _unpriced(prices: Prices, found: WhatIf) -> list[str]:
    """Why money is not told, where prices are given and some are missing."""
    groups = [g for side in (found.before, found.after) for g in side.cluster.groups]
    known = prices.per_device_hour
    missing = {g.kind.name for g in groups if g.name not in known and g.kind.name not in known}
    if not known or not missing:
        return []
    flags = " ".join(f"--price {kind}=AMOUNT" for kind in sorted(missing))
    return [f"money is told where every group has a price; missing: {flags}"]


def _data(outcome: Outcome) -> dict[str, Any]:
    data: dict[str, Any] = {
        "cluster": outcome.cluster.to_dict(),
        "idle_devices": outcome.idle_devices,
        "price_per_hour": outcome.price_per_hour,
        "price_per_million": outcome.price_per_million,
    }
    if outcome.refusal is not None:
        data["refused"] = outcome.refusal.code
    if outcome.evaluation is not None:
        data |= evaluation_data(outcome.evaluation)
    return data


def _matched(pattern: re.Pattern[str], text: str, flag: str, example: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ToolError(
            "HP-TOOL-ARGUMENTS", f"{text!r} cannot be read", where=flag, ways_out=[example]
        )
    return match


def _group(text: str, flag: str) -> DeviceGroup:
    """ "new=H100-80x8" is one host of eight, "new=H100-80x2x8" two of them."""
    match = _matched(_GROUP, text, flag, f"{flag} new=H100-80x8, or new=H100-80x2x8: two hosts")
    hosts, devices = (
        (int(match["one"]), int(match["two"])) if match["two"] else (1, int(match["one"]))
    )
    network = catalogue().network if hosts > 1 else None
    return DeviceGroup(match["name"], find_kind(match["kind"]), hosts, devices, inter_host=network)


def _replacement(text: str) -> ReplaceGroup:
    group = _group(text, "--replace")
    return ReplaceGroup(group.name, group)


def _link(text: str) -> SetLink:
    match = _matched(_LINK, text, "--link", '--link "fast:slow=50 us,100 Gbps"')
    link = Link(
        read_quantity(match["latency"].strip(), "time"),
        read_quantity(match["bandwidth"].strip(), "bandwidth"),
    )
    return SetLink(match["first"], match["second"], link)


def _price(text: str) -> tuple[str, float]:
    match = _matched(_PRICE, text, "--price", "--price H100-80=2.5")
    return match["kind"], float(match["price"])


def _declare(parser: ArgumentParser) -> None:
    declare_plan(parser)
    parser.add_argument("--add", action="append", default=[], metavar="NAME=KINDxN",
                        help="new=H100-80x8; new=H100-80x2x8: two hosts")  # fmt: skip
    parser.add_argument("--remove", action="append", default=[], metavar="NAME")
    parser.add_argument("--replace", action="append", default=[], metavar="NAME=KINDxN")
    parser.add_argument("--link", action="append", default=[], metavar="A:B=LATENCY,BANDWIDTH")
    parser.add_argument("--price", action="append", default=[], metavar="KIND=AMOUNT",
                        help="of one device for an hour")  # fmt: skip
    parser.add_argument("--tokens", type=int, metavar="N", help="in an example")


COMMANDS = (Command("whatif", "the same program on a changed cluster", _declare, whatif),)
