"""Plays orders of tasks over lanes and wires: when each task and transfer starts and ends.

Rules:

  * A lane runs its tasks in the given order, one at a time, each as soon as the lane is free and
    the task's inputs have arrived.
  * When a task ends, what it hands to a stage on another lane joins the queues of its wires, and
    starts once it is first in all of them and they are free. A wire carries one transfer at a
    time, first come, first served (at equal times the lower task number). The value arrives when
    the wires are done with it, plus the latency.
  * A transfer over a link that does not overlap with compute occupies both lanes too: it starts
    once its wires are free and neither lane runs a task, and neither lane starts a task while such
    a transfer waits for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetpass.schedules.pipe import Orders, Pipe


@dataclass(frozen=True)
class Played:
    """Times by task number (0 for tasks that were not played), and of the transfers they caused.

    Attributes:
      start_s, end_s: of tasks.
      sent_s, arrived_s: when the transfer of the task's result took its wire, and arrived.
      makespan_s: until all tasks and updates are done.
    """

    start_s: list[float]
    end_s: list[float]
    sent_s: list[float]
    arrived_s: list[float]
    makespan_s: float


def play(pipe: Pipe, orders: Orders) -> Played | None:
    """Times of all tasks and transfers; None if the lanes wait for each other for ever."""
    if all(block.overlaps for block in pipe.blocks):
        return _play_overlapping(pipe, orders)
    return play_blocking(pipe, orders)


def _play_overlapping(pipe: Pipe, orders: Orders) -> Played | None:
    """One event per task: with fixed orders a lane's next task can be timed once it is ready."""
    microbatches = pipe.num_microbatches
    size = len(pipe.blocks) * microbatches
    start_s, end_s, sent_s, arrived_s = ([0.0] * size for _ in range(4))
    ready_s = [-1.0 if b.waits else 0.0 for b in pipe.blocks for _ in range(microbatches)]
    facts = [
        (b.duration_s, (b.to - index) * microbatches if b.to >= 0 else 0, b)
        for index, b in enumerate(pipe.blocks)
    ]
    free_s = [0.0] * len(orders)
    wire_free_s = [0.0] * len(pipe.wires)
    at = [0] * len(orders)
    left = sum(len(order) for order in orders)
    events, push, pop = _events(pipe)
    wake = list(range(len(orders)))
    while True:
        for lane in wake:
            order, position, now_s = orders[lane], at[lane], free_s[lane]
            while position < len(order):
                number = order[position]
                ready = ready_s[number]
                if ready < 0:
                    break
                if ready > now_s:
                    now_s = ready
                start_s[number] = now_s
                now_s += facts[number // microbatches][0]
                end_s[number] = now_s
                push(events, (now_s, number))
                position += 1
            at[lane], free_s[lane] = position, now_s
        if not events:
            break
        now_s, number = pop(events)
        left -= 1
        wake = []
        _, step, block = facts[number // microbatches]
        if step:
            if block.wires:
                for wire in block.wires:
                    if wire_free_s[wire] > now_s:
                        now_s = wire_free_s[wire]
                sent_s[number] = now_s
                now_s += block.occupies_s
                for wire in block.wires:
                    wire_free_s[wire] = now_s
                now_s += block.latency_s
            arrived_s[number] = now_s
            ready_s[number + step] = now_s
            lane = block.to_lane
            if at[lane] < len(orders[lane]) and orders[lane][at[lane]] == number + step:
                wake = [lane]
    if left:
        return None
    makespan_s = max(free + update for free, update in zip(free_s, pipe.updates_s, strict=True))
    return Played(start_s, end_s, sent_s, arrived_s, makespan_s)


_Event = tuple[float, int]


def _events(
    pipe: Pipe,
) -> tuple[Any, Callable[[Any, _Event], None], Callable[[Any], _Event]]:
    """A queue of (time, task number), how to add to it and how to take the next.

    Where transfers of several blocks meet on one wire, the earliest end comes first. Else the
    ends of one lane in their order are enough, since every wire has one sender.
    """
    if pipe.shared:
        return [], heapq.heappush, heapq.heappop
    return deque(), deque.append, deque.popleft


def play_blocking(pipe: Pipe, orders: Orders) -> Played | None:
    """As `play`, for links of both sorts: queues and lanes are looked at after every instant."""
    return _BlockingPlay(pipe, orders).run()


_TASK_ENDED, _WIRE_DONE, _ARRIVED = range(3)


class _BlockingPlay:
    """The state of one run with transfers that hold their lanes."""

    def __init__(self, pipe: Pipe, orders: Orders) -> None:
        size = len(pipe.blocks) * pipe.num_microbatches
        self.pipe, self.orders = pipe, orders
        self.start_s, self.end_s, self.sent_s, self.arrived_s = ([0.0] * size for _ in range(4))
        self.ready = [not b.waits for b in pipe.blocks for _ in range(pipe.num_microbatches)]
        self.idle = [True] * len(orders)
        self.wire_idle = [True] * len(pipe.wires)
        self.queues: list[deque[int]] = [deque() for _ in pipe.wires]
        self.at = [0] * len(orders)
        self.done_s = [0.0] * len(orders)
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> Played | None:
        now_s = 0.0
        self._start(now_s)
        while self.events:
            now_s = self.events[0][0]
            while self.events and self.events[0][0] == now_s:
                _, what, number = heapq.heappop(self.events)
                self._happen(now_s, what, number)
            self._start(now_s)
        if any(at < len(order) for at, order in zip(self.at, self.orders, strict=True)):
            return None
        makespan_s = max(
            done + update for done, update in zip(self.done_s, self.pipe.updates_s, strict=True)
        )
        return Played(self.start_s, self.end_s, self.sent_s, self.arrived_s, makespan_s)

    def _lanes(self, number: int) -> tuple[int, int]:
        index = number // self.pipe.num_microbatches
        block = self.pipe.blocks[index]
        return self.pipe.lane_of[index % self.pipe.num_stages], block.to_lane

    def _receiver(self, number: int) -> int:
        index, microbatch = divmod(number, self.pipe.num_microbatches)
        return self.pipe.blocks[index].to * self.pipe.num_microbatches + microbatch

    def _happen(self, now_s: float, what: int, number: int) -> None:
        block = self.pipe.blocks[number // self.pipe.num_microbatches]
        source, target = self._lanes(number)
        if what == _ARRIVED:
            self.arrived_s[number] = now_s
            self.ready[self._receiver(number)] = True
        elif what == _WIRE_DONE:
            for wire in block.wires:
                self.wire_idle[wire] = True
            if not block.overlaps:
                self.idle[source] = self.idle[target] = True
            heapq.heappush(self.events, (now_s + block.latency_s, _ARRIVED, number))
        else:
            self.idle[source] = True
            self.done_s[source] = now_s
            if block.wires:
                for wire in block.wires:
                    self.queues[wire].append(number)
            elif block.to >= 0:
                self.arrived_s[number] = now_s
                self.ready[self._receiver(number)] = True

    def _start(self, now_s: float) -> None:
        """Transfers first; then tasks on lanes that no waiting transfer claims."""
        claimed: set[int] = set()
        for first in range(len(self.queues)):
            number = self._sendable(first)
            if number is not None:
                lanes = self._lanes(number)
                block = self.pipe.blocks[number // self.pipe.num_microbatches]
                if block.overlaps or all(self.idle[lane] for lane in lanes):
                    self._send(number, now_s)
                else:
                    claimed.update(lanes)
        for lane, order in enumerate(self.orders):
            at = self.at[lane]
            if self.idle[lane] and lane not in claimed and at < len(order):
                number = order[at]
                if self.ready[number]:
                    self.idle[lane] = False
                    self.at[lane] = at + 1
                    block = self.pipe.blocks[number // self.pipe.num_microbatches]
                    self.start_s[number] = now_s
                    self.end_s[number] = now_s + block.duration_s
                    heapq.heappush(self.events, (self.end_s[number], _TASK_ENDED, number))

    def _sendable(self, wire: int) -> int | None:
        """The first transfer in the wire's queue, if it is first on all its wires, all free."""
        if not self.queues[wire]:
            return None
        number = self.queues[wire][0]
        wires = self.pipe.blocks[number // self.pipe.num_microbatches].wires
        free = all(self.wire_idle[w] and self.queues[w][0] == number for w in wires)
        return number if free else None

    def _send(self, number: int, now_s: float) -> None:
        block = self.pipe.blocks[number // self.pipe.num_microbatches]
        if not block.overlaps:
            for lane in self._lanes(number):
                self.idle[lane] = False
        for wire in block.wires:
            self.queues[wire].popleft()
            self.wire_idle[wire] = False
        self.sent_s[number] = now_s
        heapq.heappush(self.events, (now_s + block.occupies_s, _WIRE_DONE, number))
