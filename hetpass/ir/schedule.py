"""A Schedule: per lane, the order of tasks. Pure data; no JAX.

A *lane* is a submesh that runs one task at a time. With one stage per submesh, lane i runs stage
i; an interleaved schedule puts several stages on one lane. Transfers are not listed: the value
that stage i hands to stage i + 1 is sent as soon as it exists, and the orders of tasks fix the
orders of sends and receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TaskKind = Literal["F", "B", "W"]
"""F: forward; B: backward (input gradients, and weight gradients too unless W tasks exist);
W: weight gradients alone."""


@dataclass(frozen=True, order=True)
class Task:
    """One piece of work of one microbatch on one stage."""

    kind: TaskKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Lane:
    """What one submesh runs, in order.

    Attributes:
      stages: the stages that live on this submesh.
      tasks: every task of these stages, each once, in the order of execution.
    """

    stages: tuple[int, ...]
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Schedule:
    """The order of every task of one step.

    Attributes:
      name: how a plan names it ("gpipe", "1f1b", …).
      num_stages, num_microbatches: S and M.
      lanes: one per submesh.
      in_flight: per stage, the largest number of microbatches whose forward has started and whose
        backward has not ended.
    """

    name: str
    num_stages: int
    num_microbatches: int
    lanes: tuple[Lane, ...]
    in_flight: tuple[int, ...]
