"""Staged, Plan, the devices of one process -> what that process compiles and sends.

Every process of a cluster traces and cuts the same step, and compiles the fragments of the stages
that have devices in it. Of the others it knows shapes and shardings, to plan transfers; their
devices it never sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hetpass._jax import ShapedArray
from hetpass.backend.compile import Build, Executable, microbatch_numbers, undonatable
from hetpass.backend.emulate import Emulation, emulated
from hetpass.backend.lower import StageProgram
from hetpass.backend.pieces import mesh_boxes
from hetpass.backend.reshard import Placement, plan_reshard
from hetpass.backend.routes import Route, Side, route
from hetpass.backend.shard import stage_meshes
from hetpass.backend.stored_slots import StoredSlots, stored_slots
from hetpass.ir.plan import Plan, Replica
from hetpass.ir.program import Staged
from hetpass.ir.schedule import Schedule

_THREADS = 4
"""That compile at once (XLA compiles without the interpreter's lock)."""

Places = Mapping[str, tuple[int, ...]]
"""Per group and device, the number of its process."""


@dataclass(frozen=True)
class CompiledPart:
    """One process's part of a step.

    Attributes:
      staged: with a slot of its own for every result (`finish_results`).
      place: the number of this process.
      places: per stage, the processes that its mesh has devices in.
      avals: per slot, of the array that is stored.
      specs: per slot, its sharding over the axes of its stage's mesh.
      shardings: by slot, of this process's stages.
      executables: of all stages, in the order of `staged.fragments`, then the starts; those of
        other processes cannot be called.
      links: per transfer; can be called where both stages live in this process alone.
      routes: by transfer, the others that this process takes part in.
      placements: by position in `staged.feeds`.
      numbers: per stage; () for stages of other processes.
    """

    staged: Staged
    schedule: Schedule
    replicas: tuple[Replica, ...]
    place: int
    places: tuple[tuple[int, ...], ...]
    avals: tuple[ShapedArray, ...]
    specs: tuple[PartitionSpec, ...]
    shardings: Mapping[int, NamedSharding]
    executables: tuple[Executable, ...]
    links: tuple[Callable[[jax.Array], jax.Array], ...]
    routes: Mapping[int, Route]
    placements: Mapping[int, Placement]
    numbers: tuple[tuple[jax.Array, ...], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that have devices in this process."""
        return tuple(s for s, places in enumerate(self.places) if self.place in places)


def stage_places(replicas: Sequence[Replica], places: Places) -> tuple[tuple[int, ...], ...]:
    """Per stage, the processes that its mesh has devices in, in order."""
    return tuple(
        tuple(sorted({places[replica.group][d] for d in replica.devices})) for replica in replicas
    )


def compile_part(
    staged: Staged,
    plan: Plan,
    schedule: Schedule,
    devices: Mapping[str, Sequence[jax.Device]],
    places: Places,
    place: int,
    emulation: Emulation = Emulation(),
) -> CompiledPart:
    """Lowers and compiles the fragments of one process's stages, and plans its transfers.

    Args:
      devices: of the group that the process belongs to, those of its other processes included.
      places: of every group's devices. place: the number of this process.
      emulation: how this process's devices are to behave.

    Raises:
      PlanError: for a plan that does not fit the program or the devices, before any compile.
    """
    stored = stored_slots(staged, plan)
    staged, replicas, avals = stored.staged, stored.replicas, stored.avals
    where = stage_places(replicas, places)
    own = [stage for stage, found in enumerate(where) if place in found]
    found = stage_meshes([replicas[stage] for stage in own], devices)
    meshes = dict(zip(own, found, strict=True))
    shardings = stored.shardings(meshes)
    links, aliases, routes = _links(stored, places, shardings, place)
    kept = undonatable(staged, aliases)
    if not emulation.donates:
        kept = frozenset(range(len(staged.slots)))
    build = Build(staged, meshes, avals, shardings, stored.free, kept, time.perf_counter)
    programs = stored.programs()
    count = staged.num_microbatches
    fragments = dict(enumerate(staged.fragments))
    own_programs = [(n, p) for n, p in enumerate(programs) if p.stage in meshes]
    found_here = build.all([program for _, program in own_programs], _THREADS)
    built = iter(
        [
            emulated(executable, emulation, fragments.get(number))
            for (number, _), executable in zip(own_programs, found_here.executables, strict=True)
        ]
    )
    return CompiledPart(
        staged=staged,
        schedule=schedule,
        replicas=replicas,
        place=place,
        places=where,
        avals=avals,
        specs=stored.specs,
        shardings=found_here.shardings,
        executables=tuple(next(built) if p.stage in meshes else _elsewhere(p) for p in programs),
        links=links,
        routes=routes,
        placements=stored.placements(shardings),
        numbers=tuple(
            microbatch_numbers(meshes[stage], count) if stage in meshes else (None,) * count
            for stage in range(staged.num_stages)
        ),
    )


def _elsewhere(program: StageProgram) -> Executable:
    return Executable(program, _not_here, ())  # type: ignore[arg-type]


def _not_here(*_: Any) -> NoReturn:
    raise RuntimeError("this belongs to another process")


def _links(
    stored: StoredSlots, places: Places, shardings: Mapping[int, NamedSharding], place: int
) -> tuple[tuple[Callable[..., Any], ...], list[bool], dict[int, Route]]:
    """Links, whether they alias, and routes; as in CompiledPart."""
    staged, avals, specs = stored.staged, stored.avals, stored.specs
    links: list[Callable[..., Any]] = []
    aliases = []
    routes: dict[int, Route] = {}
    planned: dict[tuple[Side, Side], Route] = {}
    for number, transfer in enumerate(staged.transfers):
        ends = [
            side_of(
                specs[slot], stored.replicas[staged.slots[slot].stage], places, avals[slot].shape
            )
            for slot in (transfer.source, transfer.target)
        ]
        around = {*ends[0].places, *ends[1].places}
        if around == {place}:
            itemsize = getattr(avals[transfer.source].dtype, "itemsize", 0)
            shape = avals[transfer.source].shape
            link = plan_reshard(
                shardings[transfer.source], shardings[transfer.target], shape, itemsize
            )
            links.append(link)
            aliases.append(link.aliases)
            continue
        links.append(_not_here)
        aliases.append(False)
        if place in around:
            key = (ends[0], ends[1])
            if key not in planned:
                planned[key] = route(*key)
            routes[number] = planned[key]
    return tuple(links), aliases, routes


def side_of(spec: PartitionSpec, replica: Replica, places: Places, shape: Sequence[int]) -> Side:
    """One end of a transfer of an array of that shape."""
    names = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    boxes = mesh_boxes(names, dict(replica.mesh), shape)
    return Side(boxes, tuple(places[replica.group][d] for d in replica.devices))
