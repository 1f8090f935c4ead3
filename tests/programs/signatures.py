"""B12: what steps take and return."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.models import (
    BATCH,
    DIM,
    Batch,
    Params,
    mlp,
    mlp_params,
    normal,
    regression,
    sgd,
)
from tests.programs.program import Run, program


class State(NamedTuple):
    params: Any
    momentum: Any
    extra: None


def _mse(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((mlp(params, x) - y) ** 2).mean()


def _arguments(seed: int) -> tuple[list[Params], Batch]:
    draw = np.random.default_rng(seed)
    return mlp_params(draw, DIM, 12, 8, 4), regression(draw)


@program("B12")
def gradients_only() -> Run:
    return Run(jax.grad(lambda p, b: _mse(p, b["x"], b["y"])), _arguments(150))


@program("B12")
def forward_only() -> Run:
    return Run(lambda p, b: mlp(p, b["x"]), _arguments(151))


@program("B12")
def forward_only_with_a_sum() -> Run:
    return Run(lambda p, b: (_mse(p, b["x"], b["y"]), mlp(p, b["x"])), _arguments(152))


@program("B12")
def identity() -> Run:
    return Run(lambda p, b: (p, b), _arguments(153))


@program("B12")
def nothing_but_the_update() -> Run:
    """The batch is there and is not read."""
    return Run(lambda p, b: jax.tree.map(lambda x: x * 0.9, p), _arguments(154))


@program("B12")
def no_batch_argument() -> Run:
    def step(params: list[Params]) -> Any:
        loss, grads = jax.value_and_grad(lambda p: sum((layer["w"] ** 4).sum() for layer in p))(
            params
        )
        return sgd(params, grads), loss

    return Run(step, (_arguments(155)[0],), options={"batch_argnums": ()})


@program("B12")
def scalars_beside_arrays_in_the_batch() -> Run:
    def step(params: list[Params], batch: Batch) -> Any:
        def loss_fn(params: list[Params]) -> jax.Array:
            return batch["weight"] * _mse(params, batch["x"] * batch["scale"], batch["y"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return sgd(params, grads), {"loss": loss, "grads": grads}

    params, batch = _arguments(156)
    return Run(step, (params, batch | {"weight": jnp.float32(2.0), "scale": 0.5}))


@program("B12")
def keyword_arguments() -> Run:
    def step(params: list[Params], batch: Batch, *, rate: Any = 0.1, shift: Any = None) -> Any:
        loss, grads = jax.value_and_grad(_mse)(params, batch["x"] + shift, batch["y"])
        return sgd(params, grads, rate), {"loss": loss, "grads": grads}

    kwargs = {"rate": jnp.float32(0.05), "shift": normal(np.random.default_rng(1), DIM)}
    return Run(step, _arguments(157), kwargs)


@program("B12")
def none_leaves_and_named_tuples() -> Run:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(_mse)(state.params, *batch[:2])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
        return State(sgd(state.params, momentum), momentum, None), (loss, None, grads)

    params, batch = _arguments(158)
    state = State(params, jax.tree.map(lambda p: 0.1 * p, params), None)
    return Run(step, (state, (batch["x"], batch["y"], None)))


@program("B12")
def batch_entry_popped_inside_the_loss() -> Run:
    def step(params: list[Params], batch: Batch) -> Any:
        def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
            y = batch.pop("y")
            return _mse(params, **batch, y=y)

        loss, grads = jax.value_and_grad(loss_fn)(params, dict(batch))
        return sgd(params, grads), {"loss": loss, "grads": grads}

    return Run(step, _arguments(159))


@program("B12")
def gradient_of_two_arguments() -> Run:
    def step(state: Any, batch: Batch) -> Any:
        def loss_fn(first: list[Params], second: list[Params]) -> jax.Array:
            return _mse(second, jnp.tanh(mlp(first, batch["x"])), batch["y"])

        loss, grads = jax.value_and_grad(loss_fn, argnums=(0, 1))(*state)
        return sgd(state, grads), {"loss": loss, "grads": grads}

    draw = np.random.default_rng(160)
    state = (mlp_params(draw, DIM, 12, 8), mlp_params(draw, 8, 6, 4))
    return Run(step, (state, regression(draw)))


@program("B12")
def gradient_of_the_input() -> Run:
    """Adversarial directions: a gradient with a batch dimension comes back joined."""

    def step(params: list[Params], batch: Batch) -> Any:
        def loss_fn(params: list[Params], x: jax.Array) -> jax.Array:
            return ((mlp(params, x) - batch["y"]) ** 2).sum()

        grads, pushed = jax.grad(loss_fn, argnums=(0, 1))(params, batch["x"])
        return sgd(params, grads, 0.01), {"grads": grads, "pushed": pushed}

    return Run(step, _arguments(161))


@program("B12")
def vjp_and_linear_transpose() -> Run:
    def step(params: list[Params], batch: Batch) -> Any:
        out, pull = jax.vjp(lambda p: mlp(p, batch["x"]), params)
        (grads,) = pull(2 * (out - batch["y"]) / out.size)
        first = params[0]["w"]
        (back,) = jax.linear_transpose(lambda x: x @ first, batch["x"])(
            jnp.tanh(batch["x"] @ first)
        )
        return sgd(params, grads), {"grads": grads, "back": back}

    return Run(step, _arguments(162))


@program("B12")
def batch_in_the_first_argument_and_state_in_the_second() -> Run:
    def step(batch: Batch, params: list[Params]) -> Any:
        loss, grads = jax.value_and_grad(_mse)(params, batch["x"], batch["y"])
        return sgd(params, grads), {"loss": loss, "grads": grads}

    params, batch = _arguments(163)
    return Run(step, (batch, params), options={"batch_argnums": (0,), "donate_argnums": (1,)})


@program("B12")
def two_batch_arguments_and_a_static_one() -> Run:
    def step(params: list[Params], x: jax.Array, y: jax.Array, power: int) -> Any:
        def loss_fn(params: list[Params]) -> jax.Array:
            return (jnp.abs(mlp(params, x) - y) ** power).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return sgd(params, grads), {"loss": loss, "grads": grads}

    params, batch = _arguments(164)
    options = {"batch_argnums": (1, 2), "static_argnums": (3,)}
    return Run(step, (params, batch["x"], batch["y"], 3), options=options)


@program("B12")
def numpy_arrays_and_python_scalars() -> Run:
    def step(state: Params, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(_mse)(state["params"], batch["x"], batch["y"])
        new = {"params": sgd(state["params"], grads, state["rate"]), "rate": state["rate"] * 0.5}
        return new, {"loss": loss, "grads": grads}

    params, batch = _arguments(165)
    as_numpy = jax.tree.map(np.asarray, (params, batch))
    return Run(step, ({"params": as_numpy[0], "rate": 0.1}, as_numpy[1]))


@program("B12")
def batch_of_single_features() -> Run:
    """Rank-one batches, and a parameter as long as the batch."""

    def step(params: Params, batch: Batch) -> Any:
        def loss_fn(params: Params) -> jax.Array:
            hidden = jnp.tanh(batch["x"][:, None] * params["w"] + params["b"])
            return ((hidden @ params["v"] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return sgd(params, grads), {"loss": loss, "grads": grads}

    draw = np.random.default_rng(166)
    params = {"w": normal(draw, BATCH), "b": normal(draw, BATCH), "v": normal(draw, BATCH)}
    return Run(step, (params, {"x": normal(draw, BATCH), "y": normal(draw, BATCH)}))
