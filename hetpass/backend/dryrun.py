"""A plan compiled for devices that are not here: what the compiler says of memory and collectives.

Every fragment is lowered and compiled as for a run, on a mesh of compile-only devices of its
stage's kind: GPUs by the plugin of the extra `dryrun-cuda12` and a description of the kind
(`backend.gpu_target`), TPUs by `libtpu` (the extra `dryrun-tpu`). Several kinds live in one
process, and no driver is needed. Stages of one kind and mesh share their devices, so that equal
fragments are compiled once.

Times of GPU programs mean nothing without a GPU: kernels are not tuned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from hetpass.backend.compile import Build, Executable, undonatable
from hetpass.backend.gpu_target import gpu_target
from hetpass.backend.lower import StageProgram
from hetpass.backend.report import FragmentReport, fragment_report
from hetpass.backend.stored_slots import stored_slots
from hetpass.errors import ClusterError
from hetpass.ir.cluster import Cluster, DeviceGroup
from hetpass.ir.plan import Plan, Replica
from hetpass.ir.program import Staged
from hetpass.ir.quantities import counted, spelled
from hetpass.ir.records import Reader

READER = Reader(ClusterError, "HP-TARGET")

Clock = Callable[[], float]

_TPUS: Mapping[str, tuple[str, Mapping[int, str], Mapping[str, str]]] = {
    "TPU-v4": (
        "v4",
        {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
        {"chip_config_name": "megacore"},  # else each of a chip's two cores is a device
    ),
    "TPU-v5e": ("v5e", {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}, {}),
    "TPU-v5p": ("v5p", {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}, {}),
    "TPU-v6e": ("v6e", {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}, {}),
}
"""By kind, libtpu's name, the slice that holds so many chips, and options."""


@dataclass(frozen=True)
class DryStage:
    """One stage.

    Attributes:
      group, kind: of its devices.
      fragments: what the compiler made of its programs.
      estimates_s: the compiler's own seconds for each of them; None where it has none (GPUs).
      peak_bytes: on each device, at the fullest moment: what the program at work takes, what lies
        there beside it for later, and what the other microbatches in flight have left.
      limit_bytes: of a device.
    """

    group: str
    kind: str
    fragments: tuple[FragmentReport, ...]
    estimates_s: tuple[float | None, ...]
    peak_bytes: int
    limit_bytes: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True)
class DryRun:
    """A plan as the compiler sees it. Prints as text.

    Attributes:
      stages: in order.
      programs, compiled: how many there are, and how many were compiled, equal ones once.
    """

    stages: tuple[DryStage, ...]
    programs: int
    compiled: int

    @property
    def fits(self) -> bool:
        """Whether every stage fits its devices."""
        return all(stage.fits for stage in self.stages)

    def __str__(self) -> str:
        lines = [f"dry run: {counted(self.programs, 'program')}, {self.compiled} compiled"]
        for number, stage in enumerate(self.stages):
            verdict = "fits" if stage.fits else "does not fit"
            lines.append(
                f"stage {number} on {stage.kind} of {stage.group}: "
                f"{spelled(stage.peak_bytes, 'bytes')} of {spelled(stage.limit_bytes, 'bytes')}, "
                f"{verdict}"
            )
            for fragment, seconds in zip(stage.fragments, stage.estimates_s, strict=True):
                said = "" if seconds is None else f"; {seconds:.3g} s by the compiler's model"
                lines.append(f"  {fragment}{said}")
        return "\n".join(lines)


def dryrun(
    staged: Staged,
    plan: Plan,
    cluster: Cluster,
    in_flight: Sequence[int],
    *,
    threads: int = 2,
    clock: Clock = time.perf_counter,
) -> DryRun:
    """Compiles every fragment of a plan for its stage's device kind.

    Args:
      in_flight: microbatches per stage, as the schedule holds them.
      threads: that compile at once.

    Raises:
      ClusterError: HP-TARGET-KIND, a kind cannot be compiled for; HP-TARGET-PLUGIN, what compiles
        for it is not installed.
      PlanError: the plan does not fit the program.
    """
    stored = stored_slots(staged, plan)
    staged, replicas = stored.staged, stored.replicas
    groups = {group.name: group for group in cluster.groups}
    known: dict[tuple[str, tuple[tuple[str, int], ...]], Mesh] = {}
    meshes = {
        stage: _mesh(groups[replica.group], replica, known)
        for stage, replica in enumerate(replicas)
    }
    shardings = stored.shardings(meshes)
    kept = undonatable(staged, [False] * len(staged.transfers))
    build = Build(staged, meshes, stored.avals, shardings, stored.free, kept, clock)
    built = build.all(stored.programs(), threads)
    executables = built.executables
    reports = [fragment_report(executable) for executable in executables]
    held = [
        _device_bytes(a, s) for a, s in zip(stored.avals, built.shardings.values(), strict=True)
    ]
    stages = []
    for number, replica in enumerate(replicas):
        own = [
            (executable.program, report)
            for executable, report in zip(executables, reports, strict=True)
            if report.stage == number
        ]
        kind = groups[replica.group].kind
        stages.append(
            DryStage(
                replica.group,
                kind.name,
                tuple(report for _, report in own),
                tuple(_estimate_s(e) for e in executables if e.program.stage == number),
                _peak_bytes(staged, own, held, in_flight[number], kept),
                kind.memory_bytes,
            )
        )
    calls = {id(executable.call) for executable in executables}
    return DryRun(tuple(stages), len(executables), len(calls))


