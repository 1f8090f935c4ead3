"""How far tensor parallelism goes in a layer, and what it has to sum.

As in Megatron-LM (Shoeybi et al. 2019): matrices of a layer are cut along one dimension, the first
by columns and the last by rows, so that one sum over the devices is left in forward, of what the
last product makes, and one in backward. A sum of a wide result (logits) is not needed: there the
narrower operand is summed in backward.
"""

from __future__ import annotations

import jax.numpy as jnp

from hetpass._jax import JaxprEqn, Var, scan_counts
from hetpass.analysis.flops import aval_bytes
from hetpass.analysis.layer_reads import LayerReads
from hetpass.analysis.two_sizes import AtSize
from hetpass.ir.kinds import Batched
from hetpass.ir.program import Layered, WholeInput

_MOST = 64
_LARGE_SHARE = 1 / 8
"""A parameter counts if it is no less than this share of the layer's largest."""

_SUMS_PER_BLOCK = 2
"""Of one iteration of a scan over layers, which is a whole block: attention and MLP."""


def reduced_bytes(layered: Layered, at: AtSize) -> list[float]:
    """Per layer, the bytes of activations that are summed in forward, for one microbatch."""
    region, kinds = layered.program.region, layered.program.kinds
    parameters = _parameters(layered)
    totals = [0.0] * layered.num_layers
    for k, (eqn, span) in enumerate(zip(region.eqns, layered.spans, strict=True)):
        reads_one = any(a in parameters and a.aval.ndim >= 2 for a in _variables(eqn))
        if layered.backward[k] or not reads_one:
            continue
        if span.first < span.last:
            _, carry = scan_counts(eqn)
            size = sum(at.bytes[v] for v in eqn.outvars[:carry] if _is_activation(v, kinds))
            for layer in range(span.first, span.last + 1):
                totals[layer] = _SUMS_PER_BLOCK * size
        elif eqn.primitive.name in ("dot_general", "conv_general_dilated", "gather"):
            values = [*_variables(eqn), *eqn.outvars]
            sizes = [at.bytes[v] for v in values if _is_activation(v, kinds)]
            totals[span.first] = min(sizes, default=totals[span.first])
    return totals


def most_tensor_parallel(layered: Layered, reads: LayerReads) -> list[int]:
    """Per layer, the most devices (a power of two) that its matrices can be cut over."""
    found: list[list[tuple[float, int]]] = [[] for _ in range(layered.num_layers)]
    for var in _parameters(layered):
        for touch in reads.read.get(var, []):
            shape = var.aval.shape[1:] if touch.sliced else var.aval.shape
            if len(shape) >= 2 and _is_float(var):
                ways = min(_MOST, max(size & -size for size in shape))
                for layer in range(touch.layers.first, touch.layers.last + 1):
                    found[layer].append((aval_bytes(var.aval), ways))
    return [_least(parameters) for parameters in found]


def _least(parameters: list[tuple[float, int]]) -> int:
    largest = max((size for size, _ in parameters), default=0.0)
    return min((ways for size, ways in parameters if size >= largest * _LARGE_SHARE), default=1)


def _parameters(layered: Layered) -> dict[Var, None]:
    program = layered.program
    rows = zip(program.region.invars, program.region_inputs, strict=True)
    return {var: None for var, source in rows if isinstance(source, WholeInput)}


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [a for a in eqn.invars if isinstance(a, Var)]


def _is_activation(var: Var, kinds: object) -> bool:
    return isinstance(kinds.get(var), Batched) and _is_float(var)  # type: ignore[attr-defined]


def _is_float(var: Var) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jnp.inexact))
