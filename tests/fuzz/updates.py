"""From gradients to new parameters: (state, params, grads, loss) -> (state, params, extra)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.fuzz.builder import Builder, piece

RATE = 0.1


def _minus(params: Any, grads: Any, rate: Any = RATE) -> Any:
    return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads)


def _norm(grads: Any) -> Any:
    return jnp.sqrt(sum((g.astype(jnp.float32) ** 2).sum() for g in jax.tree.leaves(grads)))


@piece("update", "plain")
def sgd(build: Builder) -> Any:
    return lambda s, p, g, loss: (s, _minus(p, g), ())


@piece("update", "plain")
def gradients_only(build: Builder) -> Any:
    return lambda s, p, g, loss: ((), (), ())


@piece("update", "clipping")
def clipped(build: Builder) -> Any:
    how, bound = build.pick("global", "leaf", "value", "adaptive"), build.pick(0.01, 0.3)

    def update(s: Any, p: Any, g: Any, loss: Any) -> Any:
        if how == "global":
            norm = _norm(g)
            g = jax.tree.map(lambda x: x * jnp.minimum(1, bound / norm).astype(x.dtype), g)
            return s, _minus(p, g), norm
        if how == "leaf":
            g = jax.tree.map(lambda x: x / jnp.maximum(1, jnp.linalg.norm(x) / bound), g)
        elif how == "value":
            g = jax.tree.map(lambda x: jnp.clip(x, -bound, bound), g)
        else:
            small = jax.tree.map(lambda p: bound * jnp.maximum(jnp.linalg.norm(p), 1e-3), p)
            g = jax.tree.map(lambda x, m: x * jnp.minimum(1, m / (_norm(x) + 1e-6)), g, small)
        return s, _minus(p, g), ()

    return update


@piece("update", "clipping")
def loss_scale(build: Builder) -> Any:
    build.state["scale"] = np.float32(build.pick(2.0, 1024.0))

    def update(s: Any, p: Any, g: Any, loss: Any) -> Any:
        finite = jnp.isfinite(_norm(g))
        scale = jnp.where(finite, s["scale"] * 2, s["scale"] / 2)
        new = lax.cond(finite, lambda: _minus(p, g), lambda: p)
        return s | {"scale": scale}, new, finite

    return update


@piece("update", "optimizers")
def momentum_or_average(build: Builder) -> Any:
    nesterov, average = build.pick(True, False), build.pick(True, False)
    for name, value in build.params.items():
        build.state[f"m.{name}"] = (0.1 * build.draw.normal(size=value.shape)).astype(np.float32)

    def update(s: Any, p: Any, g: Any, loss: Any) -> Any:
        old = {k: s[f"m.{k}"] for k in p}
        if average:
            new = _minus(p, g)
            kept = {f"m.{k}": 0.9 * old[k] + 0.1 * new[k] for k in p}
            return s | kept, new, ()
        moments = {k: 0.9 * old[k] + g[k] for k in p}
        steps = {k: g[k] + 0.9 * moments[k] for k in p} if nesterov else moments
        return s | {f"m.{k}": v for k, v in moments.items()}, _minus(p, steps), ()

    return update


@piece("update", "optimizers")
def decay_and_schedule(build: Builder) -> Any:
    def update(s: Any, p: Any, g: Any, loss: Any) -> Any:
        rate = RATE / jnp.sqrt(1.0 + s["step"])
        new = jax.tree.map(lambda p, g: (p * (1 - 0.01 * rate) - rate * g).astype(p.dtype), p, g)
        return s | {"step": s["step"] + 1}, new, rate

    return update


@piece("update", "optimizers")
def every_second_step(build: Builder) -> Any:
    for name, value in build.params.items():
        build.state[f"a.{name}"] = (0.1 * build.draw.normal(size=value.shape)).astype(np.float32)

    def update(s: Any, p: Any, g: Any, loss: Any) -> Any:
        total = {k: s[f"a.{k}"] + g[k] for k in p}

        def apply() -> Any:
            return _minus(p, total), jax.tree.map(jnp.zeros_like, total)

        new, kept = lax.cond(s["step"] % 2 == 1, apply, lambda: (p, total))
        return s | {f"a.{k}": v for k, v in kept.items()} | {"step": s["step"] + 1}, new, ()

    return update


@piece("update", "optimizers")
def optax_chain(build: Builder) -> Any:
    choice = build.pick("clip", "multi", "finite", "adam", "masked")
    inner = optax.sgd(RATE, momentum=0.9)
    # A large epsilon: where a gradient is zero mathematically, Adam would show rounding noise.
    transforms = {
        "clip": optax.chain(optax.clip_by_global_norm(0.2), inner),
        "multi": optax.MultiSteps(inner, 2).gradient_transformation(),
        "finite": optax.apply_if_finite(inner, 3),
        "adam": optax.adamw(1e-2, eps=1e-1),
        "masked": optax.masked(inner, lambda tree: {k: k.endswith("0") for k in tree}),
    }
    transform = transforms[choice]

    def update(s: Any, p: Any, g: Any, loss: Any) -> Any:
        first = transform.init(p)
        updates, opt = transform.update(g, first, p)
        updates, opt = transform.update(g, opt, p)  # the second step has momentum
        return s, optax.apply_updates(p, updates), opt

    return update


@piece("update", "optimizers")
def some_are_frozen(build: Builder) -> Any:
    frozen = set(list(build.params)[::2])

    def update(s: Any, p: Any, g: Any, loss: Any) -> Any:
        return s, {k: v if k in frozen else v - RATE * g[k] for k, v in p.items()}, ()

    return update
