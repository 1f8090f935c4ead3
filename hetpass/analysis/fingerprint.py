"""A program's fingerprint: what a plan is guarded by."""

from __future__ import annotations

import hashlib
import json

from hetpass.ir.program import Layered


def fingerprint(layered: Layered) -> str:
    """A hash of what a plan refers to: the inputs, the results and the layers by name.

    Equations are left out: another JAX release may trace the same step to other primitives, and
    its plan stays good. Equal in every process and under every PYTHONHASHSEED.
    """
    traced = layered.program.traced
    facts = {
        "inputs": [[leaf.path, leaf.aval.str_short()] for leaf in traced.inputs],
        "results": list(traced.out_paths),
        "layers": list(layered.names),
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
