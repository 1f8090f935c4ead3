"""`python -m tests.fuzz --count 2000`: random programs and plans against jax.jit, with a stored log.

    python -m tests.fuzz --count 2000                   the frontend's program of every seed
    python -m tests.fuzz --count 200 --level whole      the whole pipeline
    python -m tests.fuzz --seed 123 --level whole       one program, with what came of it
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import pathlib
import sys
import time
from typing import Any

LOG = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "fuzz.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--level", choices=("frontend", "whole"), default="frontend")
    parser.add_argument("--log", type=pathlib.Path, default=LOG)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    importlib.import_module("tests.conftest")  # devices and flags, before JAX is imported
    fuzz = importlib.import_module("tests.fuzz.check")
    make_case = importlib.import_module("tests.fuzz.case").make_case
    run = getattr(fuzz, options.level)
    if options.seed is not None:
        case = make_case(options.seed)
        print(case, fuzz.check(case, run), sep="\n")
        return 0
    outcomes = {}
    began = time.perf_counter()
    for seed in range(options.first, options.first + options.count):
        case = make_case(seed)
        outcome = fuzz.check(case, run)
        outcomes[seed] = (case, outcome)
        if outcome.verdict in ("wrong", "crash"):
            print(case, f"{outcome.verdict}: {outcome.text}", sep="\n", flush=True)
        if len(outcomes) % 25 == 0:
            importlib.import_module("jax").clear_caches()
            _save(options, outcomes, time.perf_counter() - began)
    _save(options, outcomes, time.perf_counter() - began)
    counts = collections.Counter(o.verdict for _, o in outcomes.values())
    print(dict(counts), f"{time.perf_counter() - began:.0f} s")
    return int(counts["wrong"] + counts["crash"] > 0)


def _save(options: argparse.Namespace, outcomes: dict[int, Any], seconds: float) -> None:
    """The log of one level on one version of JAX; those of others are kept."""
    jax = importlib.import_module("jax")
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case, outcome in outcomes.values():
        kinds[case.kind][outcome.verdict] += 1
    refusals = {
        str(seed): outcome.text.splitlines()[0]
        for seed, (_, outcome) in outcomes.items()
        if outcome.verdict == "refused"
    }
    entry = {
        "command": f"python -m tests.fuzz --count {options.count} --level {options.level}"
        + (f" --first {options.first}" if options.first else ""),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "programs": len(outcomes),
        "seconds": round(seconds),
        "verdicts": dict(collections.Counter(o.verdict for _, o in outcomes.values())),
        "by_kind": {kind: dict(counts) for kind, counts in sorted(kinds.items())},
        "microbatches": dict(
            collections.Counter(str(case.num_microbatches) for case, _ in outcomes.values())
        ),
        "failures": {
            str(seed): f"{outcome.verdict}: {outcome.text[-300:]}"
            for seed, (_, outcome) in outcomes.items()
            if outcome.verdict in ("wrong", "crash")
        },
        "refusals": refusals,
    }
    log = json.loads(options.log.read_text()) if options.log.exists() else {}
    log[f"{options.level}, jax {jax.__version__}"] = entry
    options.log.parent.mkdir(parents=True, exist_ok=True)
    options.log.write_text(json.dumps(log, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
