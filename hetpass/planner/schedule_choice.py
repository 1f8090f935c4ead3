"""From a plan to its schedule: what is open is decided here, and written into the plan. No JAX.

A decided plan says all that its schedule needs, without costs: a name with in-flight counts for the
family of 1F1B, a name alone where it says everything, else the tasks of every lane in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpass.errors import PlanError, ScheduleError
from hetpass.ir.plan import Pipeline, Plan
from hetpass.ir.quantities import counted
from hetpass.ir.schedule import Lane, Schedule, peaks, read_tasks
from hetpass.planner.adaptive import AdaptiveProblem, adaptive
from hetpass.schedules.costs import PipelineCosts, StageCost
from hetpass.schedules.forward_only import ForwardOnly
from hetpass.schedules.interleaved import wound
from hetpass.schedules.make import WEIGHT_SCHEDULES, make_schedule, policy, schedule_names
from hetpass.schedules.one_f_one_b import OneFOneB

OPEN_NAMES = ("auto", "adaptive")
"""Names that leave the schedule to a search."""

_LEAST_PLAYS, _MOST_PLAYS, _PLAYED_TASKS = 40, 600, 150_000


@dataclass(frozen=True)
class ScheduleChoice:
    """A plan whose schedule is decided, and what should be known about the choice."""

    plan: Plan
    notes: tuple[str, ...] = ()


def choose_schedule(
    plan: Plan,
    costs: PipelineCosts,
    *,
    has_backward: bool,
    limits_bytes: Sequence[float] | None = None,
) -> ScheduleChoice:
    """Decides what the plan leaves open about its schedule.

    "auto" becomes the fastest schedule that the search finds under the limits; "h-1f1b" gets its
    in-flight counts; zero-bubble schedules get their order of tasks. A plan that is decided comes
    back as it is. In-flight counts in a plan stand: "auto" is then 1F1B with them.

    Args:
      costs: of the plan's stages and links.
      has_backward: whether the step has backward tasks.
      limits_bytes: per lane; None: no limits.

    Raises:
      ScheduleError: HP-SCHEDULE-UNKNOWN for a name that is none.
      PlanError: HP-PLAN-SCHEDULE where the schedule does not fit the plan's submeshes.
    """
    if plan.tasks or (plan.schedule not in OPEN_NAMES and not _needs_costs(plan)):
        plan_schedule(plan, has_backward=has_backward)
        return ScheduleChoice(plan)
    if not has_backward:
        name = "inference" if plan.schedule in OPEN_NAMES else plan.schedule
        return ScheduleChoice(replace(plan, schedule=name))
    if _any_counts(plan):
        name = "1f1b" if plan.schedule in OPEN_NAMES else plan.schedule
        if name == "h-1f1b":
            plan = _with_counts(plan, _counts(plan, name, costs))
        plan = replace(plan, schedule=name)
        plan_schedule(plan, has_backward=True)
        return ScheduleChoice(plan)
    if plan.schedule in OPEN_NAMES:
        return _searched(plan, costs, limits_bytes)
    _check_lanes(plan)
    schedule = make_schedule(
        plan.schedule,
        num_stages=len(plan.lane_of),
        num_microbatches=plan.num_microbatches,
        costs=costs,
    )
    if plan.schedule in WEIGHT_SCHEDULES:
        return ScheduleChoice(replace(plan, tasks=_lines(schedule)))
    return ScheduleChoice(_with_counts(plan, schedule.in_flight))


def plan_schedule(
    plan: Plan, *, has_backward: bool, num_microbatches: int | None = None
) -> Schedule:
    """The schedule that a plan says. Costs that it would need count as equal.

    Args:
      num_microbatches: instead of the plan's, for another step on its stages.

    Raises:
      PlanError, ScheduleError: as `choose_schedule`; a ScheduleError too where the plan's tasks or
        counts cannot run.
    """
    count = plan.num_microbatches if num_microbatches is None else num_microbatches
    lane_of, name = plan.lane_of, plan.schedule
    stages = len(lane_of)
    if plan.tasks and has_backward:
        return _as_written(plan)
    if name not in (*schedule_names(), *OPEN_NAMES):
        policy(name)  # refuses, with the nearest names
    if not has_backward:
        return ForwardOnly(name, lane_of).make(stages, count)
    if name in OPEN_NAMES:
        equal = PipelineCosts.equal(stages, StageCost(1.0, 2.0))
        return adaptive(AdaptiveProblem(equal, count, lane_of)).schedule
    _check_lanes(plan)
    equal = PipelineCosts.equal(stages, StageCost(1.0, 1.0, 1.0))
    return make_schedule(
        name,
        num_stages=stages,
        num_microbatches=count,
        in_flight=_counts(plan, name, equal) if _any_counts(plan) else None,
        costs=equal,
        stages_per_lane=stages // len(set(lane_of)),
    )


def uncounted(plan: Plan) -> Plan:
    """Without in-flight counts, which the schedule then decides."""
    pipelines = tuple(
        Pipeline(tuple(replace(s, in_flight=None) for s in p.stages), p.num_microbatches)
        for p in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


# ---------------------------------------------------------------------------------------------
# The search


def _searched(
    plan: Plan, costs: PipelineCosts, limits_bytes: Sequence[float] | None
) -> ScheduleChoice:
    notes: tuple[str, ...] = ()
    limits = None if limits_bytes is None else tuple(limits_bytes)
    try:
        found = adaptive(_problem(plan, costs, limits))
    except ScheduleError as refusal:
        # Bytes are estimates here: the schedule that holds least, and a word of warning.
        if refusal.code != "HP-SCHEDULE-MEMORY":
            raise
        notes = (f"memory may not suffice: {'; '.join(refusal.details)}",)
        if len(set(plan.lane_of)) == len(plan.lane_of):
            return ScheduleChoice(replace(plan, schedule="1f1b"), notes)
        found = adaptive(_problem(plan, costs, None))
    schedule = found.schedule
    expected = {**plan.predictions, "pipeline_s": found.makespan_s}
    if "step_s" in expected:
        expected["step_s"] = found.makespan_s
    named = _named(plan, schedule) or replace(plan, schedule="adaptive", tasks=_lines(schedule))
    return ScheduleChoice(replace(named, predictions=expected), notes)


def _problem(
    plan: Plan, costs: PipelineCosts, limits_bytes: tuple[float, ...] | None
) -> AdaptiveProblem:
    """With fewer plays where each takes longer: about as long for any size."""
    tasks = 2 * len(plan.lane_of) * plan.num_microbatches
    plays = max(_LEAST_PLAYS, min(_MOST_PLAYS, _PLAYED_TASKS // tasks))
    return AdaptiveProblem(
        costs, plan.num_microbatches, plan.lane_of, limits_bytes, max_plays=plays
    )


def _named(plan: Plan, schedule: Schedule) -> Plan | None:
    """The plan with a name (and counts) that say the schedule; None if no name does."""
    stages, count = schedule.num_stages, schedule.num_microbatches
    if plan.lane_of == tuple(range(stages)):
        if OneFOneB().make(stages, count).lanes == schedule.lanes:
            return replace(plan, schedule="1f1b")
        counts = schedule.in_flight
        rising = any(a < b for a, b in zip(counts, counts[1:], strict=False))
        if not rising and OneFOneB(in_flight=counts).make(stages, count).lanes == schedule.lanes:
            return replace(_with_counts(plan, counts), schedule="1f1b")
        return None
    lanes = len(set(plan.lane_of))
    if plan.lane_of == wound(lanes, stages) and stages % lanes == 0:
        usual = make_schedule(
            "interleaved",
            num_stages=stages,
            num_microbatches=count,
            stages_per_lane=stages // lanes,
        )
        if usual.lanes == schedule.lanes:
            return replace(plan, schedule="interleaved")
    return None


# ---------------------------------------------------------------------------------------------
# Reading and writing plans


def _needs_costs(plan: Plan) -> bool:
    return plan.schedule in WEIGHT_SCHEDULES or plan.schedule == "h-1f1b"


def _any_counts(plan: Plan) -> bool:
    return any(stage.in_flight is not None for stage in plan.pipelines[0].stages)


def _counts(plan: Plan, name: str, costs: PipelineCosts) -> tuple[int, ...]:
    """The plan's in-flight counts; the named schedule's where it has none."""
    stages = plan.pipelines[0].stages
    usual = policy(name, costs=costs).counts(len(stages), plan.num_microbatches)
    return tuple(
        default if stage.in_flight is None else stage.in_flight
        for stage, default in zip(stages, usual, strict=True)
    )


def _with_counts(plan: Plan, counts: Sequence[int]) -> Plan:
    pipeline = plan.pipelines[0]
    stages = tuple(
        replace(stage, in_flight=count)
        for stage, count in zip(pipeline.stages, counts, strict=True)
    )
    pipelines = (Pipeline(stages, pipeline.num_microbatches), *plan.pipelines[1:])
    return replace(plan, pipelines=pipelines)


def _lines(schedule: Schedule) -> tuple[str, ...]:
    return tuple(" ".join(str(task) for task in lane.tasks) for lane in schedule.lanes)


def _as_written(plan: Plan) -> Schedule:
    lane_of = plan.lane_of
    stages_of = [tuple(s for s, lane in enumerate(lane_of) if lane == i) for i in set(lane_of)]
    if len(stages_of) != len(plan.tasks):
        raise _misfit(
            plan,
            f"it lists the tasks of {counted(len(plan.tasks), 'lane')} for {len(stages_of)} "
            "submeshes",
        )
    lanes = tuple(
        Lane(stages, read_tasks(line)) for stages, line in zip(stages_of, plan.tasks, strict=True)
    )
    actual = peaks(lanes, len(lane_of), last="B")
    stated = tuple(
        count if stage.in_flight is None else stage.in_flight
        for stage, count in zip(plan.pipelines[0].stages, actual, strict=True)
    )
    return Schedule(plan.schedule, len(lane_of), plan.num_microbatches, lanes, stated)


def _check_lanes(plan: Plan) -> None:
    """Holds a schedule's name against the submeshes of the plan.

    Raises:
      PlanError: HP-PLAN-SCHEDULE.
    """
    lane_of, name = plan.lane_of, plan.schedule
    stages, lanes = len(lane_of), len(set(lane_of))
    if name == "interleaved":
        fits = lane_of == wound(lanes, stages) and stages % lanes == 0
        wanted = "stage s on submesh s mod p, for p submeshes and a multiple of p stages"
    elif name == "zb-v":
        fits = stages == 2 * lanes and lane_of == (*range(lanes), *reversed(range(lanes)))
        wanted = "two stages on every submesh, in the shape of a V: a, b, …, b, a"
    else:
        fits, wanted = lanes == stages, "every stage on a submesh of its own"
    if not fits:
        raise _misfit(plan, f"it needs {wanted}; the stages are on submeshes {list(lane_of)}")


def _misfit(plan: Plan, detail: str) -> PlanError:
    return PlanError(
        "HP-PLAN-SCHEDULE",
        f"the schedule {plan.schedule!r} does not fit the plan's submeshes",
        where="schedule",
        details=(detail,),
        ways_out=('schedule="auto" takes any submeshes', "place the stages as the schedule needs"),
    )
