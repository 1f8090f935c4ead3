"""The driver's side of a step over several processes: it says what is wanted, and holds names.

A call returns before anything has run. Every worker has its part of the step, all of its lane of
the schedule included; it is asked once per step, and given only the leaves that it uses.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetpass.backend.compile_part import stage_places
from hetpass.backend.report import FragmentReport
from hetpass.backend.stored_slots import stored_slots
from hetpass.errors import ExecutionError
from hetpass.ir.plan import Plan
from hetpass.ir.program import FromInput, FromLiteral, FromSlot, Staged
from hetpass.ir.schedule import Schedule
from hetpass.ir.timeline import Timeline
from hetpass.runtime.distributed.crew import Crew
from hetpass.runtime.distributed.gather import clock_offsets, gathered
from hetpass.runtime.distributed.remote_array import RemoteArray
from hetpass.runtime.distributed.wire import encoded, joined
from hetpass.runtime.distributed.worker import Event, Job, Kept, StepRequest, digest
from hetpass.runtime.local import check_arguments, repeated_inputs

_CALLS_UNDER_WAY = 2
"""Before the next is asked for, the one before these must have been sent to the devices."""


class Conversation:
    """What the programs of one crew share: numbers of arrays, calls and programs.

    Args:
      crew: that is spoken with.
    """

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self._arrays = itertools.count(1)
        self._calls = itertools.count(1)
        self._programs = itertools.count(1)
        self._lock = threading.Lock()
        self._forgotten: dict[int, list[int]] = {}
        self._under_way: deque[list[Any]] = deque()

    def next_array(self) -> int:
        return next(self._arrays)

    def next_call(self) -> int:
        return next(self._calls)

    def next_program(self) -> int:
        return next(self._programs)

    def forget(self, places: Sequence[int], number: int) -> None:
        """Nobody needs the array any more; its workers hear of it with the next call."""
        with self._lock:
            for place in places:
                self._forgotten.setdefault(place, []).append(number)

    def forgotten(self, place: int) -> tuple[int, ...]:
        """What the worker has not been told to forget yet."""
        with self._lock:
            return tuple(self._forgotten.pop(place, ()))

    def array(self, aval: Any, stage: int, places: tuple[int, ...]) -> RemoteArray:
        """A name for an array that workers are about to make."""
        number = self.next_array()
        return RemoteArray(aval, stage, places, number, self.fetching, self.forget)

    def fetching(self, array: RemoteArray) -> Callable[[], Any]:
        """Asks for the numbers of an array; the result waits for them."""
        promises = [self.crew.ask(place, "fetch", array.number) for place in array.places]
        return lambda: joined(self.crew.wait(promises))

    def asked(self, promises: list[Any]) -> None:
        """A call was asked for; waits for earlier ones if there are too many."""
        self._under_way.append(promises)
        while len(self._under_way) > _CALLS_UNDER_WAY:
            self.crew.wait(self._under_way.popleft())

    def waited(self) -> None:
        """Every call has been sent to the devices."""
        while self._under_way:
            self.crew.wait(self._under_way.popleft())


@dataclass(frozen=True)
class Layout:
    """What the driver knows of a step that runs elsewhere.

    Attributes:
      staged: with a slot of its own for every result.
      places: per stage.
      fed: by flat input (arguments only), the stage it is fed to, and whether it is cut into
        microbatches there.
    """

    staged: Staged
    schedule: Schedule
    places: tuple[tuple[int, ...], ...]
    fed: Mapping[int, tuple[int, bool]]

    @property
    def num_arguments(self) -> int:
        traced = self.staged.layered.program.traced
        return len(traced.inputs) - len(traced.constants)


def layout_of(staged: Staged, plan: Plan, schedule: Schedule, crew: Crew) -> Layout:
    """See Layout."""
    stored = stored_slots(staged, plan)
    places = stage_places(stored.replicas, crew.seats[0].places)
    staged = stored.staged
    traced = staged.layered.program.traced
    count = len(traced.inputs) - len(traced.constants)
    slots = staged.slots
    fed = {
        feed.input: (slots[feed.slot].stage, slots[feed.slot].stacked)
        for feed in staged.feeds
        if feed.input < count
    }
    return Layout(staged, schedule, places, fed)


class DistributedRuntime:
    """A step that workers have compiled, ready to be called any number of times.

    Args:
      talk: with the crew. layout: of the step. job: that makes every worker's part.

    Raises:
      HetpassError: a worker refuses, or has traced another program.
    """

    def __init__(self, talk: Conversation, layout: Layout, job: Job) -> None:
        self.talk = talk
        self.layout = layout
        self._program = talk.next_program()
        self._copied = repeated_inputs(layout.staged.results)
        self._users = tuple(sorted({p for places in layout.places for p in places}))
        crew = talk.crew
        for seat in crew.seats:
            stages = [s for s, places in enumerate(layout.places) if seat.place in places]
            crew.runs(seat.place, stages)
        promises = [crew.ask(place, "compile", self._program, job) for place in self._users]
        found = crew.wait(promises)
        _check_digests(digest(layout.staged), dict(zip(self._users, found, strict=True)))

    @property
    def staged(self) -> Staged:
        return self.layout.staged

    def __call__(
        self,
        arguments: Sequence[Any],
        record: Callable[[str, int, float, float], None] | None = None,
    ) -> list[Any]:
        """One step: per output leaf a RemoteArray (or a constant), not waited for."""
        results, promises = self._asked(arguments, observed=record is not None)
        if record is None:
            self.talk.asked(promises)
            return results
        offsets = clock_offsets(self.talk.crew, self._users)
        for events in self.talk.crew.wait(promises):
            for event in events:
                shift_s = offsets[event.place]
                if event.name:
                    record(
                        event.name, event.stages[0], event.start_s - shift_s, event.end_s - shift_s
                    )
        return results

    def measured(
        self, arguments: Sequence[Any], lane_names: Sequence[str]
    ) -> tuple[list[Any], Timeline]:
        """One step, waited for, and what every lane and link did, by one clock."""
        self.talk.waited()
        offsets = clock_offsets(self.talk.crew, self._users)
        results, promises = self._asked(arguments, observed=True)
        events: list[Event] = [e for found in self.talk.crew.wait(promises) for e in found]
        return results, gathered(events, offsets, self.layout.schedule.lane_of, lane_names)

    def create(
        self, create_fn: Callable[..., Any], args: Sequence[Any], inputs: Sequence[int]
    ) -> list[RemoteArray]:
        """The leaves of a state, made where the step wants them.

        Args:
          create_fn, args: its result is the state.
          inputs: per leaf, the flat input of the step that it is.
        """
        traced = self.staged.layered.program.traced
        strays = 0
        leaves = []
        for number in inputs:
            stage, stacked = self.layout.fed.get(number, (strays, False))
            stage = strays if stacked else stage
            leaves.append(
                self.talk.array(traced.inputs[number].aval, stage, self.layout.places[stage])
            )
        sent = jax.tree.map(encoded, tuple(args))
        promises = []
        for place in self._users:
            keep = {n: leaf.number for n, leaf in enumerate(leaves) if place in leaf.places}
            promises.append(
                self.talk.crew.ask(
                    place, "create", self._program, create_fn, sent, tuple(inputs), keep, strays
                )
            )
        self.talk.crew.wait(promises)
        return leaves

    def reports(self) -> tuple[FragmentReport, ...]:
        """Of all fragments, from the workers that compiled them; by stage."""
        crew = self.talk.crew
        found = crew.wait([crew.ask(place, "reports", self._program) for place in self._users])
        own = {(r.stage, r.role, r.phase): r for reports in found for r in reports}
        return tuple(own[key] for key in sorted(own))

    # -- a call -------------------------------------------------------------------------------

    def _asked(self, arguments: Sequence[Any], observed: bool) -> tuple[list[Any], list[Any]]:
        traced = self.staged.layered.program.traced
        check_arguments(arguments, traced.inputs[: self.layout.num_arguments])
        call = self.talk.next_call()
        inputs: dict[int, dict[int, Any]] = {place: {} for place in self._users}
        for number, (stage, _) in self.layout.fed.items():
            self._give(inputs, number, arguments[number], self.layout.places[stage])
        outputs: dict[int, dict[int, int]] = {place: {} for place in self._users}
        results = [
            self._result(number, arguments, inputs, outputs)
            for number in range(len(self.staged.results))
        ]
        taken = self._take_donated(arguments, results)
        promises = []
        for place in self._users:
            forget = (*self.talk.forgotten(place), *(a.number for a in taken if place in a.places))
            request = StepRequest(
                self._program, call, inputs[place], outputs[place], forget, observed
            )
            promises.append(self.talk.crew.ask(place, "run", request))
        return results, promises

    def _give(
        self,
        inputs: dict[int, dict[int, Any]],
        number: int,
        value: Any,
        places: tuple[int, ...],
    ) -> None:
        here = isinstance(value, RemoteArray) and set(places) == set(value.places)
        sent = Kept(value.number) if here else encoded(_at_hand(value))
        for place in places:
            inputs[place][number] = sent

    def _result(
        self,
        number: int,
        arguments: Sequence[Any],
        inputs: dict[int, dict[int, Any]],
        outputs: dict[int, dict[int, int]],
    ) -> Any:
        traced = self.staged.layered.program.traced
        result, aval = self.staged.results[number], traced.jaxpr.outvars[number].aval
        if isinstance(result, FromLiteral):
            return jnp.asarray(result.value, result.aval.dtype)
        if isinstance(result, FromSlot):
            stage = self.staged.slots[result.slot].stage
            return self._named(number, aval, stage, self.layout.places[stage], outputs)
        assert isinstance(result, FromInput)
        value = (*arguments, *traced.constants)[result.input]
        stage, stacked = self.layout.fed.get(result.input, (0, True))
        if isinstance(value, RemoteArray):
            if number not in self._copied:
                return value
            for place in value.places:
                inputs[place].setdefault(result.input, Kept(value.number))
            return self._named(number, aval, value.stage, value.places, outputs)
        if stacked:
            return jnp.asarray(np.array(value), aval.dtype) if _is_plain(value) else value
        return self._named(number, aval, stage, self.layout.places[stage], outputs)

    def _named(
        self,
        number: int,
        aval: Any,
        stage: int,
        places: tuple[int, ...],
        outputs: dict[int, dict[int, int]],
    ) -> RemoteArray:
        array = self.talk.array(aval, stage, places)
        for place in places:
            outputs[place][number] = array.number
        return array

    def _take_donated(self, arguments: Sequence[Any], results: Sequence[Any]) -> list[RemoteArray]:
        """The arrays that are given away with this call; returned ones are not."""
        traced = self.staged.layered.program.traced
        returned = {id(r) for r in results}
        taken = []
        for value, leaf in zip(arguments, traced.inputs, strict=False):
            if leaf.donated and isinstance(value, RemoteArray) and id(value) not in returned:
                value.taken()
                taken.append(value)
                others = [place for place in value.places if place not in self._users]
                self.talk.forget(others, value.number)
        return taken


def _at_hand(value: Any) -> Any:
    """Numbers that the driver has, or fetches."""
    return value.value() if isinstance(value, RemoteArray) else value


def _is_plain(value: Any) -> bool:
    return not isinstance(value, jax.Array)


def _check_digests(expected: str, found: Mapping[int, str]) -> None:
    wrong = {place: other for place, other in found.items() if other != expected}
    if wrong:
        raise ExecutionError(
            "HP-RUN-PROGRAM",
            "the processes have not cut the same program",
            details=[f"driver: {expected}", *(f"process {p}: {d}" for p, d in wrong.items())],
            ways_out=[
                "let the step depend on nothing that differs between processes: the order of "
                "sets, the time, the environment, files",
                "run the same versions of Python, JAX and the model's libraries on all hosts",
            ],
        )
