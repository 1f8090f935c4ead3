"""The cheapest assignment of an operation graph, with or without a limit on memory. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetpass.ir.operation_graph import Assignment, OperationGraph
from hetpass.planner.intra_op.linear_program import Effort, Limit, Solved, solved
from hetpass.planner.intra_op.pbqp import Problem, reduced
from hetpass.planner.intra_op.program import Program, program
from hetpass.planner.intra_op.setting import Setting


@dataclass(frozen=True)
class Answer:
    """An assignment, and how good it is.

    Attributes:
      assignment: per operation, value and parameter.
      seconds: of a step (M microbatches, and what happens once).
      memory_bytes: on each device: state, accumulators, copies, residuals in flight.
      bound: no assignment (that keeps the limit) takes fewer seconds.
      branches: nodes that HiGHS branched on; 0 where reduction alone solved it.
    """

    assignment: Assignment
    seconds: float
    memory_bytes: float
    bound: float
    branches: int

    @property
    def gap(self) -> float:
        """Relative; 0.0 is proved optimal."""
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds else 0.0


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
    return fastest(made, effort) if memory_bytes is None else fastest_within(made, memory_bytes, effort)


def fastest(made: Program, effort: Effort = Effort()) -> Answer | None:
    """The fastest assignment of a program, whatever memory it takes."""
    found = cheapest(made.seconds, effort)
    return _answer(made, found)


def cheapest(problem: Problem, effort: Effort = Effort()) -> Solved:
    """Exact reduction, then the linear program for what is left."""
    rest = reduced(problem)
    if not np.isfinite(rest.cost):
        return Solved(None, np.inf, 0, "infeasible")
    core = solved(rest.core, effort=effort)
    choices = None if core.choices is None else rest.complete(core.choices)
    return Solved(choices, core.bound + rest.cost, core.branches, core.status)


def fastest_within(
    made: Program, memory_bytes: float, effort: Effort = Effort()
) -> Answer | None:
    raise NotImplementedError


def _answer(made: Program, found: Solved) -> Answer | None:
    if found.choices is None:
        return None
    seconds = made.seconds.cost(found.choices)
    memory = made.memory.cost(found.choices)
    bound = min(found.bound, seconds)
    return Answer(made.assignment(found.choices), seconds, memory, bound, found.branches)
