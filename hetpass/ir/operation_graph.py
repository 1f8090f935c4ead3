"""OperationGraph: one layer kind as the intra-op planner sees it, and what it answers. No JAX.

A graph has the equations of one layer for one microbatch, forward and backward, as operations over
values. Each operation carries a sharding rule: which dimensions of its operands and results go
together (its *factors*). An `Assignment` says for every factor along which mesh axes it is cut, and
so for every operand what it must look like and for every result how it comes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hetpass.ir.frozen import Frozen

Factors = tuple[tuple[tuple[int, ...], ...], ...]
"""Per value, per dimension: the factors that it is made of, major to minor."""

Mesh = tuple[tuple[str, int], ...]
"""(axis name, size) pairs, as a plan's replica has them."""

Phase = Literal["forward", "backward"]

Role = Literal["inner", "activation", "cotangent", "parameter", "example", "whole"]
"""Where a value comes from: an operation of the graph; the layer before (activation) or after
(cotangent); the state, the same in every microbatch (parameter: takes part in training, whole: all
else, such as keys and constants); the batch (example)."""


@dataclass(frozen=True)
class ShardingRule:
    """The rule of one operation, factors numbered from 0.

    Attributes:
      sizes: of the factors.
      operands, results: which factors make up their dimensions.
      reduction: factors that are summed (or maxed, …) away: sharded, they leave partial results.
      whole: factors that cannot be sharded without other devices' data.
      permutation: factors along which elements move (a shift, a window).
    """

    sizes: tuple[int, ...]
    operands: Factors
    results: Factors
    reduction: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    permutation: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Value:
    """An array of one microbatch, whole.

    Attributes:
      shape: in elements.
      item_bytes: of one element.
      role: where it comes from.
      name: for people, and for a parameter the name of its slot.
    """

    shape: tuple[int, ...]
    item_bytes: float
    role: Role = "inner"
    name: str = ""

    @property
    def size_bytes(self) -> float:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Operation:
    """An equation.

    Attributes:
      name: of the primitive.
      phase: the task that runs it.
      operands, results: numbers of values; literals and scalars constants are left out.
      rule: None: nothing is known, so its operands and results stay whole.
      flops: of the whole operation, once.
      dtype: that it computes in (`hetpass.ir.devices.DTYPES`).
      traffic_bytes: to and from memory that remain after fusion, of the whole operation, once.
      count: how often it runs per microbatch (iterations of the loops around it).
      linear: whether it is linear in all its operands together (a sum, a transpose, an up-cast), so
        that operands that are all partial along an axis give results that are.
      sums: whether the reduction of its rule is a sum (a product of matrices, a sum), so that its
        results may be left partial; else (a maximum) they are reduced at once.
      remade: whether every phase that reads its results makes them again for itself, rather than
        have them held in between (a broadcast, a transpose).
      path: finds the equation again; made and read by the passes on programs only.
    """

    name: str
    phase: Phase
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: ShardingRule | None
    flops: float = 0.0
    dtype: str = "float32"
    traffic_bytes: float = 0.0
    count: int = 1
    linear: bool = False
    sums: bool = False
    remade: bool = False
    path: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """A trained value: at rest (master copy, optimizer state), in use, and its gradient.

    Attributes:
      value: as the layer reads it.
      gradient: the value that is summed over microbatches; None if there is none here.
      state_bytes: master copy and optimizer state, whole; cut as the parameter at rest is.
      accumulator_bytes: of the gradient's accumulator, whole.
      elsewhere: its state is that of an earlier layer that reads it too (a tied embedding), and
        rests as that layer has it.
      gradient_dims: per dimension of the gradient, the dimension of the value that it is (the
        update transposes it); None: one that is no single dimension of the value. () with a
        gradient: the same dimensions.
    """

    value: int
    gradient: int | None
    state_bytes: float
    accumulator_bytes: float
    gradient_dims: tuple[int | None, ...] = ()
    elsewhere: bool = False

    def of_gradient(self, layout: Layout) -> Layout:
        """A layout of the value, in the dimensions of its gradient."""
        if not self.gradient_dims:
            return layout
        dims = tuple(() if k is None else layout.dims[k] for k in self.gradient_dims)
        return Layout(dims, layout.partial)


@dataclass(frozen=True)
class OperationGraph:
    """One layer kind.

    Attributes:
      values, operations: operations in an order in which they can run, forward first.
      parameters: the trained ones.
      activations_out, cotangents_out: values that the next layer (the one before) reads.
      accumulated: values that are summed over microbatches, parameters' gradients and others.
      ties: pairs of values that must be cut alike: what a loop carries, in and out.
      unknown: primitives without a rule, by name, for people.
    """

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    parameters: tuple[Parameter, ...]
    activations_out: tuple[int, ...] = ()
    cotangents_out: tuple[int, ...] = ()
    accumulated: tuple[int, ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How a value lies on a mesh.

    Attributes:
      dims: per dimension the mesh axes that cut it, major to minor.
      partial: the axes along which every device has a summand.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OperationChoice:
    """How one operation runs.

    Attributes:
      factors: per factor of its rule, the mesh axes that cut it. What its operands look like
        follows: a dimension is cut by the axes of its factors, major to minor.
      results: as the results are pinned, after reductions: all-reduced, scattered onto a dimension,
        or left partial on the way to an accumulator.
      partial: the axes along which every operand comes as summands; linear operations only.
    """

    factors: tuple[tuple[str, ...], ...]
    results: tuple[Layout, ...]
    partial: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Assignment:
    """An answer for one layer kind on one logical mesh.

    Attributes:
      mesh: its axes.
      operations: one choice per operation of the graph.
      stored: values with several readers, inputs, residuals and boundary values -> how they are
        kept; a value that is absent is kept as its operation leaves it.
      at_rest: parameter (number in `OperationGraph.parameters`) -> how master copy and state lie.
      accumulators: accumulated value -> how it is kept over microbatches; partial axes are a
        leading dimension, reduced once per step.
      gathered_once: parameters that are gathered from `at_rest` once per step; others per
        microbatch, in each phase that reads them.
      recompute: forward runs again before backward, and residuals are not held.
      links: per axis (latency in seconds, bytes per second), by which reshards are routed; () for
        axes that are all alike.
      reduce_scatter: reductions may end scattered, in one step.
    """

    mesh: Mesh
    operations: tuple[OperationChoice, ...]
    stored: Mapping[int, Layout] = field(default_factory=dict, hash=False)
    at_rest: Mapping[int, Layout] = field(default_factory=dict, hash=False)
    accumulators: Mapping[int, Layout] = field(default_factory=dict, hash=False)
    gathered_once: frozenset[int] = frozenset()
    recompute: bool = False
    links: tuple[tuple[float, float], ...] = ()
    reduce_scatter: bool = True

    def __post_init__(self) -> None:
        for name in ("stored", "at_rest", "accumulators"):
            ordered = dict(sorted(getattr(self, name).items()))
            object.__setattr__(self, name, Frozen(ordered))
