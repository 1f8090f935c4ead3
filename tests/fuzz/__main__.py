"""Random programs and plans against jax.jit, with a stored log.

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

TOP = pathlib.Path(__file__).parents[2]
LOG = TOP / "benchmarks" / "results" / "fuzz.json"


_LETTERS = {"equal": "e", "refused": "r", "wrong": "W", "crash": "C"}
_SAVE_EVERY, _FORGET_EVERY = 10, 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--level", choices=("frontend", "whole"), default="frontend")
    parser.add_argument("--log", type=pathlib.Path, default=LOG)
    parser.add_argument("--resume", action="store_true", help="go on where the log ends")
    parser.add_argument("--again", action="store_true", help="the log's failures, after a fix")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    importlib.import_module("tests.conftest")  # devices and flags, before JAX is imported
    jax = importlib.import_module("jax")
    fuzz = importlib.import_module("tests.fuzz.check")
    cases = importlib.import_module("tests.fuzz.case")
    run = getattr(fuzz, options.level)
    if options.seed is not None:
        case = cases.make_case(options.seed)
        print(case, fuzz.check(case, run), sep="\n")
        return 0
    name = f"{options.level}, jax {jax.__version__}"
    log = json.loads(options.log.read_text()) if options.log.exists() else {}
    entry = log.get(name, {}) if options.resume or options.again else {}
    entry = {"outcomes": "", "seconds": 0, "failures": {}, "refusals": {}} | entry
    began = time.perf_counter() - entry["seconds"]
    seeds = range(len(entry["outcomes"]), options.count)
    for seed in [int(s) for s in entry["failures"]] if options.again else seeds:
        case = cases.make_case(seed)
        outcome = fuzz.check(case, run)
        text = outcome.text.replace(f"{TOP}/", "")  # the same log in every place
        outcomes, letter = entry["outcomes"], _LETTERS[outcome.verdict]
        entry["outcomes"] = outcomes[:seed] + letter + outcomes[seed + 1 :]
        entry["failures"].pop(str(seed), None)
        if outcome.verdict == "refused":
            entry["refusals"][str(seed)] = text.splitlines()[0]
        elif outcome.verdict != "equal":
            entry["failures"][str(seed)] = f"{outcome.verdict}: {text[-300:]}"
            print(case, f"{outcome.verdict}: {outcome.text}", sep="\n", flush=True)
        if seed % _FORGET_EVERY == 0:
            jax.clear_caches()
        if seed % _SAVE_EVERY == 0 or seed == options.count - 1:
            entry["seconds"] = round(time.perf_counter() - began)
            _save(options, name, entry, cases.kind_of)
    if options.again:
        _save(options, name, entry, cases.kind_of)
    print(_verdicts(entry["outcomes"]), f"{entry['seconds']} s")
    return int(bool(entry["failures"]))


def _verdicts(outcomes: str) -> dict[str, int]:
    return {verdict: outcomes.count(letter) for verdict, letter in _LETTERS.items()}


def _save(options: argparse.Namespace, name: str, entry: dict[str, Any], kind_of: Any) -> None:
    """The log of one level on one version of JAX; those of others are kept."""
    kinds: dict[str, str] = collections.defaultdict(str)
    for seed, letter in enumerate(entry["outcomes"]):
        kinds[kind_of(seed)] += letter
    entry |= {
        "command": f"python -m tests.fuzz --count {options.count} --level {options.level}",
        "python": sys.version.split()[0],
        "programs": len(entry["outcomes"]),
        "verdicts": _verdicts(entry["outcomes"]),
        "by_kind": {kind: _verdicts(letters) for kind, letters in sorted(kinds.items())},
    }
    log = json.loads(options.log.read_text()) if options.log.exists() else {}
    log[name] = entry
    options.log.parent.mkdir(parents=True, exist_ok=True)
    options.log.write_text(json.dumps(log, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
