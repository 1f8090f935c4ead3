"""What a choice makes of an operation's operands and results, and its seconds. No JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod

from hetpass.cost.analytic import Assumptions, peak_rate
from hetpass.cost.layouts import ways, whole
from hetpass.cost.operations import Efficiency
from hetpass.ir.devices import DeviceKind
from hetpass.ir.operation_graph import Layout, Mesh, Operation, OperationChoice, Value

KERNEL_S = 2e-6
"""Launch of one kernel, assumed for all kinds; measured seconds know better."""


def wanted_layouts(
    operation: Operation, values: Sequence[Value], choice: OperationChoice
) -> tuple[Layout, ...]:
    """What every operand must look like: a dimension is cut by the axes of its factors."""
    if operation.rule is None:
        return tuple(whole(len(values[v].shape)) for v in operation.operands)
    return tuple(
        Layout(_cuts(factors, choice), choice.partial) for factors in operation.rule.operands
    )


def natural_layouts(
    operation: Operation, values: Sequence[Value], choice: OperationChoice
) -> tuple[Layout, ...]:
    """How every result comes out before it is pinned: partial along the axes of its reductions."""
    rule = operation.rule
    if rule is None:
        return tuple(whole(len(values[v].shape)) for v in operation.results)
    found = []
    for dims in rule.results:
        there = {factor for dim in dims for factor in dim}
        summed = {
            axis
            for factor in rule.reduction
            if factor not in there
            for axis in choice.factors[factor]
        }
        found.append(Layout(_cuts(dims, choice), choice.partial | summed))
    return tuple(found)


def _cuts(
    dims: tuple[tuple[int, ...], ...], choice: OperationChoice
) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for factor in dim for axis in choice.factors[factor]) for dim in dims)


def operation_s(
    operation: Operation,
    parts: int,
    touched: float,
    kind: DeviceKind,
    reached: Assumptions | Efficiency = Assumptions(),
) -> float:
    """Seconds of one run of an operation on each of the devices that share it (a roofline).

    Args:
      parts: into how many its arithmetic is cut.
      touched: which share of the bytes of its operands and results one device has.
      reached: of the kind's peak figures: constant shares, or curves by sort and size.

    Returns:
      Infinity where the kind lacks the number format.
    """
    if not operation.flops and not operation.traffic_bytes:
        return 0.0
    rate = peak_rate(kind, operation.dtype)
    flops, moved = operation.flops / parts, operation.traffic_bytes * touched
    if operation.flops and not rate:
        return math.inf
    kernel = reached.overhead_s if isinstance(reached, Efficiency) else KERNEL_S
    if isinstance(reached, Assumptions):
        rate, bandwidth = rate * reached.flops, kind.memory_bandwidth * reached.bandwidth
    else:
        sort = sort_of(operation)
        curve = reached.rate.get(sort)
        rate *= curve.share(flops) if curve is not None and flops else 1.0
        share = reached.bandwidth[sort].share(moved) if moved else 1.0
        bandwidth = kind.memory_bandwidth * share
    seconds = max(flops / rate if flops else 0.0, moved / bandwidth)
    return seconds + (kernel if moved else 0.0)  # what moves nothing is fused into others


def sort_of(operation: Operation) -> str:
    """Which efficiency an operation has, one of `cost.operations.SORTS`."""
    rule = operation.rule
    if rule is None or not operation.sums or len(rule.operands) != 2 or len(rule.results) != 1:
        return "memory"
    one, other, result = (
        {factor for dim in dims for factor in dim if rule.sizes[factor] > 1}
        for dims in (*rule.operands, *rule.results)
    )
    if not (one & other & rule.reduction):
        return "memory"
    sort = "batched product" if one & other & result else "product"
    return f"{sort}, backward" if operation.phase == "backward" else sort


def compute_ways(choice: OperationChoice, mesh: Mesh) -> int:
    """Into how many parts a choice cuts the arithmetic; on all other axes it is repeated."""
    sizes = dict(mesh)
    return prod(sizes[axis] for axes in choice.factors for axis in axes)


def touched_share(
    operation: Operation,
    values: Sequence[Value],
    layouts: tuple[Sequence[Layout], Sequence[Layout]],
    mesh: Mesh,
) -> float:
    """Bytes of operands and results (in these layouts) on one device, as a share of all of them."""
    whole_bytes = held_bytes = 0.0
    for numbers, chosen in zip((operation.operands, operation.results), layouts, strict=True):
        for v, layout in zip(numbers, chosen, strict=True):
            whole_bytes += values[v].size_bytes
            held_bytes += values[v].size_bytes / ways(layout, mesh)
    return held_bytes / whole_bytes if whole_bytes else 1.0
