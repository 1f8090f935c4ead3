"""Scans over layers: one iteration is one layer, already a repetition.

A scan is one if its carry is batched (the residual stream) and its stacked inputs are parameters,
so that iteration i needs slice i of them and nothing else of its own. A scan over time or over
chunks of the sequence has batched stacked inputs and stays whole inside one layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetpass._jax import Atom, JaxprEqn, Var, scan_counts
from hetpass.analysis.flops import aval_bytes, equation_matmul_flops
from hetpass.frontend.dataflow import Dataflow
from hetpass.frontend.varying import Varying

MIN_SHARE = 0.1
"""Of the forward FLOPs, below which a scan is not worth layers of its own."""


def is_scan_over_layers(eqn: JaxprEqn, batch: Varying, forward_matmul_flops: float) -> bool:
    """Whether a forward equation is a scan whose iterations become layers.

    Args:
      forward_matmul_flops: of the whole forward region.
    """
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or eqn.params["reverse"]:
        return False
    flops = equation_matmul_flops(eqn)
    if flops <= 0 or flops < MIN_SHARE * forward_matmul_flops:
        return False
    consts, carry, stacked = scan_operands(eqn)
    if not any(batch.may_vary(a) and _is_float(a.aval) for a in carry):
        return False
    if any(batch.varies(a) for a in stacked):
        return False
    sliced = sum(aval_bytes(a.aval) for a in stacked if _is_float(a.aval))
    shared = sum(aval_bytes(a.aval) for a in consts if _is_float(a.aval) and not batch.varies(a))
    return sliced > 0 and sliced >= shared


def scan_operands(eqn: JaxprEqn) -> tuple[list[Atom], list[Atom], list[Atom]]:
    """(constants, initial carry, stacked inputs) of a scan."""
    num_consts, num_carry = scan_counts(eqn)
    operands = list(eqn.invars)
    split = num_consts + num_carry
    return operands[:num_consts], operands[num_consts:split], operands[split:]


def twin_scan(flow: Dataflow, number: int, over_layers: Sequence[int]) -> int | None:
    """The forward scan over layers that a backward scan reverses; None if it reverses none.

    The twin reads a stacked result of the forward scan, or the same stacked parameters, in
    reverse order.
    """
    eqn = flow.eqns[number]
    if eqn.primitive.name != "scan" or not eqn.params["reverse"]:
        return None
    stacked = [a for a in scan_operands(eqn)[2] if isinstance(a, Var)]
    for forward in over_layers:
        other = flow.eqns[forward]
        if other.params["length"] != eqn.params["length"]:
            continue
        slices = {a for a in scan_operands(other)[2] if isinstance(a, Var)}
        slices.update(other.outvars[scan_counts(other)[1] :])
        if any(a in slices for a in stacked):
            return forward
    return None


def _is_float(aval: object) -> bool:
    dtype = getattr(aval, "dtype", None)
    try:
        kind = np.dtype(dtype)
    except TypeError:  # PRNG keys
        return False
    return bool(kind.kind in "fc" or "float" in kind.name)
