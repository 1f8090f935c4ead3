"""The cheapest choices of a program, as an assignment with its bound. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetpass.ir.operation_graph import Assignment
from hetpass.planner.intra_op.elimination import eliminated
from hetpass.planner.intra_op.linear_program import Effort, Solved
from hetpass.planner.intra_op.near_optima import near_optima
from hetpass.planner.intra_op.pbqp import Problem, reduced
from hetpass.planner.intra_op.program import Program


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


def fastest(made: Program, effort: Effort = Effort()) -> Answer | None:
    """The fastest assignment of a program, whatever memory it takes."""
    found = cheapest(made.seconds, effort)
    return answer_of(made, found)


def cheapest(problem: Problem, effort: Effort = Effort()) -> Solved:
    """Exact reduction; elimination of what is left where tables stay small, else the program."""
    rest = reduced(problem)
    if not np.isfinite(rest.cost):
        return Solved(None, np.inf, 0, "infeasible")
    small = eliminated(rest.core, most_entries=effort.most_entries)
    if small is not None:
        cost = rest.cost + float(small.costs)
        found = rest.complete(small.choices(())) if np.isfinite(cost) else None
        return Solved(found, cost, 0, "optimal" if found else "infeasible")
    near = near_optima(rest.core, (), effort)
    if near is None:
        return Solved(None, np.inf, 0, "infeasible")
    choices = rest.complete(near.choices[0])
    return Solved(choices, near.bound + rest.cost, 0, "optimal")


def answer_of(made: Program, found: Solved) -> Answer | None:
    """What was found, as an answer; None if nothing was."""
    if found.choices is None:
        return None
    seconds = made.seconds.cost(found.choices)
    memory = made.memory.cost(found.choices)
    bound = min(found.bound, seconds)
    return Answer(made.assignment(found.choices), seconds, memory, bound, found.branches)
