"""Orders of tasks: sizes and costs in, a Schedule out. No JAX."""

from hetpass.schedules.costs import LinkCost, PipelineCosts, StageCost
from hetpass.schedules.make import make_schedule, schedule_names

__all__ = ["LinkCost", "PipelineCosts", "StageCost", "make_schedule", "schedule_names"]
