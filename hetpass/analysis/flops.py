"""FLOPs and bytes of equations, counted on the jaxpr.

XLA's own count sees the body of a scan once, whatever its length; these see it `length` times.
Counted per equation: a multiply-add is two FLOPs, an elementwise operation one per element of its
result (a transcendental too), data movement none. Control flow: `scan` is its body times its
length; `cond` the branch that costs most; `while` one trip of condition and body, since the number
of trips is not in the program; a call is its body.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hetpass._jax import Jaxpr, JaxprEqn, is_jaxpr, open_jaxpr
from hetpass.ir.devices import DTYPES

RANDOM_BITS_FLOPS = 50.0
"""Integer operations per element that Threefry-2x32 draws: 20 rounds of 4, and the key schedule,
for two 32-bit words."""

DATA_MOVEMENT = frozenset(
    "broadcast_in_dim concatenate convert_element_type copy copy_p dynamic_slice "
    "dynamic_update_slice expand_dims gather iota pad reshape rev slice split squeeze "
    "stop_gradient transpose bitcast_convert_type optimization_barrier random_wrap random_unwrap "
    "random_seed random_fold_in random_split hetpass_stage_boundary pbroadcast pvary "
    "sharding_constraint reshard copy_to_host device_put broadcast empty create_token".split()
)
"""Primitives that compute nothing (or, for keys, next to nothing)."""

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj cos "
    "cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le "
    "lgamma log log1p logistic lt max min mul ne neg nextafter not one_minus_square or "
    "population_count pow real rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square sub tan tanh xor".split()
)
"""Primitives that work element by element."""

REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin "
    "reduce cumsum cumprod cummax cummin cumlogsumexp reduce_precision".split()
)
"""Primitives that cost one FLOP per element of their first operand."""


def aval_bytes(aval: Any) -> float:
    """Bytes of one array; a PRNG key counts its words (8 bytes for Threefry)."""
    shape = getattr(aval, "shape", None)
    if shape is None:
        return 0.0
    try:
        itemsize = np.dtype(aval.dtype).itemsize
    except TypeError:  # an extended dtype: PRNG keys
        itemsize = 8
    return float(math.prod(shape) * itemsize)


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The open jaxprs among the equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item):
                yield open_jaxpr(item)[0]


def equation_flops(eqn: JaxprEqn) -> float:
    """FLOPs of one run of the equation."""
    return _count(eqn, _own_flops)


def equation_matmul_flops(eqn: JaxprEqn) -> float:
    """The part of `equation_flops` that dot products and convolutions do."""
    return _count(eqn, _own_matmul_flops)


def equation_bytes(eqn: JaxprEqn) -> float:
    """Bytes that one run of the equation reads and writes if nothing is fused."""
    return _count(eqn, _own_bytes)


def flops_by_format(eqn: JaxprEqn) -> dict[str, float]:
    """FLOPs of one run that a device's peak rate bounds, by the number format of the operands.

    Products, convolutions, transforms and factorizations count. What works element by element is
    bound by memory, on every device.
    """
    formats: dict[str, None] = {}
    pending = [eqn]
    while pending:
        inner = pending.pop()
        if _own_bound_flops(inner):
            formats[_format(inner)] = None
        if inner.primitive.name not in APPLIES_A_SCALAR_JAXPR:
            pending += [e for body in sub_jaxprs(inner) for e in body.eqns]

    def of(name: str) -> Callable[[JaxprEqn], float]:
        return lambda e: _own_bound_flops(e) if _format(e) == name else 0.0

    return {name: _count(eqn, of(name)) for name in sorted(formats)}


_BY_FORMULA = frozenset("fft cholesky triangular_solve lu qr eigh svd".split())


def _own_bound_flops(eqn: JaxprEqn) -> float:
    if eqn.primitive.name in _BY_FORMULA:
        return _own_flops(eqn)
    return _own_matmul_flops(eqn)


def _format(eqn: JaxprEqn) -> str:
    """The number format, of those that peak rates are given for."""
    name = str(getattr(eqn.invars[0].aval, "dtype", "float32")) if eqn.invars else "float32"
    if name.startswith("float8"):
        return "float8"
    near = {"complex64": "float32", "complex128": "float64", "uint8": "int8"}
    name = near.get(name, name)
    return name if name in DTYPES else "float32"


def jaxpr_flops(jaxpr: Jaxpr) -> float:
    """FLOPs of one run of the jaxpr."""
    return sum((equation_flops(eqn) for eqn in jaxpr.eqns), 0.0)


def jaxpr_matmul_flops(jaxpr: Jaxpr) -> float:
    """FLOPs of the dot products and convolutions in one run of the jaxpr."""
    return sum((equation_matmul_flops(eqn) for eqn in jaxpr.eqns), 0.0)


def jaxpr_bytes(jaxpr: Jaxpr) -> float:
    """Bytes that one run of the jaxpr reads and writes if nothing is fused."""
    return sum((equation_bytes(eqn) for eqn in jaxpr.eqns), 0.0)


def _count(eqn: JaxprEqn, own: Callable[[JaxprEqn], float]) -> float:
    def total(jaxpr: Jaxpr) -> float:
        return sum((_count(inner, own) for inner in jaxpr.eqns), 0.0)

    name = eqn.primitive.name
    if name in APPLIES_A_SCALAR_JAXPR:
        return own(eqn)
    bodies = list(sub_jaxprs(eqn))
    if not bodies:
        return own(eqn)
    if name == "scan":
        return float(eqn.params["length"]) * total(bodies[0])
    if name == "cond":
        return max(total(body) for body in bodies)
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return total(bodies[0])  # the others are rules, not run
    return sum((total(body) for body in bodies), 0.0)


APPLIES_A_SCALAR_JAXPR = frozenset(
    "reduce reduce_window scatter scatter-add scatter-mul scatter-min scatter-max scatter_add "
    "scatter_sub scatter-sub select_and_scatter sort".split()
)
"""Primitives whose jaxpr says how two numbers combine: no body to look into."""


def _elements(aval: Any) -> float:
    return float(math.prod(getattr(aval, "shape", ())))


def _own_matmul_flops(eqn: JaxprEqn) -> float:
    name = eqn.primitive.name
    if name == "dot_general":
        (lhs_contract, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        depth = math.prod(shape[d] for d in lhs_contract)
        return 2.0 * depth * _elements(eqn.outvars[0].aval)
    if name == "conv_general_dilated":
        # The kernel's input features are already divided by the feature groups, and the result's
        # batch by the batch groups.
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        per_output = math.prod(kernel) / max(out_features, 1)
        return 2.0 * per_output * _elements(eqn.outvars[0].aval)
    if name == "ragged_dot_general" or name == "ragged_dot":
        lhs, rhs = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
        return 2.0 * math.prod(lhs) * rhs[-1]
    return 0.0


def _own_flops(eqn: JaxprEqn) -> float:
    name = eqn.primitive.name
    if name in DATA_MOVEMENT:
        return 0.0
    if name in ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"):
        return _own_matmul_flops(eqn)
    out = sum(_elements(v.aval) for v in eqn.outvars)
    first = _elements(eqn.invars[0].aval) if eqn.invars else 0.0
    if name in ("random_bits", "threefry2x32"):
        return RANDOM_BITS_FLOPS * out
    if name in REDUCTIONS:
        return first
    if name.startswith("scatter"):
        return _elements(eqn.invars[2].aval)
    if name in ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"):
        return out * math.prod(eqn.params["window_dimensions"])
    if name in ("sort", "top_k", "approx_top_k"):
        return first * max(1.0, math.log2(max(first, 2.0)))
    if name == "fft":
        length = math.prod(eqn.params["fft_lengths"])
        return 5.0 * max(first, out) * math.log2(max(length, 2))
    if name in ("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd"):
        return first * max(eqn.invars[0].aval.shape[-1:] or (1,))
    return out


def _own_bytes(eqn: JaxprEqn) -> float:
    written = sum(aval_bytes(v.aval) for v in eqn.outvars)
    if eqn.primitive.name in ("gather", "dynamic_slice"):  # read only what they return
        return 2.0 * written + sum(aval_bytes(v.aval) for v in eqn.invars[1:])
    return written + sum(aval_bytes(v.aval) for v in eqn.invars)
