"""`hetpass plan`: from a step and a cluster file to a plan, an explanation, and the files of both.

No device of the cluster is touched: the step is traced on shapes, and all else is numbers.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetpass import __version__
from hetpass.cost.calibrate import calibrated_cluster
from hetpass.errors import ToolError
from hetpass.ir.device_profile import DeviceProfile
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import spelled
from hetpass.tools.answer import Answer, Command
from hetpass.tools.bundle import Bundle, save_bundle
from hetpass.tools.plan_cache import Entry, PlanCache, content_key
from hetpass.tools.profile_plans import plan_from_profiles
from hetpass.tools.sorts import CLUSTER, PROFILE
from hetpass.tools.steps import declare_step, on_this_processor, stepped
from hetpass.tools.switches import cache_folder
from hetpass.tools.target import load_target
from hetpass.tools.terminal import Terminal

if TYPE_CHECKING:
    from hetpass.api import Traced


@dataclass(frozen=True)
class Found:
    """A plan, found now or before.

    Attributes:
      seconds: by phase: "trace", "plan".
      cached: whether it was found before.
    """

    plan: Plan
    facts: ProgramFacts
    explanation: str
    seconds: dict[str, float]
    cached: bool


def plan(arguments: Namespace, terminal: Terminal) -> Answer:
    """Plans a step; prints who computes what and why."""
    out = _checked_output(arguments.output)
    if arguments.facts is not None:
        return plan_from_profiles(arguments, terminal, out)
    on_this_processor()
    cluster = CLUSTER.load(arguments.cluster)
    profile = PROFILE.load(arguments.profile) if arguments.profile else None
    if profile is not None:
        cluster = calibrated_cluster(cluster, profile)
    began = time.perf_counter()
    with terminal.working("importing jax"):
        import jax  # noqa: F401  (its time is not the tracer's)
    target = load_target(arguments)

    def searching(count: int, best_s: float) -> None:
        terminal.progress(
            f"searching: M = {count} done, best step so far {spelled(best_s, 'time')}"
        )

    step = stepped(
        target,
        cluster,
        arguments,
        profile=profile,
        progress=searching,
        status=terminal.progress,
    )
    with terminal.working("tracing"):
        traced = step.trace(*target.arguments)
    traced_s = time.perf_counter() - began
    with terminal.working("planning"):
        found = _found(target.name, traced, arguments, profile, traced_s, terminal)
    bundle = Bundle(target.name, found.plan, found.facts, cluster)
    written = save_bundle(out, bundle) if out is not None else ()
    return _answer(bundle, found, target.note, written)


def _answer(bundle: Bundle, found: Found, note: str, written: tuple[Path, ...]) -> Answer:
    spent = ", ".join(f"{name} {s:.1f} s" for name, s in found.seconds.items())
    spent += " (the plan from the cache)" if found.cached else ""
    head = [note] if note else []
    parts = [*head, found.explanation, spent]
    parts += [f"wrote {', '.join(map(str, written))}"] if written else []
    data = {
        "step": bundle.name,
        "seconds": found.seconds,
        "cached": found.cached,
        "layers": found.facts.num_layers,
        "plan": json.loads(found.plan.to_json()),
        "explanation": found.explanation.splitlines(),
        "written": [str(path) for path in written],
    }
    return Answer(parts, data)


def _checked_output(name: str | None) -> Path | None:
    """Refuses before anything is planned what could not be written after."""
    if name is None:
        return None
    path = Path(name)
    if path.suffix != ".json":
        raise ToolError("HP-TOOL-WRITE", "a plan is written as JSON", where=name,
                        ways_out=["-o plan.json"])  # fmt: skip
    if not path.parent.is_dir():
        raise ToolError("HP-TOOL-WRITE", "there is no such folder", where=str(path.parent),
                        ways_out=["name a file in a folder that exists"])  # fmt: skip
    return path


def _found(
    name: str,
    traced: Traced,
    arguments: Namespace,
    profile: DeviceProfile | None,
    traced_s: float,
    terminal: Terminal,
) -> Found:
    """The plan of a traced step, from the cache if it is there."""
    from hetpass.analysis.program_hash import program_hash
    from hetpass.tools.measure_devices import versions

    began = time.perf_counter()
    settings = traced.settings
    which = {"hetpass": __version__, **versions()}
    key = content_key(
        {
            "program": program_hash(traced.program),
            "cluster": traced.cluster.to_dict(),
            "microbatches": settings.num_microbatches,
            "schedule": settings.schedule,
            "meaning": [settings.options.batch_statistics, settings.options.routing],
            "accumulate": settings.options.accumulate_dtype,
            "sharding": settings.options.sharding,
            "by hand": str(settings.plan),
            "baselines": arguments.baselines,
            "profile": profile.to_json() if profile is not None else None,
            "versions": which,
        }
    )
    cache = PlanCache(cache_folder())
    known = None if arguments.no_cache else cache.find(key)
    if known is not None:
        seconds = {"trace": traced_s, "plan": time.perf_counter() - began}
        return Found(known.plan, known.facts, known.explanation, seconds, True)
    planned = traced.plan()
    if arguments.baselines:
        terminal.progress("planning in other ways")
    facts, explanation = planned.facts, planned.explain(baselines=arguments.baselines)
    if not arguments.no_cache:
        versions_text = " ".join(f"{package} {v}" for package, v in which.items())
        cache.keep(key, Entry(name, planned.plan, facts, explanation, versions_text))
    seconds = {"trace": traced_s, "plan": time.perf_counter() - began}
    return Found(planned.plan, facts, explanation, seconds, False)


def _declare_plan(parser: ArgumentParser) -> None:
    declare_step(parser)
    parser.add_argument("--cluster", metavar="FILE", required=True, help=".toml or .json")
    parser.add_argument("--profile", metavar="FILE", help="measured figures: hetpass profile")
    parser.add_argument("--facts", metavar="DIR", help="plan from measured layers; STEP is a model "
                        "there, with --batch")  # fmt: skip
    parser.add_argument(
        "--baselines", action="store_true", help="say the gain over other ways to plan"
    )
    parser.add_argument("--no-cache", action="store_true", help="plan anew")
    parser.add_argument("-o", "--output", metavar="plan.json",
                        help="write the plan, and facts and cluster beside it")  # fmt: skip


COMMANDS = (Command("plan", "plan a step on a cluster; no device is touched", _declare_plan, plan),)