def _estimate_s(executable: Executable) -> float | None:
    """The compiler counts -1 s for every operation that it has no model of; programs of a second or
    more would be needed for that to go unseen."""
    analysis = executable.call.cost_analysis()
    seconds = analysis.get("optimal_seconds") if analysis else None
    return None if seconds is None else float(seconds - math.floor(seconds))


def _peak_bytes(
    staged: Staged,
    own: Sequence[tuple[StageProgram, FragmentReport]],
    held: Sequence[int],
    in_flight: int,
    kept: frozenset[int],
) -> int:
    """The fullest moment of a stage, its programs one after another.

    Args:
      own: its programs, as `lower` orders them: those that start it last.
      held: bytes of every slot on a device.
      kept: slots that somebody else holds on to.
    """
    stage = own[0][0].stage
    ordered = sorted(own, key=lambda pair: pair[0].role != "start")
    alive = {f.slot for f in staged.feeds if staged.slots[f.slot].stage == stage}
    moments: list[tuple[StageProgram, int]] = []
    left_bytes = 0  # by each microbatch's forward
    for program, report in ordered:
        beside = alive - set(program.arguments) - set(program.results)
        moments.append((program, report.peak_bytes + sum(held[slot] for slot in beside)))
        alive |= set(program.arguments) | set(program.results)
        alive -= set(program.frees) - kept
        if program.role == "forward":
            of_one = [slot for slot in alive if staged.slots[slot].scope == "microbatch"]
            left_bytes = sum(held[slot] for slot in of_one)
        if program.role == "backward":  # what a microbatch had is gone with it
            alive = {slot for slot in alive if staged.slots[slot].scope == "step"}
    others = (in_flight - 1) * left_bytes
    return max(size + (others if program.per_microbatch else 0) for program, size in moments)


def _device_bytes(aval: jax.core.ShapedArray, sharding: NamedSharding) -> int:
    """On each device."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0  # PRNG keys: a few words
    return math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize


def _mesh(
    group: DeviceGroup,
    replica: Replica,
    known: dict[tuple[str, tuple[tuple[str, int], ...]], Mesh],
) -> Mesh:
    key = group.kind.name, replica.mesh
    if key not in known:
        devices = compile_only_devices(group, len(replica.devices))
        sizes = tuple(size for _, size in replica.mesh)
        names = tuple(name for name, _ in replica.mesh)
        array = np.array(devices, dtype=object).reshape(sizes)
        known[key] = Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))
    return known[key]


def compile_only_devices(group: DeviceGroup, count: int) -> Sequence[jax.Device]:
    """So many devices of a group's kind, to compile for.

    Raises:
      ClusterError: as `dryrun`.
    """
    kind = group.kind
    if kind.name in _TPUS:
        name, slices, options = _TPUS[kind.name]
        size = min((n for n in slices if n >= count), default=None)
        if size is None:
            READER.refuse("KIND", f"no slice of {kind.name} holds {count} chips")
        found = _topology(kind.name, "dryrun-tpu", "tpu", f"{name}:{slices[size]}", **options)
    else:
        hosts = max(1, count // group.devices_per_host)
        shape = f"1x{hosts}x{count // hosts}"
        found = _topology(
            kind.name,
            "dryrun-cuda12",
            "cuda",
            shape,
            topology=shape,
            target_config=gpu_target(kind),
        )
    return list(found.devices)[:count]


def _topology(
    kind: str, extra: str, platform: str, name: str, **options: str
) -> topologies.TopologyDescription:
    try:
        return topologies.get_topology_desc(name, platform, **options)
    except (RuntimeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise ClusterError(
            "HP-TARGET-PLUGIN",
            f"nothing here compiles for {kind}",
            details=[str(error).splitlines()[0]],
            ways_out=[f'pip install "hetpass[{extra}]"'],
        ) from error
