"""What every transport carries, and the two ends that it joins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hetpass.backend.pieces import Box

ONCE = -1
"""The microbatch number of what is sent once per step."""


@dataclass(frozen=True)
class Message:
    """The identity of one parcel; checked where it arrives.

    Attributes:
      program: the number of the compiled step; call: of the call of it.
      transfer: its position among the program's; microbatch: or ONCE.
      parcel: its number within the transfer's route.
      sent_s: when its data existed, by the first sender's clock; place: that sender.
      via: the place that passed it on last.
    """

    program: int
    call: int
    transfer: int
    microbatch: int
    parcel: int
    sent_s: float = 0.0
    place: int = 0
    via: int = 0

    def __str__(self) -> str:
        when = "" if self.microbatch == ONCE else f", microbatch {self.microbatch}"
        return (
            f"program {self.program}, call {self.call}, transfer {self.transfer}{when}, "
            f"parcel {self.parcel}"
        )


class Receiver(Protocol):
    """What a transport delivers to. Called from the transport's threads."""

    def form(self, message: Message) -> tuple[tuple[int, ...], np.dtype]:
        """The shape and dtype of the parcel.

        Raises:
          ExecutionError: HP-RUN-TRANSFER, nobody waits for such a parcel.
        """
        ...

    def deliver(self, message: Message, value: Any) -> None:
        """The parcel has arrived: a numpy array that nobody else writes to, or a `jax.Array`."""
        ...

    def fail(self, place: int, reason: str) -> None:
        """The connection with a place is lost."""
        ...


class Transport(Protocol):
    """Carries parcels to other processes.

    `address` is what others connect to. Everything ends with `close`.
    """

    @property
    def address(self) -> str: ...

    def connect(self, peers: Mapping[int, str]) -> None:
        """Opens the way to every place, given their addresses.

        Raises:
          ExecutionError: HP-RUN-PEER, a place cannot be reached or does not know the token.
        """
        ...

    def post(self, to: int, message: Message, value: Any, box: Box | None) -> None:
        """Sends a part of a single-device array (which may still be computed), and returns at once.

        Args:
          box: the part, in elements of `value`; None for all of it.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Slowness:
    """What is added to a link, for experiments on one machine.

    Attributes:
      latency_s: that every message waits, however many are under way.
      bytes_per_s: that leave at most; None: as fast as they go.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
