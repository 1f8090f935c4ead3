"""The passes in order: the only module that knows which comes after which.

    trace -> split -> segment -> plan -> schedule -> partition -> compile -> run

Between two passes stands one hook: it times the pass, verifies its value, and tells an observer.
No pass reads a clock or checks its own work.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax

from hetpass.analysis.fingerprint import fingerprint
from hetpass.analysis.held_bytes import activation_bytes, fixed_bytes
from hetpass.backend.compile import CompiledStep, compile
from hetpass.errors import SplitError
from hetpass.frontend.microbatch import SplitOptions, split
from hetpass.frontend.segment import segment
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Plan
from hetpass.ir.program import Layered, Staged, StepProgram, Traced
from hetpass.ir.schedule import Schedule
from hetpass.ir.timeline import Timeline
from hetpass.ir.verify import verify
from hetpass.planner.default import default_plan
from hetpass.planner.schedule_choice import ScheduleChoice, choose_schedule, plan_schedule
from hetpass.planner.stage_costs import StageNumbers, limits_bytes, pipeline_costs
from hetpass.schedules.costs import PipelineCosts
from hetpass.simulator import simulate
from hetpass.transforms.beside import stages_beside
from hetpass.transforms.partition import partition, partition_layers

T = TypeVar("T")

DEFAULT_SCHEDULE = "1f1b"
_MICROBATCHES_PER_STAGE = 4


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    A pass makes objects by the hundred thousand and drops few: the collector walks them all again
    and again, a quarter of the time on a deep model.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class PassRecord:
    """What the hook tells after a pass.

    Attributes:
      name: of the pass.
      value: what it made; prints as text.
      seconds: that it took.
    """

    name: str
    value: Any
    seconds: float


Observer = Callable[[PassRecord], None]


@dataclass(frozen=True)
class Passes:
    """Runs passes with the hook between them.

    Attributes:
      observer: is told after every pass.
      verifying: every program-level value is verified (a few percent of the time of tracing).
    """

    observer: Observer | None = None
    verifying: bool = True

    def trace(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        signature: Signature,
        arg_names: Sequence[str],
    ) -> Traced:
        return self._run("trace", lambda: trace(fun, args, kwargs, signature, arg_names=arg_names))

    def layers(self, traced: Traced, num_microbatches: int, options: SplitOptions) -> Layered:
        """split, then segment."""
        program: StepProgram = self._run("split", lambda: split(traced, num_microbatches, options))
        return self._run("segment", lambda: segment(program))

    def layers_for(
        self, traced: Traced, cluster: Cluster, options: SplitOptions
    ) -> tuple[Layered, str]:
        """split and segment with a number of microbatches of our choice, and a note on it."""
        count = choose_microbatches(traced, cluster)
        try:
            return self.layers(traced, count, options), ""
        except SplitError as refusal:
            if count == 1:
                raise
            return self.layers(traced, 1, options), (
                f"one microbatch: {count} were tried, and refused: {refusal.what}"
            )

    def plan(self, layered: Layered, cluster: Cluster, schedule: str) -> Plan:
        """The default plan: each group a stage, layers by their FLOPs and the groups' rates."""
        program = layered.program
        flops = [f + b for f, b in zip(layered.forward_flops, layered.backward_flops, strict=True)]
        plan = default_plan(
            cluster,
            flops if any(flops) else [1.0] * layered.num_layers,
            program.num_microbatches,
            microbatch_size=max(1, (program.traced.batch_size or 1) // program.num_microbatches),
            schedule=schedule,
        )
        return self._run("plan", lambda: replace(plan, fingerprint=fingerprint(layered)))

    def schedule(self, layered: Layered, plan: Plan, cluster: Cluster) -> ScheduleChoice:
        """Decides what the plan leaves open about its schedule; the plan then says it."""
        return self._run(
            "schedule",
            lambda: choose_schedule(
                plan,
                stage_costs(layered, plan, cluster),
                has_backward=any(layered.backward),
                limits_bytes=limits_bytes(plan, cluster),
            ),
        )

    def partition(self, layered: Layered, plan: Plan) -> Staged:
        return self._run("partition", lambda: partition(layered, plan))

    def compile(
        self, staged: Staged, plan: Plan, devices: Mapping[str, Sequence[jax.Device]]
    ) -> CompiledStep:
        schedule = step_schedule(staged, plan)
        return self._run(
            "compile",
            lambda: compile(staged, plan, devices, schedule, clock=time.perf_counter),
        )

    def compile_beside(
        self,
        layered: Layered,
        leader: CompiledStep,
        plan: Plan,
        devices: Mapping[str, Sequence[jax.Device]],
        arguments: Sequence[Any],
    ) -> CompiledStep:
        """Another step on the meshes of `leader`, near the arrays that live there already.

        Args:
          plan, devices: that `leader` was compiled with.
          arguments: the flat arguments it will be called with; those that lie on a stage of
            `leader` stay there.
        """
        stage_of = {frozenset(mesh.devices.flat): stage for stage, mesh in enumerate(leader.meshes)}
        homes = {}
        for number, value in enumerate(arguments):
            if isinstance(value, jax.Array):
                stage = stage_of.get(frozenset(value.sharding.device_set))
                if stage is not None:
                    homes[number] = stage
        staged, own_plan = self.partition_beside(layered, homes, plan)
        return self.compile(staged, own_plan, devices)

    def partition_beside(
        self, layered: Layered, homes: Mapping[int, int], plan: Plan
    ) -> tuple[Staged, Plan]:
        """A step cut for the stages of another step's plan, and that plan with its schedule.

        Args:
          homes: flat input -> stage, for inputs that already live somewhere.
          plan: of the other step.
        """
        count = len(plan.pipelines[0].stages)
        stages = stages_beside(layered, homes, count)
        staged = self._run("partition", lambda: partition_layers(layered, stages, count, homes))
        shared = len(set(plan.lane_of)) < len(plan.lane_of)
        schedule = "auto" if shared else DEFAULT_SCHEDULE
        return staged, replace(plan, schedule=schedule, tasks=())

    def _run(self, name: str, function: Callable[[], T]) -> T:
        began = time.perf_counter()
        with _collector_paused():
            value = function()
        seconds = time.perf_counter() - began
        if self.verifying and isinstance(value, (Traced, StepProgram, Layered, Staged)):
            verify(value)
        if self.observer is not None:
            self.observer(PassRecord(name, value, seconds))
        return value


def step_schedule(staged: Staged, plan: Plan) -> Schedule:
    """The schedule that a decided plan says, for a step cut by it or for its stages."""
    return plan_schedule(
        plan,
        has_backward=any(f.role in ("backward", "weight") for f in staged.fragments),
        num_microbatches=staged.num_microbatches,
    )


def stage_costs(layered: Layered, plan: Plan, cluster: Cluster) -> PipelineCosts:
    """Seconds and bytes of the plan's stages and links, as far as sizes and peak rates tell."""
    stages = plan.pipelines[0].stages
    stage_of = [i for i, s in enumerate(stages) for _ in range(s.first_layer, s.last_layer + 1)]
    activations = activation_bytes(layered, stage_of)
    fixed = fixed_bytes(layered, stage_of)
    numbers = []
    for i, stage in enumerate(stages):
        span = slice(stage.first_layer, stage.last_layer + 1)
        last = stage.last_layer
        numbers.append(
            StageNumbers(
                forward_flops=sum(layered.forward_flops[span]),
                backward_flops=sum(layered.backward_flops[span]),
                sent_bytes=layered.cut_bytes[last] if last < layered.num_layers - 1 else 0.0,
                activation_bytes=activations[i],
                fixed_bytes=fixed[i],
            )
        )
    return pipeline_costs(plan, cluster, tuple(numbers))


def planned_timeline(layered: Layered, plan: Plan, cluster: Cluster) -> Timeline:
    """One step by the plan's schedule, as the simulator plays it."""
    schedule = plan_schedule(plan, has_backward=any(layered.backward))
    timeline = simulate(schedule, stage_costs(layered, plan, cluster))
    return timeline.renamed(dict(zip(timeline.lanes, plan.lane_names, strict=True)))


def choose_microbatches(traced: Traced, cluster: Cluster) -> int:
    """Enough microbatches to fill the pipeline, each with an example for every device of a group.

    The largest divisor M of B with M <= 4 stages whose B / M still feeds the widest group; if
    none does, the largest divisor within 4 stages. 1 for a single group or a step without probes.
    """
    size = traced.batch_size
    stages = len(cluster.groups)
    if size is None or not traced.probes or stages == 1:
        return 1
    widest = max(group.num_devices for group in cluster.groups)
    legal = [m for m in range(1, min(size, _MICROBATCHES_PER_STAGE * stages) + 1) if size % m == 0]
    wide = [m for m in legal if size // m >= widest]
    return max(wide or legal)
