"""When fragments and transfers ran, measured beside the run.

Devices run on their own, so the driver does not see when. Per lane a thread waits, for each
fragment in turn, for what was sent to it, then for its token: a fragment starts when it was sent,
its inputs have arrived, and the one before it on its lane has ended. Per link a thread waits for
what is sent to exist, then for it to arrive.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import jax

from hetpass.runtime.dispatch import Move, Run

Observe = Callable[[Run | Move, float, float], None]
"""Called as observe(instruction, start_s, end_s), from one thread per lane and link."""


@dataclass(frozen=True)
class _Sent:
    """An instruction under way: it starts after `awaited`, and has ended when `token` is there."""

    instruction: Run | Move
    sent_s: float
    awaited: tuple[jax.Array, ...]
    token: jax.Array


class Recorder:
    """Use as a context; leaving it waits for everything that was sent.

    Args:
      observe: is told of every fragment and transfer.
      lane_of: per stage, its lane: what runs on one lane does not overlap.
    """

    def __init__(self, observe: Observe, lane_of: Sequence[int]) -> None:
        self._observe = observe
        self._lane_of = lane_of
        self._queues: dict[object, queue.SimpleQueue[_Sent | None]] = {}
        self._threads: list[threading.Thread] = []
        self._made_by: dict[int, jax.Array] = {}
        self._arrivals: dict[int, tuple[jax.Array, ...]] = {}
        self._sent_s = 0.0

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def before(self) -> None:
        """Something is about to be sent."""
        self._sent_s = time.perf_counter()

    def moved(self, move: Move, array: jax.Array) -> None:
        """An array is under way to another stage."""
        maker = self._made_by.get(move.source)
        makers = () if maker is None else (maker,)
        self._arrivals[move.target] = (*makers, array)
        self._watched(move.stages).put(_Sent(move, self._sent_s, makers, array))

    def after(self, run: Run, token: jax.Array) -> None:
        """The fragment was sent; `token` exists when it has run."""
        self._made_by.update((cell, token) for cell in run.results)
        awaited = [a for cell in run.arguments for a in self._arrivals.pop(cell, ())]
        lane = self._watched(self._lane_of[run.stage])
        lane.put(_Sent(run, self._sent_s, tuple(awaited), token))

    def _watched(self, track: object) -> queue.SimpleQueue[_Sent | None]:
        if track not in self._queues:
            self._queues[track] = queue.SimpleQueue()
            thread = threading.Thread(target=self._watch, args=(track,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self._queues[track]

    def _watch(self, track: object) -> None:
        end_s = 0.0
        while (item := self._queues[track].get()) is not None:
            for array in item.awaited:
                _wait(array)
            arrived_s = time.perf_counter() if item.awaited else 0.0
            start_s = max(item.sent_s, arrived_s, end_s)
            _wait(item.token)
            end_s = time.perf_counter()
            self._observe(item.instruction, min(start_s, end_s), end_s)
            del item


def _wait(array: jax.Array) -> None:
    # What a fragment took over (donation) is deleted; its maker was waited for.
    with contextlib.suppress(RuntimeError):
        array.block_until_ready()
