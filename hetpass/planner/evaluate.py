"""Prices any plan, found or written by hand, and lists what it violates. No JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetpass.cost.analytic import Assumptions, Submesh
from hetpass.cost.range_bytes import MemoryParts, memory_parts
from hetpass.cost.tables import CostTables
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster
from hetpass.ir.facts import LayerFacts, ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import counted, span_text, spelled
from hetpass.planner.judge import Judged, judged, pipeline_costs
from hetpass.planner.objective import Pick, cheapest
from hetpass.planner.plan_tables import plan_tables
from hetpass.planner.schedule_choice import plan_schedule
from hetpass.simulator import simulate

_ROUNDING = 1e-9


@dataclass(frozen=True)
class StageEvaluation:
    """One stage of a plan.

    Attributes:
      group, kind: of devices.
      first_layer, last_layer: inclusive.
      devices: how many.
      forward_s, backward_s: per microbatch.
      once_s: gradient sync and update.
      send_s: to the stage behind and back, per microbatch.
      in_flight: microbatches.
      fixed_bytes, activation_bytes: on each device: all the time, and for the microbatches in
        flight.
      limit_bytes: what a device may hold.
      busy: the share of the step in which it computes.
      flops: forward and backward of a microbatch, on all its devices together, once each.
      memory: what the bytes are of, by the analytic model.
    """

    group: str
    kind: str
    first_layer: int
    last_layer: int
    devices: int
    forward_s: float
    backward_s: float
    once_s: float
    send_s: float
    in_flight: int
    fixed_bytes: float
    activation_bytes: float
    limit_bytes: float
    busy: float
    flops: float
    memory: MemoryParts


@dataclass(frozen=True)
class Evaluation:
    """What a plan costs.

    Attributes:
      plan: as given.
      step_s: simulated; infinite if the plan cannot run.
      objective_s: T of the inter-op program.
      schedule: that the simulator played, and the in-flight counts.
      stages: in order.
      violations: sentences; none if the plan can run.
    """

    plan: Plan
    step_s: float
    objective_s: float
    schedule: str
    in_flight: tuple[int, ...]
    stages: tuple[StageEvaluation, ...]
    violations: tuple[str, ...]

    @property
    def balance(self) -> float:
        """The mean over devices of what a stage works per microbatch, over the largest."""
        total = sum(stage.devices for stage in self.stages)
        times = [s.forward_s + s.backward_s for s in self.stages]
        weighted = sum(t * s.devices for t, s in zip(times, self.stages, strict=True))
        return weighted / total / max(times)

    @property
    def bottleneck(self) -> int:
        """The stage that computes most."""
        return max(range(len(self.stages)), key=lambda i: (self.stages[i].busy, -i))

    def __str__(self) -> str:
        head = (
            f"step {self.step_s:.6g} s by simulation ({self.schedule}), "
            f"{self.objective_s:.6g} s by the planner's objective; balance {self.balance:.1%}"
        )
        rows = []
        for index, stage in enumerate(self.stages):
            held = stage.fixed_bytes + stage.activation_bytes
            memory = f"{spelled(held, 'bytes')} of {spelled(stage.limit_bytes, 'bytes')}"
            mark = "  <- bottleneck" if index == self.bottleneck else ""
            rows.append(
                f"  stage {index}: layers {span_text(stage.first_layer, stage.last_layer)} on "
                f"{stage.devices} {stage.kind} of {stage.group}; F {stage.forward_s:.4g} s, "
                f"B {stage.backward_s:.4g} s, send {stage.send_s:.4g} s, "
                f"once {stage.once_s:.4g} s; {stage.in_flight} in flight, {memory} "
                f"({spelled(stage.fixed_bytes, 'bytes')} fixed); busy {stage.busy:.1%}{mark}"
            )
        return "\n".join([head, *rows, *(f"  violated: {text}" for text in self.violations)])


def evaluate(
    plan: Plan,
    facts: ProgramFacts,
    cluster: Cluster,
    assumed: Assumptions = Assumptions(),
    schedule: str | None = None,
) -> Evaluation:
    """The simulated step of a plan of one pipeline, stage by stage.

    Args:
      schedule: instead of the plan's own.

    Raises:
      PlanError: the plan is of another program or cluster, or HP-PLAN-UNPRICED: it has several
        pipelines or replicas.
    """
    plan.check(cluster, facts.num_layers, facts.fingerprint)
    tables, picks = plan_tables(plan, facts, cluster, assumed)
    stages = plan.pipelines[0].stages
    counts = [stage.in_flight for stage in stages]
    chosen = tuple(c for c in counts if c is not None)
    in_flight = chosen if len(chosen) == len(counts) else None
    violations = [*_batch(plan, facts, cluster), *_missing(tables, picks, cluster)]
    result: Judged | None = None
    if not violations:
        decided = plan.tasks or len(set(plan.lane_of)) < len(picks)
        if schedule is None and decided:
            result = _played(plan, tables, picks)
        else:
            result = judged(tables, picks, schedule or plan.schedule, in_flight)
        if result is None:
            violations += _memory(tables, picks, in_flight)
    by_objective = cheapest(tables, picks) if result is not None else None
    if result is None:
        result = Judged(schedule or plan.schedule, in_flight or (1,) * len(stages), math.inf)
    return Evaluation(
        plan,
        result.step_s,
        by_objective.step_s if by_objective is not None else math.inf,
        result.schedule,
        result.in_flight,
        _stages(plan, tables, picks, result, (facts, cluster)),
        tuple(violations),
    )


def _played(plan: Plan, tables: CostTables, picks: Sequence[Pick]) -> Judged | None:
    """The order of tasks that the plan says; None where it holds more than fits."""
    schedule = plan_schedule(plan, has_backward=True)
    costs = pipeline_costs(
        tables, picks, weights_apart=schedule.has_weight, lane_of=schedule.lane_of
    )
    timeline = simulate(schedule, costs)
    rooms = [tables.groups[tables.stages[p.table].group].memory_bytes for p in picks]
    for curve, lane in zip(timeline.memory, schedule.lanes, strict=True):
        if curve.peak_bytes > min(rooms[s] for s in lane.stages) * (1 + _ROUNDING):
            return None
    return Judged(schedule.name, schedule.in_flight, timeline.makespan_s)


def objective_s(
    plan: Plan, facts: ProgramFacts, cluster: Cluster, assumed: Assumptions = Assumptions()
) -> float:
    """T of a plan by the program's objective, without simulation; infinite if it cannot run."""
    tables, picks = plan_tables(plan, facts, cluster, assumed)
    if _batch(plan, facts, cluster) or _missing(tables, picks, cluster):
        return math.inf
    found = cheapest(tables, picks)
    return found.step_s if found is not None else math.inf


