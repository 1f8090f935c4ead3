"""The linear program under a limit on memory, for one limit after the other. No JAX.

Another limit is another right side of one row, from which the dual simplex goes on where it ended
(highspy). Without highspy every limit is solved anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hetpass.planner.intra_op.linear_program import Slack, Transport
from hetpass.planner.intra_op.pbqp import Floats, Problem


@dataclass(frozen=True, eq=False)
class LimitedSlack:
    """Attributes:
    slack: its bound is on the seconds of choices within the limit; what lies above is counted with
      the price: `seconds = bound + above + price * (limit - memory)`.
    price: of memory, seconds per byte, at which the bound is highest.
    """

    slack: Slack
    price: float


class LimitedRelaxation:
    """Attributes:
    seconds, memory: the same nodes and edges.
    """

    def __init__(self, seconds: Problem, memory: Problem, *, warm: bool = True) -> None:
        """Args:
        warm: kept for further limits; else solved anew each time, which is quicker once.
        """
        self.seconds, self.memory = seconds, memory
        self._transport = Transport(seconds)
        # Counted from the least, in units of what is between least and most: HiGHS's tolerances
        # are absolute.
        own = tuple(costs - costs.min() for costs in memory.nodes)
        self._least = float(sum(costs.min() for costs in memory.nodes))
        most = sum(float(costs.max()) for costs in own)
        most += sum(float(costs.max()) for costs in memory.edges.values())
        self._unit = max(most, 1.0)
        row = self._transport.row(Problem(own, memory.edges)) / self._unit
        self._solver = (_Warm if warm and _highspy() else _Cold)(self._transport, row)

    def within(self, limit: float) -> LimitedSlack | None:
        """None if not even fractions of choices keep the limit."""
        found = self._solver.within((limit - self._least) / self._unit)
        if found is None:
            return None
        x, least, reduced_costs, price = found
        scale = self._transport.scale()
        slack = self._transport.slack(x, least * scale, reduced_costs * scale)
        return LimitedSlack(slack, max(0.0, price * scale / self._unit))


_Found = tuple[Floats, float, Floats, float]
"""Variables, objective, reduced costs, price of the row."""


class _Cold:
    def __init__(self, transport: Transport, row: Floats) -> None:
        self.transport, self.row, self.sums = transport, row, transport.sums()

    def within(self, right: float) -> _Found | None:
        from scipy.optimize import linprog

        found = linprog(
            self.transport.objective / self.transport.scale(),
            A_eq=self.sums,
            b_eq=self.transport.right,
            A_ub=self.row[None, :],
            b_ub=[right],
            method="highs-ds",
            options={"presolve": False},
        )
        if found.status != 0:
            return None
        return found.x, found.fun, found.lower.marginals, -float(found.ineqlin.marginals[0])


class _Warm:
    def __init__(self, transport: Transport, row: Floats) -> None:
        import highspy
        from highspy._core import _Highs
        from scipy.sparse import csr_array, vstack

        sums = transport.sums()
        matrix = vstack([sums, csr_array(row[None, :])]).tocsc()
        program = highspy.HighsLp()
        program.num_row_, program.num_col_ = matrix.shape
        program.col_cost_ = transport.objective / transport.scale()
        program.col_lower_ = np.zeros(matrix.shape[1])
        program.col_upper_ = np.full(matrix.shape[1], np.inf)
        program.row_lower_ = np.append(transport.right, -np.inf)
        program.row_upper_ = np.append(transport.right, np.inf)
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.a_matrix_.start_ = matrix.indptr
        program.a_matrix_.index_ = matrix.indices
        program.a_matrix_.value_ = matrix.data
        # The class below `highspy.Highs`, which prints a banner when it is made.
        self.solver: Any = _Highs()
        quiet = ("output_flag", False), ("log_to_console", False)
        for option, value in (*quiet, ("presolve", "off"), ("solver", "simplex"), ("threads", 1)):
            self.solver.setOptionValue(option, value)
        # Fewer pivots from one limit to the next, and they end at a vertex of these costs.
        self.solver.setOptionValue("dual_simplex_cost_perturbation_multiplier", 0.0)
        self.solver.passModel(program)
        self.solver.run()  # without the limit, from which any limit is a short way
        self.row = matrix.shape[0] - 1
        self.optimal = highspy.HighsModelStatus.kOptimal

    def within(self, right: float) -> _Found | None:
        self.solver.changeRowBounds(self.row, -np.inf, right)
        self.solver.run()
        if self.solver.getModelStatus() != self.optimal:
            return None
        found = self.solver.getSolution()
        return (
            np.array(found.col_value),
            float(self.solver.getInfo().objective_function_value),
            np.array(found.col_dual),
            -float(found.row_dual[self.row]),
        )


def _highspy() -> bool:
    try:
        import highspy  # noqa: F401
    except ImportError:
        return False
    return True
