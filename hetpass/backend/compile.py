"""Staged, Plan, devices -> CompiledStep: an XLA executable per fragment, pieces per transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetpass._jax import ShapedArray
from hetpass.backend.lower import StageProgram
from hetpass.backend.reshard import Placement, Reshard, plan_reshard, put
from hetpass.backend.shard import stage_meshes
from hetpass.backend.stored_slots import stored_slots
from hetpass.ir.plan import Plan, Replica
from hetpass.ir.program import FromInput, FromSlot, Staged
from hetpass.ir.schedule import Schedule

Clock = Callable[[], float]

_Compiling = Future[tuple[jax.stages.Compiled, float]]
"""The executable, and the seconds that it took."""


@dataclass(frozen=True)
class Executable:
    """A compiled program.

    Attributes:
      call: takes the stored arrays of `program.arguments` (and the microbatch number) in order.
      donated: the slots among the arguments whose buffers it takes over.
      compile_s: seconds of lowering and compiling, by the clock given to `compile`; 0 without one.
    """

    program: StageProgram
    call: jax.stages.Compiled
    donated: tuple[int, ...]
    compile_s: float = 0.0


@dataclass(frozen=True)
class CompiledStep:
    """Everything that a runtime needs to run a step, on devices of this process.

    Attributes:
      staged: with a slot of its own for every result (`finish_results`).
      meshes, numbers: per stage; `numbers[s][m]` is m as an int32 scalar on stage s.
      avals, shardings: per slot, of the array that is stored.
      executables: in the order of `staged.fragments`, then the starts.
      links: one per transfer.
      placements: one per feed.
    """

    staged: Staged
    schedule: Schedule
    replicas: tuple[Replica, ...]
    meshes: tuple[Mesh, ...]
    avals: tuple[ShapedArray, ...]
    shardings: tuple[NamedSharding, ...]
    executables: tuple[Executable, ...]
    links: tuple[Reshard, ...]
    placements: tuple[Placement, ...]
    numbers: tuple[tuple[jax.Array, ...], ...]


def compile(
    staged: Staged,
    plan: Plan,
    devices: Mapping[str, Sequence[jax.Device]],
    schedule: Schedule,
    clock: Clock | None = None,
    threads: int = 4,
) -> CompiledStep:
    """Lowers every fragment, compiles them side by side, and plans the transfers.

    Args:
      devices: by group name; `Replica.devices` are positions in these lists.
      clock: seconds, for the report; without one no time is taken.
      threads: that compile at once (XLA compiles without the interpreter's lock).

    Raises:
      PlanError: for a plan that does not fit the program or the devices, before any compile.
    """
    stored = stored_slots(staged, plan)
    staged, replicas, avals = stored.staged, stored.replicas, stored.avals
    meshes = stage_meshes(replicas, devices)
    shardings = stored.shardings(dict(enumerate(meshes)))
    links = tuple(_link(t.source, t.target, shardings, avals) for t in staged.transfers)
    kept = undonatable(staged, [link.aliases for link in links])
    build = Build(staged, dict(enumerate(meshes)), avals, shardings, stored.free, kept, clock)
    built = build.all(stored.programs(), threads)
    return CompiledStep(
        staged=staged,
        schedule=schedule,
        replicas=replicas,
        meshes=meshes,
        avals=avals,
        shardings=tuple(built.shardings.values()),
        executables=built.executables,
        links=links,
        placements=tuple(stored.placements(shardings).values()),
        numbers=tuple(microbatch_numbers(mesh, staged.num_microbatches) for mesh in meshes),
    )


def _link(
    source: int,
    target: int,
    shardings: Mapping[int, NamedSharding],
    avals: Sequence[ShapedArray],
) -> Reshard:
    itemsize = getattr(avals[source].dtype, "itemsize", 0)
    return plan_reshard(shardings[source], shardings[target], avals[source].shape, itemsize)


def microbatch_numbers(mesh: Mesh, count: int) -> tuple[jax.Array, ...]:
    """m as an int32 scalar on every device of the mesh, for every m."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return tuple(put(np.asarray(m, np.int32), everywhere) for m in range(count))


def undonatable(staged: Staged, aliases: Sequence[bool]) -> frozenset[int]:
    """Slots whose arrays someone else holds: the caller, another stage, or the results.

    Args:
      aliases: per transfer, whether what arrives may share buffers with what was sent.
    """
    inputs = staged.layered.program.traced.inputs
    returned = {r.input for r in staged.results if isinstance(r, FromInput)}
    kept = {r.slot for r in staged.results if isinstance(r, FromSlot)}
    kept |= {
        feed.slot
        for feed in staged.feeds
        if not inputs[feed.input].donated or feed.input in returned
    }
    for transfer, shared in zip(staged.transfers, aliases, strict=True):
        kept.add(transfer.source)
        if shared:
            kept.add(transfer.target)
    return frozenset(kept)


@dataclass(frozen=True)
class Built:
    """What `Build` made.

    Attributes:
      executables: one per program, in their order.
      shardings: by slot, with those that the compiler chose.
    """

    executables: tuple[Executable, ...]
    shardings: Mapping[int, NamedSharding]


@dataclass(frozen=True)
class Build:
    """Compiles programs of the stages whose meshes are here.

    Attributes:
      meshes: by stage. shardings: by slot.
      avals: per slot. kept: slots that are never donated.
      free: slots whose sharding the compiler of the program that makes them completes
        (`StoredSlots.free`); programs that read them are compiled after it.
    """

    staged: Staged
    meshes: Mapping[int, Mesh]
    avals: tuple[ShapedArray, ...]
    shardings: Mapping[int, NamedSharding]
    free: frozenset[int]
    kept: frozenset[int]
    clock: Clock | None

    def all(self, programs: Sequence[StageProgram], threads: int) -> Built:
        """Compiles the programs; those that read what others make come after those."""
        with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="compile") as pool:
            # Lowering holds the interpreter's lock: one after another here, while others compile.
            calls: dict[object, _Compiling] = {}
            makers: dict[int, tuple[int, _Compiling]] = {}
            found = dict(self.shardings)
            build = replace(self, shardings=found)  # sees what is found on the way
            jobs = {}
            for position in self._makers_first(programs):
                program = programs[position]
                found.update(_completed(makers, self._free(program.arguments)))
                began = self._now()
                donated = build._donated(program)
                lowered = build._lowered(program, donated)
                key = self._key(program, lowered)
                lower_s = self._now() - began
                if key not in calls:
                    calls[key] = pool.submit(self._compiled, lowered)
                makers.update(
                    (slot, (program.results.index(slot), calls[key]))
                    for slot in self._free(program.results)
                )
                jobs[position] = program, donated, lower_s, calls[key]
            found.update(_completed(makers, makers))
            executables = tuple(
                Executable(program, call.result()[0], donated, lower_s + call.result()[1])
                for _, (program, donated, lower_s, call) in sorted(jobs.items())
            )
        return Built(executables, found)

    def _free(self, slots: Sequence[int]) -> list[int]:
        return [slot for slot in slots if slot in self.free]

    def _makers_first(self, programs: Sequence[StageProgram]) -> list[int]:
        """Positions of the programs; those that wait for none come first, to keep compilers busy
        while the others wait."""
        positions = range(len(programs))
        return sorted(positions, key=lambda k: bool(self._free(programs[k].arguments)))

    def _key(self, program: StageProgram, lowered: jax.stages.Lowered) -> object:
        """Equal for equal programs of stages on one mesh: they are compiled once."""
        mesh = self.meshes[program.stage]
        if sum(other is mesh for other in self.meshes.values()) == 1:
            return object()
        weak = tuple(self.avals[slot].weak_type for slot in program.results)
        return mesh, weak, lowered.as_text()

    def _now(self) -> float:
        return 0.0 if self.clock is None else self.clock()

    def _lowered(self, program: StageProgram, donated: Sequence[int]) -> jax.stages.Lowered:
        everywhere = NamedSharding(self.meshes[program.stage], PartitionSpec())
        extra = (everywhere,) if program.per_microbatch else ()
        avals = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            for aval in (self.avals[slot] for slot in program.arguments)
        ]
        if program.per_microbatch:
            avals.append(jax.ShapeDtypeStruct((), np.int32))

        def function(*values: Any) -> tuple[Any, ...]:
            *results, token = program.function(*values)
            pairs = zip(program.results, results, strict=True)
            return (*(self._completed_by_compiler(slot, made) for slot, made in pairs), token)

        out_shardings = [None if s in self.free else self.shardings[s] for s in program.results]
        jitted = jax.jit(
            function,
            in_shardings=(*(self.shardings[slot] for slot in program.arguments), *extra),
            out_shardings=(*out_shardings, everywhere),
            donate_argnums=tuple(program.arguments.index(slot) for slot in donated),
        )
        # (With `keep_unused`, jax 0.12 would keep every executable until the process ends.)
        return jitted.lower(*avals)

    def _completed_by_compiler(self, slot: int, value: Any) -> Any:
        """A free slot's value, cut as its sharding says and along other dimensions at will."""
        if slot not in self.free:
            return value
        sharding = self.shardings[slot]
        entries = [*sharding.spec, *(None,) * (value.ndim - len(sharding.spec))]
        open_spec = PartitionSpec(*(e or PartitionSpec.UNCONSTRAINED for e in entries))
        return jax.lax.with_sharding_constraint(value, NamedSharding(sharding.mesh, open_spec))

    def _compiled(self, lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
        began = self._now()
        call = lowered.compile()
        return call, self._now() - began

    def _donated(self, program: StageProgram) -> tuple[int, ...]:
        """What is updated in place, and freed slots whose buffer some result fits."""
        made = [s for s in program.results if s not in program.updated and s not in self.free]
        places = [self._place(s) for s in made]
        donated = [s for s in program.updated if s not in self.kept]
        for slot in program.frees:
            if slot not in self.kept and self._place(slot) in places:
                places.remove(self._place(slot))
                donated.append(slot)
        return tuple(donated)

    def _place(self, slot: int) -> tuple[Any, ...]:
        aval = self.avals[slot]
        return (aval.shape, aval.dtype, self.shardings[slot])


def _completed(
    makers: Mapping[int, tuple[int, _Compiling]], slots: Iterable[int]
) -> dict[int, NamedSharding]:
    """By slot, the sharding that the compiler gave it.

    Args:
      makers: by slot, the result's position among those of the executable that makes it.
    """
    shardings = {}
    for slot in slots:
        position, call = makers[slot]
        shardings[slot] = call.result()[0].output_shardings[position]
    return shardings
