"""What the pieces of a random step are made with: sizes, parameters, batch arrays, chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Slot = str
"""Where a piece goes: "block", "loss", "metric" or "update"."""

Piece = Callable[["Builder"], Any]

PIECES: dict[Slot, dict[str, list[Piece]]] = {}


def piece(slot: Slot, kind: str) -> Callable[[Piece], Piece]:
    """Registers a piece: called with the Builder, it returns the function that the step calls."""

    def register(make: Piece) -> Piece:
        PIECES.setdefault(slot, {}).setdefault(kind, []).append(make)
        return make

    return register


@dataclass
class Builder:
    """Makes one step; everything follows from the generator of random numbers.

    Sizes collide on purpose (T or D or the number of classes equal to B): a rule that goes by
    shape alone would take them for the batch.

    Attributes:
      draw: the source of all choices.
      rows: examples of the batch.
      length, width, classes: of sequences, hidden values and logits.
      sequential: hidden values are [B, T, D], not [B, D].
      params, batch, state: arrays by name, in float32.
      axes: dimension of the examples, where it is not 0, by name of a batch array.
    """

    draw: np.random.Generator
    rows: int
    length: int
    width: int
    classes: int
    sequential: bool
    params: dict[str, np.ndarray] = field(default_factory=dict)
    batch: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    axes: dict[str, int | None] = field(default_factory=dict)
    uses_key: bool = False

    @property
    def hidden(self) -> tuple[int, ...]:
        """The shape of a hidden value."""
        middle = (self.length,) if self.sequential else ()
        return (self.rows, *middle, self.width)

    def pick(self, *options: Any) -> Any:
        return options[int(self.draw.integers(len(options)))]

    def param(self, *shape: int, scale: float | None = None) -> str:
        """A new parameter; its name."""
        name = f"w{len(self.params)}"
        size = scale if scale is not None else 1 / np.sqrt(max(1, shape[0] if shape else 1))
        self.params[name] = (self.draw.normal(size=shape) * size).astype(np.float32)
        return name

    def data(self, *shape: int, low: float | None = None, high: float = 1.0) -> str:
        """A new float array of the batch: normal, or uniform from `low`."""
        name = f"x{len(self.batch)}"
        values = (
            self.draw.normal(size=shape) if low is None else self.draw.uniform(low, high, shape)
        )
        self.batch[name] = values.astype(np.float32)
        return name

    def integers(self, bound: int, *shape: int) -> str:
        name = f"i{len(self.batch)}"
        self.batch[name] = self.draw.integers(0, bound, shape).astype(np.int32)
        return name

    def mask(self, *shape: int) -> str:
        """Zeros and ones, a few whole examples masked; at least one entry is one."""
        name = f"m{len(self.batch)}"
        values = (self.draw.uniform(size=shape) < self.draw.uniform(0.3, 0.9)).astype(np.float32)
        values[: int(self.draw.integers(0, shape[0] // 2))] = 0
        values.flat[-1] = 1
        self.batch[name] = values
        return name

    def key(self) -> Callable[[Any], Any]:
        """A function from the state's key to a key of its own."""
        self.uses_key = True
        number = int(self.draw.integers(1 << 20))
        return lambda b: jax.random.fold_in(b["key"], number)


def dense(build: Builder, out: int | None = None) -> Callable[[Any, Any], Any]:
    """An affine map of the last dimension."""
    width = build.width if out is None else out
    weight, bias = build.param(build.width, width), build.param(width, scale=0.1)
    return lambda q, h: h @ q[weight] + q[bias]


def softplus(x: Any) -> Any:
    return jnp.logaddexp(x, 0.0)
