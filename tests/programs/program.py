"""A Program: one step of the zoo, what is expected of it, and the naive answer it must expose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Expect = Literal["equal", "refused", "either"]


@dataclass(frozen=True)
class Run:
    """A step with fresh arguments.

    Attributes:
      step, args, kwargs: `step(*args, **kwargs)` is the call.
      options: further arguments of `het_parallelize`.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch_argnums(self) -> tuple[int, ...]:
        return tuple(self.options.get("batch_argnums", (1,)))

    def batch_size(self) -> int | None:
        sizes = {
            leaf.shape[0]
            for i in self.batch_argnums
            if i < len(self.args)
            for leaf in jax.tree.leaves(self.args[i])
            if np.ndim(leaf)
        }
        return max(sizes, default=None)

    def jitted(self) -> Callable[..., Any]:
        return jax.jit(self.step, static_argnums=self.options.get("static_argnums", ()))


Answer = Callable[[Run, int], Any]
"""A result of a run in M microbatches: a wrong one to expose, or a reference to equal."""


@dataclass(frozen=True)
class Program:
    """One program of the zoo.

    Attributes:
      name, line: for reports; the line of behaviours it belongs to ("A2").
      make: builds the Run with fresh, equal arguments each time.
      expect: "equal" to the reference; "refused" for M > 1; "either" where a refusal will do.
      refusal: how the code of a refusal starts.
      precision: the coarsest type computed in.
      tolerance: relative, where that of `precision` is too wide to tell right from wrong.
      zeros: patterns of output leaves that are zero mathematically.
      naive: a wrong answer that a careless pipeline gives, at M microbatches.
      shouts: at M = 4 some leaf of the naive answer is at least this far off, relatively.
      reference: what to equal, if not `jax.jit(step)`: a per-microbatch meaning.
      x64: runs with 64-bit types.
    """

    name: str
    line: str
    make: Callable[[], Run]
    expect: Expect = "equal"
    refusal: str = "HP-SPLIT"
    precision: str = "float32"
    tolerance: float | None = None
    zeros: tuple[str, ...] = ()
    naive: Answer | None = None
    shouts: float = 0.0
    reference: Answer | None = None
    x64: bool = False

    def __str__(self) -> str:
        return f"{self.line}-{self.name}"


def program(line: str, **marks: Any) -> Callable[[Callable[[], Run]], Program]:
    """Decorates a function that makes a Run; its name is the program's."""

    def mark(make: Callable[[], Run]) -> Program:
        return Program(make.__name__, line, make, **marks)

    return mark


def programs_of(modules: Iterable[ModuleType]) -> tuple[Program, ...]:
    """Every Program, and every tuple of Programs, at the top level of the modules."""
    found: list[Program] = []
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Program):
                found.append(value)
            elif isinstance(value, tuple):
                found += [v for v in value if isinstance(v, Program)]
    names = [str(p) for p in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two programs of one name: {sorted(names)}")
    return tuple(found)


# ---------------------------------------------------------------------------------------------
# Answers per microbatch


def slices(run: Run, m: int) -> list[Any]:
    """Results of the step on each of m equal slices of the batch, from the same state."""
    size = run.batch_size() or 1
    rows = size // m
    step = run.jitted()

    def cut(i: int, start: int) -> Any:
        if i not in run.batch_argnums:
            return run.args[i]
        take = lambda x: x[start : start + rows] if np.ndim(x) and x.shape[0] == size else x  # noqa: E731
        return jax.tree.map(take, run.args[i])

    return [step(*(cut(i, k * rows) for i in range(len(run.args))), **run.kwargs) for k in range(m)]


def _combined(run: Run, m: int, combine: Callable[[Any], Any]) -> Any:
    whole = run.jitted()(*run.args, **run.kwargs)

    def leaf(expected: Any, *parts: Any) -> Any:
        if parts[0].shape != expected.shape:
            return jnp.concatenate(parts)
        if not jnp.issubdtype(expected.dtype, jnp.inexact):
            return parts[-1]
        return combine(jnp.stack(parts)).astype(expected.dtype)

    return jax.tree.map(leaf, whole, *slices(run, m))


def mean_of_slices(run: Run, m: int) -> Any:
    """The mean over microbatches of whatever the step returns; batched leaves are joined."""
    return _combined(run, m, lambda parts: parts.mean(0))


def sum_of_slices(run: Run, m: int) -> Any:
    """The sum over microbatches of whatever the step returns."""
    return _combined(run, m, lambda parts: parts.sum(0))


def instead(step: Callable[..., Any]) -> Answer:
    """The answer of another step on the same arguments."""

    def answer(run: Run, m: int) -> Any:
        return jax.jit(step)(*run.args, **run.kwargs)

    return answer
