"""All states of some nodes that come near the optimum. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetpass.planner.intra_op.elimination import eliminated
from hetpass.planner.intra_op.linear_program import Effort, slack, solved
from hetpass.planner.intra_op.pbqp import Choices, Problem
from hetpass.planner.intra_op.sparse_elimination import Survivors, survivors
from hetpass.planner.intra_op.tree_bounds import pruned


@dataclass(frozen=True)
class NearOptima:
    """Attributes:
    choices: per state of the kept nodes that was found, the cheapest choices of all nodes; the
      optimum first.
    bound: of the optimum, from below.
    allowance: every state within `bound + allowance` was found.
    relaxed: the bound of the linear program.
    least: per kept node, a bound for each of its choices.
    """

    choices: tuple[tuple[int, ...], ...]
    bound: float
    allowance: float
    relaxed: float
    above: Problem


def near_optima(problem: Problem, kept: Sequence[int], effort: Effort) -> NearOptima | None:
    """The states of the kept nodes whose least costs are near the optimum; None: infeasible.

    The linear program gives the bound, and tells what every choice costs above it at least. Among
    the choices that it uses, even in part, the best whole ones are found at once. Within an
    allowance a sparse elimination then is exact: first as far as those lie above the bound, which
    proves the optimum, and further while that stays cheap.
    """
    measured = slack(problem)
    if measured is None:
        return None
    first = _among(problem, measured.used, effort)
    if first is None:
        branched = solved(problem, effort=effort)
        if branched.choices is None:
            return None
        first = branched.choices
    gap = max(problem.cost(first) - measured.bound, 0.0)
    if not kept and gap <= effort.gap * abs(measured.bound):
        return NearOptima((first,), measured.bound, 0.0, measured.bound, measured.above)
    scale = max(abs(measured.bound), 1e-12)
    wanted = gap + 1e-7 * scale  # what the reduced costs are good for
    best: tuple[Survivors, float] | None = None
    for allowance in [wanted, *(s * scale for s in effort.allowances if s * scale > wanted)]:
        near = pruned(measured.above, allowance, tilts=(0.0,) * 3)
        found = survivors(near, kept, allowance, effort.most_joined)
        if found is None:
            break
        if len(found.costs):
            best = found, allowance
        if not kept:
            break
    if best is None:
        return NearOptima((first,), measured.bound, 0.0, measured.bound, measured.above)
    found, allowance = best
    order = sorted(range(len(found.costs)), key=lambda k: (found.costs[k], k))
    nearest = float(found.costs[order[0]])
    choices = tuple(found.choices(k) for k in order)
    return NearOptima(
        choices, measured.bound + nearest, allowance - nearest, measured.bound, measured.above
    )


def _among(problem: Problem, used: Sequence[Choices], effort: Effort) -> tuple[int, ...] | None:
    """The best of some choices of each node; None if none go together, or there are too many."""
    nodes = tuple(costs[own] for costs, own in zip(problem.nodes, used, strict=True))
    edges = {(i, j): e[np.ix_(used[i], used[j])] for (i, j), e in problem.edges.items()}
    found = eliminated(Problem(nodes, edges), most_entries=effort.most_entries)
    if found is None or not np.isfinite(found.costs):
        return None
    return tuple(int(own[c]) for own, c in zip(used, found.choices(()), strict=True))
