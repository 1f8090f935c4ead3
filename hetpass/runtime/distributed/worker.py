"""What one process does for a cluster: it compiles its part of steps, runs it, keeps its arrays.

A worker is a plain object; a crew decides in which process it lives. Its methods are called one
after another, in the order in which the driver asked, except `status`, which is called at any time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetpass.backend.compile_part import CompiledPart, Places
from hetpass.backend.emulate import Emulation
from hetpass.backend.report import FragmentReport, fragment_report
from hetpass.errors import ExecutionError
from hetpass.ir.program import Staged
from hetpass.runtime.create import create_on
from hetpass.runtime.dispatch import Move, Run
from hetpass.runtime.distributed.arrivals import Arrivals, Key
from hetpass.runtime.distributed.part_runtime import PartRuntime, Progress
from hetpass.runtime.distributed.wire import Shards, decoded, shards_of
from hetpass.runtime.transport.message import Message, Receiver, Transport
from hetpass.runtime.watchdog import Status


@dataclass(frozen=True)
class Seat:
    """Where a worker stands in the cluster.

    Attributes:
      place: its number, counted over all groups and hosts.
      group: the name of its group; host: its host's number there, of `hosts`.
      num_devices: of this host.
      places: of all groups' devices.
    """

    place: int
    group: str
    host: int
    hosts: int
    num_devices: int
    places: Places

    def __str__(self) -> str:
        return f"{self.group!r}" if self.hosts == 1 else f"{self.group!r}, host {self.host}"


class Job(Protocol):
    """A step that every process traces and cuts by itself. Travels as a Python object."""

    def build(
        self,
        devices: Mapping[str, Sequence[jax.Device]],
        places: Places,
        place: int,
        emulation: Emulation = Emulation(),
    ) -> CompiledPart:
        """This process's part.

        Raises:
          HetpassError: the program here is not the one that was planned.
        """
        ...


@dataclass(frozen=True)
class Kept:
    """An input that the worker has already: the number under which it keeps it."""

    number: int


@dataclass(frozen=True)
class StepRequest:
    """One call of a program, as one worker is asked for it.

    Attributes:
      program, call: numbers; calls of all programs are counted together.
      inputs: by flat input: Kept, or the value as it travels.
      outputs: leaves of the result that this worker keeps, and under which numbers.
      forget: numbers of arrays that nobody needs after this call has begun.
      observed: measure.
    """

    program: int
    call: int
    inputs: Mapping[int, Any]
    outputs: Mapping[int, int]
    forget: tuple[int, ...] = ()
    observed: bool = False


@dataclass(frozen=True)
class Event:
    """Something that a worker saw: a fragment that ran, or an array that arrived.

    Attributes:
      name: of a fragment ("forward 0.3"); "" for an arrival.
      stages: (stage,), or from and to. microbatch: -1 for what runs once per step.
      start_s, end_s: `end_s` by this worker's clock, `start_s` by that of the worker `began_at`.
    """

    name: str
    stages: tuple[int, ...]
    microbatch: int
    start_s: float
    end_s: float
    began_at: int
    place: int


def digest(staged: Staged) -> str:
    """A hash of a whole program, equal in all processes that traced and cut the same step."""
    return hashlib.sha256(str(staged).encode()).hexdigest()[:16]


class Worker:
    """See the head of this module.

    Args:
      seat: where it stands.
      devices: by group name, of its own group; all of them, if several processes make the group.
      transport: makes the transport, given the number of this process and the receiver.
      emulation: how its devices are to behave, for experiments.
    """

    def __init__(
        self,
        seat: Seat,
        devices: Mapping[str, Sequence[jax.Device]],
        transport: Callable[[int, Receiver], Transport],
        emulation: Emulation = Emulation(),
    ) -> None:
        self._seat = seat
        self._devices = devices
        self._emulation = emulation
        self._progress = Progress()
        self._arrivals = Arrivals(seat.place, self._pass_on, self._arrived)
        self._transport = transport(seat.place, self._arrivals)
        self._programs: dict[int, PartRuntime] = {}
        self._kept: dict[int, jax.Array] = {}
        self._events: list[Event] | None = None

    def address(self) -> str:
        return self._transport.address

    def connect(self, peers: Mapping[int, str]) -> None:
        self._transport.connect(peers)

    def compile(self, program: int, job: Job) -> str:
        """Compiles this process's part of a step; a hash of the whole, equal in all processes."""
        self._progress.began(-1, f"compile program {program}")
        part = job.build(self._devices, self._seat.places, self._seat.place, self._emulation)
        self._programs[program] = PartRuntime(
            part, program, self._arrivals, self._transport, self._progress
        )
        return digest(part.staged)

    def reports(self, program: int) -> tuple[FragmentReport, ...]:
        """What the compiler says of this process's fragments."""
        part = self._programs[program].part
        own = [e for e in part.executables if e.program.stage in part.stages]
        return tuple(fragment_report(executable) for executable in own)

    def create(
        self,
        program: int,
        create_fn: Callable[..., Any],
        args: Any,
        inputs: Sequence[int],
        keep: Mapping[int, int],
        strays: int,
    ) -> None:
        """Makes the leaves of a state that live here.

        Args:
          create_fn, args: its result is the state; args as they travel.
          inputs: per leaf of the state, the flat input of the step that it is.
          keep: by leaf, the number to keep it under.
          strays: the stage where leaves live that the step does not use.
        """
        part = self._programs[program].part
        leaves, tree = jax.tree.flatten(jax.tree.map(decoded, args))
        jaxpr = jax.make_jaxpr(lambda *values: create_fn(*jax.tree.unflatten(tree, values)))(
            *leaves
        )
        wanted: dict[Mesh, dict[int, NamedSharding]] = {}
        places = {
            part.staged.feeds[n].input: p.target
            for n, p in part.placements.items()
            if p.cut is None
        }
        elsewhere = {
            part.staged.slots[slot].stage: NamedSharding(s.mesh, PartitionSpec())
            for slot, s in part.shardings.items()
        }
        for leaf in keep:
            target = places.get(inputs[leaf]) or elsewhere[strays]
            wanted.setdefault(target.mesh, {})[leaf] = target
        for mesh, targets in wanted.items():
            made = create_on(mesh, jaxpr, leaves, targets)
            for leaf, value in zip(sorted(targets), made, strict=True):
                self._kept[keep[leaf]] = value

    def run(self, request: StepRequest) -> tuple[Event, ...]:
        """One step's part. Arrays are kept before they are ready; if observed, it waits."""
        self._progress.busy += 1
        try:
            return self._run(request)
        finally:
            self._progress.busy -= 1

    def _run(self, request: StepRequest) -> tuple[Event, ...]:
        inputs = {
            number: self._kept[v.number] if isinstance(v, Kept) else decoded(v)
            for number, v in request.inputs.items()
        }
        for number in request.forget:
            self._kept.pop(number, None)
        events: list[Event] = []
        place = self._seat.place

        def observe(what: Run | Move, start_s: float, end_s: float) -> None:
            number = -1 if what.microbatch is None else what.microbatch
            stages = (what.stage,) if isinstance(what, Run) else what.stages
            name = what.name if isinstance(what, Run) else ""
            events.append(Event(name, stages, number, start_s, end_s, place, place))

        self._events = events if request.observed else None
        runtime = self._programs[request.program]
        made = runtime(
            request.call, inputs, tuple(request.outputs), observe if request.observed else None
        )
        self._kept.update((request.outputs[leaf], array) for leaf, array in made.items())
        self._events = None
        return tuple(events)

    def fetch(self, number: int) -> Shards:
        """An array that is kept here, on the host; waits for it."""
        if number not in self._kept:
            raise ExecutionError("HP-RUN-GONE", f"process {self._seat.place} has no array {number}")
        return shards_of(self._kept[number])

    def ready(self, numbers: Sequence[int]) -> None:
        """Waits until arrays exist."""
        for number in numbers:
            if number in self._kept:
                self._kept[number].block_until_ready()

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)

    def kept(self) -> int:
        """How many arrays are kept here."""
        return len(self._kept)

    def status(self) -> Status:
        progress = self._progress
        last = {stage: tuple(names) for stage, names in list(progress.last.items())}
        return Status(self._seat.place, progress.count, progress.busy > 0, last)

    def clock(self) -> float:
        """Seconds, by the clock of this process."""
        return time.perf_counter()

    def close(self) -> None:
        self._transport.close()
        for runtime in self._programs.values():
            runtime.close()

    @property
    def transport(self) -> Transport:
        """That carries its parcels."""
        return self._transport

    # -- between workers ----------------------------------------------------------------------

    def _pass_on(self, place: int, message: Message, value: Any) -> None:
        self._transport.post(place, message, value, None)

    def _arrived(self, key: Key, place: int, sent_s: float, arrived_s: float) -> None:
        self._progress.count += 1
        program, _, transfer, microbatch = key
        events = self._events
        if events is not None:
            staged = self._programs[program].part.staged
            ends = staged.transfers[transfer]
            stages = (staged.slots[ends.source].stage, staged.slots[ends.target].stage)
            events.append(Event("", stages, microbatch, sent_s, arrived_s, place, self._seat.place))