def _batch(plan: Plan, facts: ProgramFacts, cluster: Cluster) -> list[str]:
    try:
        plan.check(cluster, facts.num_layers, batch_size=facts.batch_size)
    except PlanError as error:
        return [error.what]
    return []


def _missing(tables: CostTables, picks: Sequence[Pick], cluster: Cluster) -> list[str]:
    texts = []
    for index, pick in enumerate(picks):
        table = tables.stages[pick.table]
        at = (pick.first, pick.end)
        if not np.isfinite(table.forward_s[at] + table.backward_s[at]):
            group = cluster.groups[table.group]
            texts.append(
                f"stage {index}: {group.kind.name} of {group.name!r} cannot compute layers "
                f"{pick.first} to {pick.end - 1}; it has {', '.join(group.kind.peak_flops)}"
            )
    return texts


def _memory(
    tables: CostTables, picks: Sequence[Pick], in_flight: tuple[int, ...] | None
) -> list[str]:
    texts = []
    for index, pick in enumerate(picks):
        table, at = tables.stages[pick.table], (pick.first, pick.end)
        count = in_flight[index] if in_flight else 1
        need = float(table.fixed_bytes[at] + count * table.activation_bytes[at])
        room = tables.groups[table.group]
        if need > room.memory_bytes:
            texts.append(
                f"stage {index}: needs {spelled(need, 'bytes', 4)} on each device of "
                f"{room.name!r} for {counted(count, 'microbatch')} in flight, and has "
                f"{spelled(room.memory_bytes, 'bytes', 4)}"
            )
    return texts or ["the schedule holds more microbatches than fit"]


def _stages(
    plan: Plan,
    tables: CostTables,
    picks: Sequence[Pick],
    result: Judged,
    given: tuple[ProgramFacts, Cluster],
) -> tuple[StageEvaluation, ...]:
    facts, cluster = given
    lanes, rows = plan.lane_of, []
    examples = facts.batch_size / tables.num_microbatches
    for index, pick in enumerate(picks):
        table, at = tables.stages[pick.table], (pick.first, pick.end)
        group = cluster.groups[table.group]
        forward_s, backward_s = float(table.forward_s[at]), float(table.backward_s[at])
        once_s = float(table.once_s[at])
        send_s = 0.0
        if index + 1 < len(picks) and lanes[index] != lanes[index + 1]:
            link = (table.group, tables.stages[picks[index + 1].table].group)
            send_s = float(
                tables.link_forward_s[(*link, pick.end)] + tables.link_backward_s[(*link, pick.end)]
            )
        work_s = tables.num_microbatches * (forward_s + backward_s) + once_s
        count = result.in_flight[index]
        data = dict(table.mesh).get("data", 1)
        submesh = Submesh(data, table.devices // data)
        layers = range(pick.first, pick.end)
        rows.append(
            StageEvaluation(
                group=group.name,
                kind=group.kind.name,
                first_layer=pick.first,
                last_layer=pick.end - 1,
                devices=table.devices,
                forward_s=forward_s,
                backward_s=backward_s,
                once_s=once_s,
                send_s=send_s,
                in_flight=count,
                fixed_bytes=float(table.fixed_bytes[at]),
                activation_bytes=float(count * table.activation_bytes[at]),
                limit_bytes=tables.groups[table.group].memory_bytes,
                busy=work_s / result.step_s if math.isfinite(result.step_s) else 0.0,
                flops=sum(_flops(facts.layers[k], examples) for k in layers),
                memory=memory_parts(facts, submesh, examples, table.recompute, layers),
            )
        )
    return tuple(rows)


def _flops(layer: LayerFacts, examples: float) -> float:
    both = (*layer.forward_flops.values(), *layer.backward_flops.values())
    return sum(amount.of(examples) for amount in both)
