"""A plan on the simulator: costs and the Timeline of one step. No JAX."""

from __future__ import annotations

from hetpass.cost.analytic import ASSUMED
from hetpass.ir.timeline import Timeline
from hetpass.planner.plan_tables import lane_limits_bytes, plan_costs
from hetpass.planner.schedule_choice import choose_schedule, plan_schedule
from hetpass.simulator import simulate
from hetpass.tools.bundle import Bundle


def has_backward(bundle: Bundle) -> bool:
    """Whether the program computes gradients."""
    return any(layer.backward_flops or layer.seconds for layer in bundle.facts.layers)


def planned_timeline(bundle: Bundle) -> Timeline:
    """One step as the simulator plays it; what the plan leaves open is decided first."""
    costs = plan_costs(bundle.plan, bundle.facts, bundle.cluster, ASSUMED)
    backward = has_backward(bundle)
    choice = choose_schedule(
        bundle.plan,
        costs,
        has_backward=backward,
        limits_bytes=lane_limits_bytes(bundle.plan, bundle.cluster, ASSUMED),
    )
    timeline = simulate(plan_schedule(choice.plan, has_backward=backward), costs)
    return timeline.renamed(dict(zip(timeline.lanes, bundle.plan.lane_names, strict=True)))
