"""Runs one process's part of a step: its lanes side by side, arrays from other lanes awaited."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from hetpass._jax import shard_arrays, with_weak_type
from hetpass.backend.compile_part import CompiledPart
from hetpass.backend.pieces import Box, relative
from hetpass.backend.routes import Route
from hetpass.errors import ExecutionError
from hetpass.ir.program import FromInput, FromSlot
from hetpass.runtime.dispatch import Dispatch, Move, Run, Wait, dispatch
from hetpass.runtime.distributed.arrivals import Arrivals, Incoming, Key, incoming
from hetpass.runtime.distributed.lanes import Hand, LaneStep, Post, Take, lane_steps
from hetpass.runtime.local import repeated_inputs
from hetpass.runtime.recorder import Observe, Recorder
from hetpass.runtime.transport.message import ONCE, Message, Transport

_REMEMBERED = 4


@dataclass
class Progress:
    """What a process is doing, for whoever watches it.

    Attributes:
      count: of steps of lanes that began; grows as long as anything goes on.
      last: by stage, the names of what it was last asked to do, the newest last.
      busy: number of calls under way.
    """

    count: int = 0
    last: dict[int, deque[str]] = field(default_factory=dict)
    busy: int = 0

    def began(self, stage: int, name: str) -> None:
        self.count += 1
        self.last.setdefault(stage, deque(maxlen=_REMEMBERED)).append(name)


@dataclass(frozen=True)
class Outgoing:
    """A parcel to post: part `box` (None: all) of the `shard`-th local array, to a place."""

    parcel: int
    to: int
    shard: int
    box: Box | None


def outgoing(route: Route, place: int) -> tuple[Outgoing, ...]:
    """What a place posts of a transfer, in order."""
    own = [p for p, where in enumerate(route.source.places) if where == place]
    posts = []
    for parcel in route.parcels:
        if parcel.sender == place:
            held = route.source.boxes[parcel.source]
            box = None if held == parcel.box else relative(parcel.box, held)
            shard = own.index(parcel.source)
            posts.append(Outgoing(parcel.number, parcel.receivers[0], shard, box))
    return tuple(posts)


def post_all(
    transport: Transport, posts: Sequence[Outgoing], array: jax.Array, message: Message
) -> None:
    """Posts a transfer's parcels of an array, which may still be computed.

    Args:
      message: the identity that all parcels share.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    shards = shard_arrays(array)
    for post in posts:
        transport.post(post.to, replace(message, parcel=post.parcel), shards[post.shard], post.box)


