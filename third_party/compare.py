"""Plans of several planners, on the same facts and before the same judge.

python -m third_party.compare --facts F.json --cluster C.json plan.json metis:ranked.txt …
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from hetpass.errors import HetpassError
from hetpass.ir.cluster import Cluster
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.planner.evaluate import Evaluation, evaluate
from third_party import alpa, flagscale, metis, sailor

Reader = Callable[[Path, Cluster], Plan]

READERS: Mapping[str, Reader] = {
    "hetpass": lambda path, cluster: Plan.load(path),
    "metis": lambda path, cluster: metis.read_plans(path.read_text(), cluster)[0],
    "flagscale": lambda path, cluster: flagscale.read_plan(flagscale.read_settings(path), cluster),
    "alpa": lambda path, cluster: alpa.read_plan(alpa.read_solution(path.read_text()), cluster),
    "sailor": lambda path, cluster: sailor.read_plan(json.loads(path.read_text()), cluster),
}


def compare(
    plans: Mapping[str, Plan], facts: ProgramFacts, cluster: Cluster
) -> dict[str, Evaluation | str]:
    """Each plan's evaluation, or why it has none."""
    results: dict[str, Evaluation | str] = {}
    for name, plan in plans.items():
        try:
            results[name] = evaluate(plan, facts, cluster)
        except HetpassError as refusal:
            results[name] = refusal.what
    return results


def table(results: Mapping[str, Evaluation | str]) -> str:
    """One line per plan, fastest first."""
    rows = []
    for name, result in results.items():
        if isinstance(result, str) or result.violations:
            why = result if isinstance(result, str) else result.violations[0]
            rows.append((math.inf, f"{name:<24} cannot run: {why}"))
        else:
            text = f"{result.step_s:10.4g} s  balance {result.balance:4.0%}"
            stages = len(result.stages)
            rows.append((result.step_s, f"{name:<24} {text}  {stages} stages"))
    return "\n".join(line for _, line in sorted(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--facts", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument(
        "--run", nargs=2, metavar=("READER", "COMMAND"), action="append", default=[]
    )
    parser.add_argument("--in", dest="folder", metavar="CHECKOUT", help="where --run runs")
    parser.add_argument("plans", nargs="*", metavar="[READER:]FILE")
    arguments = parser.parse_args()
    facts, cluster = ProgramFacts.load(arguments.facts), Cluster.from_file(arguments.cluster)
    plans = {}
    for text in arguments.plans:
        reader, _, file = text.rpartition(":")
        plans[text] = READERS[reader or "hetpass"](Path(file), cluster)
    for reader, command in arguments.run:
        done = subprocess.run(
            shlex.split(command), cwd=arguments.folder, capture_output=True, text=True, check=True
        )
        printed = Path(f"{reader}.printed.txt")
        printed.write_text(done.stdout)
        plans[f"{reader} (run)"] = READERS[reader](printed, cluster)
    print(table(compare(plans, facts, cluster)))


if __name__ == "__main__":
    main()
