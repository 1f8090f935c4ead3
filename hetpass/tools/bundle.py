"""A plan with what it was made for, so that a saved plan can be explained and played. No JAX.

`hetpass plan … -o plan.json` writes three files: `plan.json`, `plan.facts.json` (the program as
numbers) and `plan.cluster.json`. Commands on `plan.json` find the other two beside it.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

from hetpass.errors import FactsError, HetpassError, ToolError
from hetpass.ir.cluster import Cluster
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import counted
from hetpass.tools.sorts import CLUSTER, FACTS, PLAN

_STAGE = re.compile(r":\s*\d")
"""What every plan in one line has, and no name of a file or a step: layers behind a colon."""


@dataclass(frozen=True)
class Bundle:
    """A plan, the facts of its program, its cluster.

    Attributes:
      name: of the plan, for titles.
    """

    name: str
    plan: Plan
    facts: ProgramFacts
    cluster: Cluster


def companions(plan_path: Path) -> tuple[Path, Path]:
    """Where the facts and the cluster of a saved plan lie."""
    return plan_path.with_suffix(".facts.json"), plan_path.with_suffix(".cluster.json")


def save_bundle(path: Path, bundle: Bundle) -> tuple[Path, ...]:
    """Writes the three files; their paths.

    Raises:
      ToolError: HP-TOOL-WRITE, they cannot be written.
    """
    facts_path, cluster_path = companions(path)
    try:
        bundle.plan.save(path)
        bundle.facts.save(facts_path)
        bundle.cluster.to_file(cluster_path)
    except HetpassError as error:
        raise not_written(error) from None
    return path, facts_path, cluster_path


def not_written(error: OSError | HetpassError) -> ToolError:
    """The refusal for a file that cannot be written."""
    if isinstance(error, HetpassError):
        what, where = error.what, error.where
    else:
        what, where = f"the file cannot be written: {error.strerror}", str(error.filename or "")
    return ToolError(
        "HP-TOOL-WRITE",
        what,
        where=where,
        ways_out=["name a file in a folder that exists and may be written to"],
    )


def declare_plan(parser: ArgumentParser) -> None:
    """The arguments of a command on one plan."""
    parser.add_argument(
        "plan", metavar="PLAN", help="plan.json, or a plan in one line (then with --facts)"
    )
    declare_origin(parser)


def declare_origin(parser: ArgumentParser) -> None:
    """Where facts and cluster are, if not beside the plan."""
    parser.add_argument("--facts", metavar="FILE", help="default: beside the plan")
    parser.add_argument("--cluster", metavar="FILE", help="default: beside the plan")
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="of a plan in one line; default: 8"
    )


def read_bundle(arguments: Namespace, plan: str | None = None) -> Bundle:
    """The plan that a command line names, with facts and cluster.

    Args:
      plan: instead of `arguments.plan`.

    Raises:
      ToolError: HP-TOOL-FACTS, facts or cluster are not beside the plan and none are named.
      HetpassError: a file is refused, or the three do not belong together.
    """
    text = plan if plan is not None else arguments.plan
    is_file = text.endswith((".json", ".toml"))
    path = Path(text)
    loaded = PLAN.load(path) if is_file else None
    if loaded is None and not _STAGE.search(text):
        raise _no_plan(text)
    beside = companions(path) if is_file else (None, None)
    chosen = []
    for named, default, flag in zip(
        (arguments.facts, arguments.cluster), beside, ("--facts", "--cluster"), strict=True
    ):
        file = Path(named) if named else default
        if file is None or not (named or file.exists()):
            raise _nothing_beside(text, flag, file)
        chosen.append(file)
    facts, cluster = _facts(chosen[0]), CLUSTER.load(chosen[1])
    if loaded is None:
        loaded = Plan.parse(
            text,
            cluster=cluster,
            num_layers=facts.num_layers,
            num_microbatches=8 if arguments.microbatches is None else arguments.microbatches,
        )
    elif arguments.microbatches not in (None, loaded.num_microbatches):
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            f"{text} is a plan of {counted(loaded.num_microbatches, 'microbatch')}",
            where=f"--microbatches {arguments.microbatches}",
            ways_out=[
                "a plan in one line, which may have any number: "
                f'"{loaded.to_text()}" --facts {chosen[0]} --cluster {chosen[1]}',
                "hetpass plan STEP --microbatches M plans for another number",
            ],
        )
    loaded.check(cluster, facts.num_layers, facts.fingerprint, facts.batch_size)
    return Bundle(path.stem if is_file else text, loaded, facts, cluster)


def _facts(path: Path) -> ProgramFacts:
    try:
        return FACTS.load(path)
    except FactsError as error:
        if error.code != "HP-FACTS-FILE":
            raise
        raise ToolError(
            "HP-TOOL-FACTS",
            f"the facts cannot be read: {error.what}",
            where=error.where,
            ways_out=["hetpass plan STEP --cluster FILE -o plan.json writes facts beside the plan"],
        ) from None


def _no_plan(text: str) -> ToolError:
    return ToolError(
        "HP-TOOL-PLAN",
        f"{text!r:.80} is neither the file of a plan nor a plan in one line",
        where="PLAN",
        ways_out=[
            "plan.json, written by hetpass plan STEP --cluster FILE -o plan.json",
            '"fast: 0-2 | slow: 3-5" --facts FILE --cluster FILE',
        ],
    )


def _nothing_beside(text: str, flag: str, file: Path | None) -> HetpassError:
    what = "facts of the program" if flag == "--facts" else "cluster"
    return ToolError(
        "HP-TOOL-FACTS",
        f"the {what} that the plan was made for cannot be found",
        where=text,
        details=[f"looked for {file}"] if file else [],
        ways_out=[
            f"{flag} FILE",
            "hetpass plan STEP --cluster FILE -o plan.json writes both beside the plan",
        ],
    )
