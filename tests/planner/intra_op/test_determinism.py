"""Equal problems give equal answers, whatever order strings hash in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import hashlib, json
from hetpass.ir.assignments import assignments_data
from tests.planner.intra_op.test_stage_tables import solved
tables = solved()
found = [assignments_data(tables.assignments(n, 0, 5)) for n in range(len(tables.chains))]
costs = [float(t.forward_s[0, 5]).hex() for t in tables.costs.stages]
print(hashlib.sha256(json.dumps([found, costs], sort_keys=True).encode()).hexdigest())
"""


def test_answers_do_not_depend_on_the_order_of_hashes():
    root = Path(__file__).resolve().parents[3]
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1
    assert len(digests.pop()) == 64
