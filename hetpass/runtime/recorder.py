"""When fragments ran, measured beside the run.

Devices run on their own, so the driver does not see when. Per stage a thread waits, for each
fragment in turn, for what was sent to it, then for its token: a fragment starts when it was sent,
its inputs have arrived, and the one before it on its stage has ended.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import jax

from hetpass.runtime.dispatch import Move, Run


@dataclass(frozen=True)
class _Sent:
    name: str
    sent_s: float
    awaited: tuple[jax.Array, ...]
    token: jax.Array


class Recorder:
    """Use as a context; leaving it waits for all fragments. `record(name, stage, start_s, end_s)`
    is called from one thread per stage."""

    def __init__(self, record: Callable[[str, int, float, float], None]) -> None:
        self._record = record
        self._queues: dict[int, queue.SimpleQueue[_Sent | None]] = {}
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

    def moved(self, move: Move, array: jax.Array) -> None:
        """An array is under way to another stage."""
        maker = self._made_by.get(move.source)
        self._arrivals[move.target] = (array,) if maker is None else (maker, array)

    def before(self, run: Run) -> None:
        """The fragment is about to be sent."""
        if run.stage not in self._queues:
            self._queues[run.stage] = queue.SimpleQueue()
            thread = threading.Thread(target=self._watch, args=(run.stage,), daemon=True)
            thread.start()
            self._threads.append(thread)
        self._sent_s = time.perf_counter()

    def after(self, run: Run, token: jax.Array) -> None:
        """The fragment was sent; `token` exists when it has run."""
        self._made_by.update((cell, token) for cell in run.results)
        awaited = [a for cell in run.arguments for a in self._arrivals.pop(cell, ())]
        self._queues[run.stage].put(_Sent(run.name, self._sent_s, tuple(awaited), token))

    def _watch(self, stage: int) -> None:
        end_s = 0.0
        while (item := self._queues[stage].get()) is not None:
            for array in item.awaited:
                # What the fragment took over (donation) is deleted; its maker was waited for.
                with contextlib.suppress(RuntimeError):
                    array.block_until_ready()
            arrived_s = time.perf_counter() if item.awaited else 0.0
            start_s = max(item.sent_s, arrived_s, end_s)
            item.token.block_until_ready()
            end_s = time.perf_counter()
            self._record(item.name, stage, start_s, end_s)
            del item
