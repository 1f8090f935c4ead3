"""The judge of pipelines: the simulator, with in-flight counts that fit the memory. No JAX.

Every pipeline, ours or a baseline's, is judged by the same rules: transfers between two groups
share the link of that pair, one wire for each direction; stages inside a group have wires of their
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpass.cost.tables import CostTables
from hetpass.errors import ScheduleError
from hetpass.planner.adaptive import AdaptiveProblem, adaptive
from hetpass.planner.objective import Pick, most_in_flight
from hetpass.schedules.costs import LinkCost, PipelineCosts, StageCost
from hetpass.schedules.make import WEIGHT_SCHEDULES, make_schedule, policy
from hetpass.schedules.one_f_one_b import legal_counts
from hetpass.simulator.counted import counted_makespan_s
from hetpass.simulator.simulate import makespan_s

FAMILY = ("1f1b", "h-1f1b", "eager-1f1b")
"""Schedules that in-flight counts alone tell apart."""

AUTO, ADAPTIVE = "auto", "adaptive"

WEIGHT_SHARE = 0.5
"""Of a backward part: a product costs as much for its weights as for its input."""


@dataclass(frozen=True)
class Judged:
    """A schedule and its simulated step.

    Attributes:
      schedule: its name.
      in_flight: microbatches in flight per stage.
      step_s: seconds from the first start to the last end, updates included.
    """

    schedule: str
    in_flight: tuple[int, ...]
    step_s: float


def pipeline_costs(
    tables: CostTables,
    picks: Sequence[Pick],
    *,
    weights_apart: bool = False,
    lane_of: Sequence[int] | None = None,
) -> PipelineCosts:
    """What schedules and the simulator know of these stages.

    Args:
      weights_apart: weight gradients are tasks of their own.
      lane_of: per stage, its lane; None: every stage has one of its own.
    """
    stages = []
    for pick in picks:
        table, at = tables.stages[pick.table], (pick.first, pick.end)
        backward_s, activation_bytes = (
            float(table.backward_s[at]),
            float(table.activation_bytes[at]),
        )
        weights_s = WEIGHT_SHARE * backward_s if weights_apart else 0.0
        stages.append(
            StageCost(
                forward_s=float(table.forward_s[at]),
                backward_s=backward_s - weights_s,
                weight_s=weights_s,
                update_s=float(table.once_s[at]),
                activation_bytes=activation_bytes,
                weight_bytes=activation_bytes if weights_apart else 0.0,
                fixed_bytes=float(table.fixed_bytes[at]),
            )
        )
    links = []
    for i, (before, after) in enumerate(zip(picks, picks[1:], strict=False)):
        if lane_of is not None and lane_of[i] == lane_of[i + 1]:
            links.append(LinkCost(0.0, 0.0))
            continue
        p, g = tables.stages[before.table].group, tables.stages[after.table].group
        one, other = tables.groups[p].name, tables.groups[g].name
        shared = p != g
        links.append(
            LinkCost(
                float(tables.link_forward_s[p, g, after.first]),
                float(tables.link_backward_s[p, g, after.first]),
                float(tables.link_latency_s[p, g]),
                forward_wires=(f"{one}→{other}",) if shared else (),
                backward_wires=(f"{other}→{one}",) if shared else (),
            )
        )
    return PipelineCosts(tuple(stages), tuple(links))


def least_s(costs: PipelineCosts, num_microbatches: int) -> float:
    """What no schedule of stages on lanes of their own can pass: the first microbatch reaches a
    stage, which then works on all of them."""
    reached_s, bounds = 0.0, []
    for stage, link in zip(costs.stages, (*costs.links, LinkCost(0.0, 0.0)), strict=True):
        bounds.append(reached_s + num_microbatches * stage.busy_s + stage.update_s)
        reached_s += stage.forward_s + link.forward_s + link.latency_s
    return max(bounds)


def judged(
    tables: CostTables,
    picks: Sequence[Pick],
    schedule: str = AUTO,
    in_flight: tuple[int, ...] | None = None,
) -> Judged | None:
    """The step under a schedule; None where not even the fewest microbatches in flight fit.

    Args:
      schedule: "auto": the best of the 1F1B family, each with its counts cut down to what fits, and
        of `in_flight`; "adaptive": searched; else the named one, which must fit as it is, or with
        the given counts.
      in_flight: counts that the program, or whoever wrote the plan, chose.
    """
    costs = pipeline_costs(tables, picks, weights_apart=schedule in WEIGHT_SCHEDULES)
    most = _room(tables, picks)
    if most is None:
        return None
    m, count = tables.num_microbatches, len(picks)
    if schedule == ADAPTIVE:
        return _adaptive(tables, picks, costs)
    if schedule != AUTO and schedule not in FAMILY:
        made = make_schedule(
            schedule, num_stages=count, num_microbatches=m, costs=costs, in_flight=in_flight
        )
        fits = all(held <= room for held, room in zip(made.held(), most, strict=True))
        return Judged(schedule, made.in_flight, makespan_s(made, costs)) if fits else None
    if schedule == AUTO:
        named = [(name, policy(name, costs=costs).counts(count, m)) for name in FAMILY]
        chosen = [("1f1b", legal_counts(in_flight, count, m))] if in_flight is not None else []
        wanted = [(n, _cut(c, most)) for n, c in (*named, *chosen, ("1f1b", most))]
    else:
        wanted = [(schedule, policy(schedule, costs=costs, in_flight=in_flight).counts(count, m))]
    found: dict[tuple[int, ...], Judged] = {}
    for name, counts in wanted:
        fits = all(held <= room for held, room in zip(counts, most, strict=True))
        if fits and counts not in found:
            found[counts] = Judged(name, counts, counted_makespan_s(costs, counts, m))
    return min(found.values(), key=lambda judgement: judgement.step_s, default=None)


def _room(tables: CostTables, picks: Sequence[Pick]) -> tuple[int, ...] | None:
    """Per stage, the most microbatches in flight that fit, never rising along the stages."""
    counts: list[int] = []
    for pick in picks:
        table = tables.stages[pick.table]
        memory_bytes = tables.groups[table.group].memory_bytes
        fitting = most_in_flight(table, memory_bytes, tables.num_microbatches)
        counts.append(min([int(fitting[pick.first, pick.end]), *counts[-1:]]))
    return tuple(counts) if counts[-1] >= 1 else None


def _cut(counts: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(count, room) for count, room in zip(counts, most, strict=True))


def _adaptive(tables: CostTables, picks: Sequence[Pick], costs: PipelineCosts) -> Judged | None:
    limits = tuple(tables.groups[tables.stages[p.table].group].memory_bytes for p in picks)
    problem = AdaptiveProblem(costs, tables.num_microbatches, limits_bytes=limits, max_plays=50)
    try:
        found = adaptive(problem)
    except ScheduleError:
        return None
    return Judged(ADAPTIVE, found.schedule.in_flight, found.makespan_s)