class PartRuntime:
    """A compiled part, ready to be called any number of times.

    Args:
      part: of this process. program: its number, the same in all processes.
    """

    def __init__(
        self,
        part: CompiledPart,
        program: int,
        arrivals: Arrivals,
        transport: Transport,
        progress: Progress,
    ) -> None:
        self.part = part
        self._program = program
        self._arrivals = arrivals
        self._transport = transport
        self._progress = progress
        self.dispatch: Dispatch = dispatch(part)
        lane_of = part.schedule.lane_of
        self._lanes = lane_steps(self.dispatch, lane_of, part.stages, part.routes)
        self._lane_of = lane_of
        self._feeds = {
            number: (part.staged.feeds[number], place) for number, place in part.placements.items()
        }
        self._cells = self._first_cells()
        self._outgoing = {n: outgoing(route, part.place) for n, route in part.routes.items()}
        self.incoming = self._all_incoming()
        self._pool = ThreadPoolExecutor(max(1, len(self._lanes)), thread_name_prefix="lane")
        self._copied = repeated_inputs(part.staged.results)
        arrivals.expect(program, self.incoming, part.staged.num_microbatches)

    # -- once ---------------------------------------------------------------------------------

    @property
    def _num_arguments(self) -> int:
        traced = self.part.staged.layered.program.traced
        return len(traced.inputs) - len(traced.constants)

    def _first_cells(self) -> list[Any]:
        constants = self.part.staged.layered.program.traced.constants
        cells: list[Any] = [None] * self.dispatch.num_cells
        for cell, array in self.dispatch.numbers:
            cells[cell] = array
        for feed, place in self._feeds.values():
            if feed.input >= self._num_arguments:
                value = constants[feed.input - self._num_arguments]
                cells[self.dispatch.slots[feed.slot]] = place(value)
        return cells

    def _all_incoming(self) -> dict[int, Incoming]:
        part = self.part
        found = {}
        for number, route in part.routes.items():
            target = part.staged.transfers[number].target
            if target in part.shardings:
                per_microbatch = part.staged.slots[target].scope == "microbatch"
                aval, sharding = part.avals[target], part.shardings[target]
                found[number] = incoming(route, aval, sharding, per_microbatch, part.place)
        return found

    # -- every call ---------------------------------------------------------------------------

    def __call__(
        self,
        call: int,
        inputs: Mapping[int, Any],
        outputs: Sequence[int],
        observe: Observe | None = None,
    ) -> dict[int, jax.Array]:
        """One step.

        Args:
          call: its number, larger than the one before.
          inputs: by flat input; those that this process is fed, and those it only returns.
          outputs: leaves of the step's result that this process has; they are not waited for.
          observe: is told the times of every fragment and local transfer; the call then waits.
        """
        cells = list(self._cells)
        for feed, place in self._feeds.values():
            if feed.input < self._num_arguments:
                cells[self.dispatch.slots[feed.slot]] = place(inputs[feed.input])
        jobs = [self._pool.submit(self._lane, n, cells, call, observe) for n in self._lanes]
        failures = [e for e in (job.exception() for job in jobs) if e is not None]
        self._arrivals.ended(self._program, call)
        if failures:
            raise next((e for e in failures if not _is_consequence(e)), failures[0])
        return {number: self._result(number, cells, inputs) for number in outputs}

    def _lane(self, lane: int, cells: list[Any], call: int, observe: Observe | None) -> None:
        try:
            if observe is None:
                self._steps(self._lanes[lane], cells, call, None)
            else:
                with Recorder(observe, self._lane_of) as recorder:
                    self._steps(self._lanes[lane], cells, call, recorder)
        except Exception as error:
            self._arrivals.stop(_stopped(error))
            raise

    def _steps(
        self, steps: Sequence[LaneStep], cells: list[Any], call: int, recorder: Recorder | None
    ) -> None:
        for step in steps:
            if isinstance(step, Run):
                self._progress.began(step.stage, step.name)
                if recorder is not None:
                    recorder.before()
                results = step.call(*[cells[i] for i in step.arguments])
                for cell, value in zip(step.results, results, strict=True):
                    cells[cell] = value
                if recorder is not None:
                    recorder.after(step, results[-1])
                del results
            elif isinstance(step, Take):
                self._progress.began(step.stage, f"wait for {self._transfer_name(step)}")
                array = self._arrivals.take(self._key(step, call))
                if recorder is not None:
                    array.block_until_ready()  # what reads it starts no earlier
                cells[step.target] = array
                continue
            elif isinstance(step, Post):
                self._post(step, cells[step.source], call)
            elif isinstance(step, Hand):
                if recorder is not None:
                    recorder.before()
                array = step.move.call(cells[step.move.source])
                if recorder is not None:
                    recorder.moved(step.move, array)
                self._arrivals.hand(self._key(step.move, call), array)
            elif isinstance(step, Move):
                if recorder is not None:
                    recorder.before()
                cells[step.target] = step.call(cells[step.source])
                if recorder is not None:
                    recorder.moved(step, cells[step.target])
            elif isinstance(step, Wait):
                cells[step.token].block_until_ready()
            for cell in step.drops:
                cells[cell] = None

    def _key(self, step: Post | Move | Take, call: int) -> Key:
        number = ONCE if step.microbatch is None else step.microbatch
        return (self._program, call, step.transfer, number)

    def _transfer_name(self, step: Take) -> str:
        staged = self.part.staged
        slot = staged.slots[staged.transfers[step.transfer].source]
        number = "" if step.microbatch is None else f", microbatch {step.microbatch}"
        return f"{slot.name!r} of stage {slot.stage}{number}"

    def _post(self, step: Post, array: jax.Array, call: int) -> None:
        message = Message(*self._key(step, call), 0, 0.0, self.part.place)
        post_all(self._transport, self._outgoing[step.transfer], array, message)

    def _result(self, number: int, cells: Sequence[Any], inputs: Mapping[int, Any]) -> jax.Array:
        traced = self.part.staged.layered.program.traced
        result = self.part.staged.results[number]
        if isinstance(result, FromSlot):
            value = cells[self.dispatch.slots[result.slot]]
        else:
            assert isinstance(result, FromInput)
            fed = [
                self.dispatch.slots[feed.slot]
                for feed, place in self._feeds.values()
                if feed.input == result.input and place.cut is None
            ]
            value = cells[fed[0]] if fed else inputs[result.input]
        value = jnp.copy(value) if number in self._copied else value
        return with_weak_type(value, traced.jaxpr.outvars[number].aval.weak_type)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _is_consequence(error: BaseException) -> bool:
    return isinstance(error, ExecutionError) and error.code in ("HP-RUN-PEER", "HP-RUN-STOPPED")


def _stopped(error: Exception) -> ExecutionError:
    return ExecutionError(
        "HP-RUN-STOPPED", "another lane of this process failed", details=(str(error)[:400],)
    )
