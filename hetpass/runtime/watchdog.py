"""Who watches the processes of a cluster: told what is heard of them, it says when one is lost.

It starts nothing and reads no clock: a crew tells it what it hears, and when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpass.errors import ExecutionError


@dataclass(frozen=True)
class Limits:
    """How long is too long, in seconds.

    Attributes:
      silent_s: without an answer from a process, which is then taken to hang.
      stuck_s: of a call in which no process begins anything; longer than any one fragment runs.
      poll_s: between two questions.
    """

    silent_s: float = 20.0
    stuck_s: float = 600.0
    poll_s: float = 0.2

    def __post_init__(self) -> None:
        limits = (self.silent_s, self.stuck_s, self.poll_s)
        if not all(isinstance(s, (int, float)) and s > 0 for s in limits):
            raise ExecutionError(
                "HP-RUN-LIMITS",
                "the limits of the watchdog are positive numbers of seconds",
                where="limits",
                details=(f"{self}",),
                ways_out=("hp.Limits(silent_s=20.0, stuck_s=600.0, poll_s=0.2)",),
            )


@dataclass(frozen=True)
class Status:
    """A worker's answer to whoever watches it.

    Attributes:
      place: whose.
      count: grows as long as anything goes on. busy: a call is under way.
      last: by stage, the last things that it began, the newest last.
    """

    place: int
    count: int
    busy: bool
    last: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


class Watch:
    """The book that is kept of all processes.

    Args:
      names: per place, what people call it.
      now_s: the time of the start.
    """

    def __init__(self, names: Sequence[str], limits: Limits, now_s: float) -> None:
        self._names = tuple(names)
        self._limits = limits
        self._heard_s = [now_s] * len(names)
        self._status: list[Status | None] = [None] * len(names)
        self._stages: dict[int, tuple[int, ...]] = {}
        self._moved_s = now_s
        self._looked_s = now_s
        self._dead: dict[int, str] = {}

    def runs(self, place: int, stages: Sequence[int]) -> None:
        """The process has parts of these stages."""
        self._stages[place] = tuple(sorted({*self._stages.get(place, ()), *stages}))

    def heard(self, status: Status, now_s: float) -> None:
        """A process has answered."""
        before = self._status[status.place]
        if before is None or before.count != status.count or not status.busy:
            self._moved_s = now_s
        self._status[status.place] = status
        self._heard_s[status.place] = now_s

    def died(self, place: int, reason: str) -> None:
        """A process is known to have ended."""
        self._dead.setdefault(place, reason)

    def verdict(self, now_s: float) -> ExecutionError | None:
        """What is wrong, if anything.

        Asked again and again: after a pause of our own (a laptop that slept, a driver that was
        stopped) nobody is blamed for silence.
        """
        if now_s - self._looked_s > self._limits.silent_s / 2:
            self._heard_s = [now_s] * len(self._heard_s)
            self._moved_s = now_s
        self._looked_s = now_s
        for place, reason in self._dead.items():
            return self._error(
                "HP-RUN-LOST", f"{self._name(place)} has died", place, reason, _AFTER_DEATH
            )
        for place, heard_s in enumerate(self._heard_s):
            if now_s - heard_s > self._limits.silent_s:
                why = f"no answer for {now_s - heard_s:.1f} s (limit {self._limits.silent_s:g} s)"
                return self._error(
                    "HP-RUN-SILENT", f"{self._name(place)} hangs", place, why, _AFTER_SILENCE
                )
        busy = [s for s in self._status if s is not None and s.busy]
        if busy and now_s - self._moved_s > self._limits.stuck_s:
            why = f"nothing has begun for {now_s - self._moved_s:.1f} s"
            return self._error("HP-RUN-STUCK", "the step does not go on", None, why, _AFTER_STUCK)
        return None

    def last_tasks(self) -> tuple[str, ...]:
        """A line per stage: what it began last."""
        found: dict[int, list[str]] = {}
        for status in self._status:
            for stage, names in sorted((status.last if status else {}).items()):
                if stage >= 0:
                    found.setdefault(stage, []).append(", ".join(names))
        lines = [f"stage {stage} began last: {' | '.join(found[stage])}" for stage in sorted(found)]
        return tuple(lines) or ("no stage had begun anything",)

    def explained(self, error: ExecutionError) -> ExecutionError:
        """The same error, with the last tasks of every stage."""
        return ExecutionError(
            error.code,
            error.what,
            where=error.where,
            details=(*error.details, *self.last_tasks()),
            ways_out=error.ways_out,
        )

    def _name(self, place: int) -> str:
        return f"process {place} ({self._names[place]})"

    def _error(
        self, code: str, what: str, place: int | None, why: str, ways_out: tuple[str, ...]
    ) -> ExecutionError:
        stages = () if place is None else self._stages.get(place, ())
        where = ", ".join(f"stage {stage}" for stage in stages)
        return ExecutionError(
            code, what, where=where, details=(why, *self.last_tasks()), ways_out=ways_out
        )


_AFTER_DEATH = (
    "look for its last words in Ray's logs; a process that is killed without any has often run "
    "out of memory",
    "start again from a checkpoint: its part of the state is gone",
)
_AFTER_SILENCE = (
    "raise the limit if it was only slow: hp.Workers(limits=hp.Limits(silent_s=...))",
    "start again from a checkpoint: its part of the state is gone",
)
_AFTER_STUCK = (
    "raise the limit if a single fragment takes as long: hp.Workers(limits=hp.Limits(stuck_s=...))",
)
