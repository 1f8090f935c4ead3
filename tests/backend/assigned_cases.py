"""Small steps for assignments, and plans that run them by assignments drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hetpass as hp
from hetpass.analysis.operation_graph import operation_graphs
from hetpass.frontend.microbatch import split
from hetpass.frontend.segment import segment
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.operation_graph import Assignment, Mesh
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.ir.program import Layered
from tests.backend.random_assignments import random_assignment

B, S, H = 16, 4, 16

MESHES: tuple[Mesh, ...] = (
    (("data", 8),),
    (("data", 2), ("model", 4)),
    (("data", 4), ("model", 2)),
    (("x", 2), ("y", 2), ("z", 2)),
)

Step = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Case:
    """A step with its arguments."""

    step: Step
    state: Any
    batch: Any


def draw(seed: int, *shape: int) -> jax.Array:
    return 0.3 * jax.random.normal(jax.random.key(seed), shape)


def trained(loss: Callable[[Any, Any], Any], state: Any, batch: Any) -> Case:
    """Plain gradient descent; the gradients are results too, to be compared."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value, grads

    return Case(step, state, batch)


def blocks() -> Case:
    """Two residual layers: products, a bias, a softmax, splits and merges of dimensions."""

    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for w1, b1, w2 in params:
            y = jnp.tanh(h @ w1 + b1)
            y = y.reshape(*y.shape[:2], 4, -1).swapaxes(1, 2).reshape(*h.shape[:2], -1)
            h = h + jax.nn.softmax(y @ w2, axis=-1)
        return ((h - batch["y"]) ** 2).mean()

    params = [(draw(i, H, 2 * H), draw(9 + i, 2 * H), draw(5 + i, 2 * H, H)) for i in range(2)]
    return trained(loss, params, {"x": draw(3, B, S, H), "y": jnp.ones((B, S, H))})


def scanned() -> Case:
    """A scan over layers."""

    def loss(ws: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, ws)[0] ** 2).mean()

    return trained(loss, draw(0, 4, H, H), draw(1, B, S, H))


def recurrent() -> Case:
    """A scan over time inside a layer."""

    def loss(params: Any, x: Any) -> Any:
        w, u = params

        def cell(h: Any, row: Any) -> Any:
            h = jnp.tanh(h @ w + row @ u)
            return h, h

        start = jnp.zeros((x.shape[0], H))
        return (jax.lax.scan(cell, start, x.swapaxes(0, 1))[1] ** 2).mean()

    return trained(loss, (draw(0, H, H), draw(1, H, H)), draw(2, B, S, H))


def branching() -> Case:
    """A branch and an open loop, forward only in part."""

    def loss(w: Any, x: Any) -> Any:
        h = jax.lax.cond(w.sum() > 0, lambda h: jnp.sin(h @ w), lambda h: h @ w, x)
        scale = jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, jax.lax.stop_gradient(w))
        )[1]
        return ((h @ scale) ** 2).mean()

    return trained(loss, draw(0, H, H), draw(1, B, S, H))


def convolution() -> Case:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            y = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = x + jax.nn.relu(y)
        return (x**2).mean()

    return trained(loss, [draw(i, 3, 3, 8, 8) for i in range(2)], draw(5, B, 4, 4, 8))


def lookup() -> Case:
    """A tied embedding: a lookup, a product with the table, and their two gradients."""

    def loss(table: Any, batch: Any) -> Any:
        h = jnp.tanh(table[batch["tokens"]])
        logits = h @ table.T
        picked = jnp.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    tokens = jnp.arange(B * S).reshape(B, S) * 7 % 32
    return trained(loss, draw(0, 32, H), {"tokens": tokens, "labels": (tokens * 3) % 32})


CASES = {f.__name__: f for f in (blocks, scanned, recurrent, branching, convolution, lookup)}


def layered(case: Case, num_microbatches: int) -> Layered:
    signature = Signature(batch_argnums=(1,))
    names = ("state", "batch")
    traced = trace(case.step, (case.state, case.batch), {}, signature, arg_names=names)
    return segment(split(traced, num_microbatches))


def drawn(
    source: Layered, meshes: Sequence[Mesh], rng: random.Random
) -> list[tuple[Assignment, ...]]:
    """Per mesh, one assignment per layer kind."""
    graphs = operation_graphs(source)
    return [tuple(random_assignment(g, mesh, rng) for g in graphs) for mesh in meshes]


def assigned_plan(
    source: Layered, stages: Sequence[tuple[str, Mesh, tuple[Assignment, ...] | None]], **more: Any
) -> Plan:
    """Layers shared evenly among stages.

    Args:
      stages: (group, mesh, one assignment per layer kind; None: by the default rule).
      more: of every StagePlan (`recompute`), and the plan's `schedule`.
    """
    schedule = more.pop("schedule", "1f1b")
    count, layers = len(stages), source.num_layers
    edges = [round(k * layers / count) for k in range(count + 1)]
    made = []
    for (group, mesh, own), first, end in zip(stages, edges, edges[1:], strict=False):
        devices = tuple(range(int(np.prod([size for _, size in mesh]))))
        kinds = source.layer_kinds[first:end]
        assignments = () if own is None else tuple(own[kind] for kind in kinds)
        replica = Replica(group, devices, mesh)
        made.append(StagePlan(first, end - 1, (replica,), assignments=assignments, **more))
    pipeline = Pipeline(tuple(made), source.program.num_microbatches)
    return Plan((pipeline,), schedule=schedule)


def outcome(case: Case, plan: Plan, groups: dict[str, int]) -> Any:
    """What the step returns by the plan."""
    step = hp.het_parallelize(
        case.step,
        cluster=hp.Cluster.emulated(groups),
        num_microbatches=plan.pipelines[0].num_microbatches,
        donate_argnums=(),
        plan=plan,
    )
    return step(case.state, case.batch)
