"""An array that lives in other processes, as the driver holds it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetpass._jax import ShapedArray
from hetpass.errors import ExecutionError


class RemoteArray:
    """A name for an array of the workers. It is fetched when its numbers are asked for.

    What it can do is what needs no numbers (`shape`, `dtype`), and what fetches them:
    `float(x)`, `numpy.asarray(x)`, `jnp.asarray(x)`, formats; `hp.fetch(tree)` for many.
    As a leaf of the step's arguments it stays where it is.

    Attributes:
      aval: shape, dtype and weak type.
      stage: where it lives. places: the processes that have a part of it.
      number: under which they keep it.
    """

    def __init__(
        self,
        aval: ShapedArray,
        stage: int,
        places: tuple[int, ...],
        number: int,
        fetching: Callable[[RemoteArray], Callable[[], Any]],
        forget: Callable[[tuple[int, ...], int], None],
    ) -> None:
        self.aval = aval
        self.stage = stage
        self.places = places
        self.number = number
        self._fetching = fetching
        self._arriving: Callable[[], Any] | None = None
        self._value: Any = None
        self._deleted = False
        self._finalizer = weakref.finalize(self, forget, places, number)
        self._finalizer.atexit = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def weak_type(self) -> bool:
        return bool(self.aval.weak_type)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(self.aval.size)

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)

    # -- life ---------------------------------------------------------------------------------

    def is_deleted(self) -> bool:
        """Whether it was given away (donated)."""
        return self._deleted

    def delete(self) -> None:
        """Frees it in the workers."""
        self.given_away()
        self._finalizer()

    def given_away(self) -> None:
        """The workers have been told to forget it, or will be when this object goes."""
        self._deleted = True
        self._value = self._arriving = None

    def taken(self) -> None:
        """Somebody else tells the workers to forget it."""
        self.given_away()
        self._finalizer.detach()

    def block_until_ready(self) -> RemoteArray:
        """Waits for it: `jax.block_until_ready` calls this."""
        self.value()
        return self

    # -- numbers ------------------------------------------------------------------------------

    def ask(self) -> None:
        """Has its numbers sent here; `value` then waits for them.

        Raises:
          ExecutionError: HP-RUN-DONATED, it was given away.
        """
        if self._deleted:
            raise ExecutionError(
                "HP-RUN-DONATED",
                f"the array {self!r} was given away (donated) by an earlier call",
                ways_out=(
                    "use the state that the step returned",
                    "pass donate_argnums=() to keep the arrays that are passed in",
                ),
            )
        if self._value is None and self._arriving is None:
            self._arriving = self._fetching(self)

    def value(self) -> Any:
        """The whole array: numpy, or PRNG keys. Fetched once.

        Raises:
          ExecutionError: HP-RUN-DONATED, it was given away.
        """
        self.ask()
        if self._arriving is not None:
            self._value, self._arriving = self._arriving(), None
        return self._value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value(), dtype=dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value())

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __index__(self) -> int:
        return self.value().__index__()  # type: ignore[no-any-return]

    def __format__(self, spec: str) -> str:
        return format(self.value()[()] if self.shape == () else self.value(), spec)

    def item(self) -> Any:
        return self.value().item()

    def tolist(self) -> Any:
        return self.value().tolist()

    def __getitem__(self, index: Any) -> Any:
        return self.value()[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        where = ", ".join(map(str, self.places))
        return f"RemoteArray({self.aval.str_short()}, stage {self.stage}, process {where})"


def fetch(tree: Any) -> Any:
    """The tree with the numbers of arrays that live elsewhere: numpy arrays (PRNG keys stay keys).

    Other leaves stay as they are. All are asked for before the first is waited for.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, RemoteArray):
            leaf.ask()
    return jax.tree.map(lambda leaf: leaf.value() if isinstance(leaf, RemoteArray) else leaf, tree)
