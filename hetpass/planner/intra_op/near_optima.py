"""All states of some nodes that come near the optimum. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpass.planner.intra_op.linear_program import Effort, slack, solved
from hetpass.planner.intra_op.pbqp import Problem
from hetpass.planner.intra_op.sparse_elimination import Survivors, survivors


@dataclass(frozen=True)
class NearOptima:
    """Attributes:
    choices: per state of the kept nodes that was found, the cheapest choices of all nodes; the
      optimum first.
    bound: of the optimum, from below.
    allowance: every state within `bound + allowance` was found.
    """

    choices: tuple[tuple[int, ...], ...]
    bound: float
    allowance: float


def near_optima(problem: Problem, kept: Sequence[int], effort: Effort) -> NearOptima | None:
    """The states of the kept nodes whose least costs are near the optimum; None: infeasible.

    The linear program gives the bound, and tells what every choice costs above it at least. Within
    an allowance a sparse elimination then is exact. The allowance grows while that stays cheap.
    """
    measured = slack(problem)
    if measured is None:
        return None
    if not kept and measured.choices is not None:
        return NearOptima((measured.choices,), measured.bound, 0.0)
    scale = max(abs(measured.bound), 1e-12)
    best: tuple[Survivors, float] | None = None
    for share in effort.allowances:
        found = survivors(measured.above, kept, share * scale, effort.most_joined)
        if found is None:
            break
        best = found, share * scale
    if best is not None and len(best[0].costs):
        found, allowance = best
        order = sorted(range(len(found.costs)), key=lambda k: (found.costs[k], k))
        least = float(found.costs[order[0]])
        choices = tuple(found.choices(k) for k in order)
        return NearOptima(choices, measured.bound + least, allowance - least)
    if measured.choices is not None:
        return NearOptima((measured.choices,), measured.bound, 0.0)
    branched = solved(problem, effort=effort)
    if branched.choices is None:
        return None
    return NearOptima((branched.choices,), max(branched.bound, measured.bound), 0.0)
