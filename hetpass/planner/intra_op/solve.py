"""The fastest assignment of an operation graph in a setting. No JAX."""

from __future__ import annotations

from hetpass.ir.operation_graph import OperationGraph
from hetpass.planner.intra_op.answers import Answer, fastest
from hetpass.planner.intra_op.linear_program import Effort
from hetpass.planner.intra_op.memory_limits import MemoryLimits
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.setting import Setting


def solve(
    graph: OperationGraph,
    setting: Setting,
    memory_bytes: float | None = None,
    effort: Effort = Effort(),
) -> Answer | None:
    """The fastest assignment.

    Args:
      memory_bytes: that it may take on each device.

    Returns:
      None if nothing keeps the limit.
    """
    made = program(graph, setting)
    if memory_bytes is None:
        return fastest(made, effort)
    return MemoryLimits(made, effort).fastest(memory_bytes)
