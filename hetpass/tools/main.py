"""`hetpass`: reads the command line, runs one command, prints its answer.

Exit codes: 0 done; 1 refused, or the answer is no; 2 the command line cannot be followed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from hetpass import __version__
from hetpass.errors import HetpassError, ToolError
from hetpass.tools import (
    bench,
    cache,
    catalogue,
    doctor,
    dryrun,
    opt,
    planning,
    plans,
    profile,
    validate,
    whatif,
)
from hetpass.tools.answer import Command
from hetpass.tools.switches import traceback_wanted
from hetpass.tools.terminal import Terminal

DONE, REFUSED, MISUSED, INTERRUPTED = 0, 1, 2, 130

COMMANDS: tuple[Command, ...] = (
    *doctor.COMMANDS,
    *catalogue.COMMANDS,
    *planning.COMMANDS,
    *plans.COMMANDS,
    *validate.COMMANDS,
    *whatif.COMMANDS,
    *dryrun.COMMANDS,
    *profile.COMMANDS,
    *opt.COMMANDS,
    *bench.COMMANDS,
    *cache.COMMANDS,
)


class _Parser(argparse.ArgumentParser):
    """Refuses a line as everything here is refused, so that `--json` holds for it too."""

    def error(self, message: str) -> NoReturn:
        raise ToolError(
            "HP-TOOL-USAGE",
            message,
            where=self.prog,
            details=self.format_usage().splitlines(),
            ways_out=[f"{self.prog} --help"],
        )


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; raises HP-TOOL-USAGE."""
    top = _Parser(
        prog="hetpass",
        description="Run a JAX train step as a pipeline over a cluster whose machines differ.",
        epilog="hetpass COMMAND --help says more. Exit codes: 0 done, 1 refused or no, 2 misused.",
    )
    top.add_argument("--json", action="store_true", help="print data, not text")
    top.add_argument("--version", action="version", version=f"hetpass {__version__}")
    first = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    groups: dict[str, argparse._SubParsersAction[_Parser]] = {}
    for command in COMMANDS:
        where = first
        *group, name = command.name.split()
        if group:
            (word,) = group
            if word not in groups:
                inside = [c for c in COMMANDS if c.name.startswith(f"{word} ")]
                said = "; ".join(f"{c.name.removeprefix(word).strip()}: {c.help}" for c in inside)
                above = first.add_parser(word, help=said)
                groups[word] = above.add_subparsers(dest="word", metavar="WHAT", required=True)
            where = groups[word]
        sub = where.add_parser(name, help=command.help, description=command.help)
        command.declare(sub)
        sub.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,  # may stand in front of the command too
            help="print data, not text",
        )
        sub.set_defaults(chosen=command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code."""
    line = sys.argv[1:] if argv is None else argv
    terminal = Terminal(as_json="--json" in line)
    try:
        arguments = parser().parse_args(line)
        answer = arguments.chosen.run(arguments, terminal)
        terminal.answer(answer)
        return DONE if answer.good else REFUSED
    except HetpassError as refusal:
        terminal.refusal(refusal)
        if traceback_wanted():
            raise
        return MISUSED if isinstance(refusal, ToolError) else REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


if __name__ == "__main__":
    sys.exit(main())
