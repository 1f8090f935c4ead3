"""B10: the same step in flax linen, flax nnx, equinox; scans over layers; checkpoint policies."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.models import gpt_linen, gpt_nnx
from benchmarks.models.sizes import GPTConfig
from tests.programs.models import (
    BATCH,
    DIM,
    SEQ,
    VOCAB,
    Batch,
    Params,
    block,
    block_params,
    cross_entropy,
    embed,
    mlp_params,
    normal,
    regression,
    sgd_step,
    tokens,
    transformer_params,
    weight,
)
from tests.programs.program import Program, Run, program

SMALL = GPTConfig(hidden=DIM, layers=3, heads=2, vocab=VOCAB, seq=SEQ)


def _gpt(library: str, **shape: Any) -> Program:
    config = dataclasses.replace(SMALL, **shape)

    @functools.cache  # one module, so that the structures of all states are equal
    def step_and_create() -> tuple[Any, Any]:
        optimizer = optax.sgd(0.1)
        if library == "linen":
            return gpt_linen.train_step, gpt_linen.make_create_state(config, optimizer)
        step = gpt_nnx.make_train_step(config, optimizer)
        return step, gpt_nnx.make_create_state(config, optimizer)

    def make() -> Run:
        batch = tokens(np.random.default_rng(120))
        del batch["mask"]
        step, create = step_and_create()
        return Run(step, (create(jax.random.key(0)), batch))

    name = "_".join([library, "gpt", *(f"{k}_{v}" for k, v in shape.items())])
    # The bias of the keys moves all scores of a query alike: its gradient is zero, and is part of
    # a larger leaf, so that no leaf needs a floor.
    if shape.get("dtype") == "bfloat16":
        # jax.jit's own gradient is about 3e-2 from the float32 one after three blocks.
        return Program(name, "B10", make, precision="bfloat16", tolerance=4e-2)
    return Program(name, "B10", make)


transformers: tuple[Program, ...] = (
    _gpt("linen"),
    _gpt("linen", dropout=0.1),
    _gpt("linen", dropout=0.1, remat=True),
    _gpt("linen", scan=True),
    _gpt("linen", scan=True, remat=True, dropout=0.1),
    _gpt("linen", tied=False, dtype="bfloat16"),
    _gpt("nnx"),
    _gpt("nnx", dropout=0.1),
    _gpt("nnx", dropout=0.1, remat=True),
    _gpt("nnx", scan=True),
    _gpt("nnx", scan=True, remat=True, dropout=0.1),
    _gpt("nnx", tied=False, dtype="bfloat16"),
)


@program("B10")
def linen_convolutions_with_group_norm() -> Run:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.Conv(8, (3, 3))(x))
            x = x + nn.Conv(8, (3, 3))(nn.relu(nn.GroupNorm(2)(x)))
            x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.Conv(12, (3, 3), strides=(2, 2))(x)
            x = nn.avg_pool(nn.relu(x), (2, 2))
            return nn.Dense(5)(x.reshape(x.shape[0], -1))

    net = Net()

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        return cross_entropy(net.apply(params, batch["x"]), batch["y"]).mean()

    draw = np.random.default_rng(121)
    batch = {"x": normal(draw, BATCH, 8, 8, 3), "y": jnp.asarray(draw.integers(0, 5, BATCH))}
    params = net.init(jax.random.key(1), batch["x"])
    return Run(sgd_step(loss_fn), (params, batch))


@program("B10")
def linen_recurrent_network() -> Run:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x = nn.Embed(VOCAB, DIM)(ids)
            x = nn.RNN(nn.LSTMCell(12))(x)
            return nn.Dense(VOCAB)(nn.RNN(nn.GRUCell(12))(x))

    net = Net()

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        return cross_entropy(net.apply(params, batch["tokens"]), batch["labels"]).mean()

    batch = tokens(np.random.default_rng(122))
    return Run(sgd_step(loss_fn), (net.init(jax.random.key(2), batch["tokens"]), batch))


@program("B10")
def linen_own_attention_with_mutable_cache_of_statistics() -> Run:
    """`mutable=` collections that are sums over the batch come back beside the gradient."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=DIM)(x)
            self.sow("intermediates", "mean", x.mean())
            return nn.Dense(VOCAB)(nn.LayerNorm()(x))

    net = Net()

    def step(params: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Any:
            x = jax.nn.one_hot(batch["tokens"], DIM)
            logits, seen = net.apply(params, x, mutable=["intermediates"])
            return cross_entropy(logits, batch["labels"]).mean(), seen

        (loss, seen), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        # the gradient of the keys' bias is zero
        del grads["params"]["MultiHeadDotProductAttention_0"]["key"]["bias"]
        return new, {"loss": loss, "seen": seen, "grads": grads}

    batch = tokens(np.random.default_rng(123))
    params = net.init(jax.random.key(3), jnp.ones((2, SEQ, DIM)))
    params = {"params": params["params"]}
    params["params"]["MultiHeadDotProductAttention_0"]["key"]["bias"] += 0.5
    return Run(step, (params, batch))


@program("B10")
def nnx_functional_gradient() -> Run:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(DIM, 24, rngs=rngs)
            self.norm = nnx.RMSNorm(24, rngs=rngs)
            self.last = nnx.Linear(24, 4, rngs=rngs)
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.calls[...] = self.calls[...] + 1
            return self.last(jax.nn.silu(self.norm(self.first(x))))

    graph, params, rest = nnx.split(Net(nnx.Rngs(4)), nnx.Param, ...)

    def step(state: Any, batch: Batch) -> Any:
        params, rest = state

        def loss_fn(params: Any) -> Any:
            net = nnx.merge(graph, params, rest, copy=True)
            loss = ((net(batch["x"]) - batch["y"]) ** 2).mean()
            return loss, nnx.state(net, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (params, rest), {"loss": loss, "grads": grads}

    return Run(step, ((params, rest), regression(np.random.default_rng(124))))


class Net(eqx.Module):
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm
    activation: Any = eqx.field(static=True)

    def __init__(self, key: jax.Array) -> None:
        sizes = (DIM, 24, 12, 4)
        keys = jax.random.split(key, len(sizes) - 1)
        pairs = itertools.pairwise(sizes)
        self.layers = [eqx.nn.Linear(a, b, key=k) for (a, b), k in zip(pairs, keys, strict=True)]
        self.norm = eqx.nn.LayerNorm(12)
        self.activation = jax.nn.gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.activation(self.layers[0](x))
        return self.layers[2](self.norm(self.activation(self.layers[1](x))))


@program("B10")
def equinox_module() -> Run:
    def loss_fn(net: Net, batch: Batch) -> jax.Array:
        return ((jax.vmap(net)(batch["x"]) - batch["y"]) ** 2).mean()

    def step(net: Net, batch: Batch) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(net, batch)
        net = eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grads))
        return net, {"loss": loss, "grads": grads}

    return Run(step, (Net(jax.random.key(5)), regression(np.random.default_rng(125))))


# ---------------------------------------------------------------------------------------------
# Scans over layers, checkpoints


def _stacked(draw: np.random.Generator, layers: int) -> Params:
    params = transformer_params(draw, layers=0)
    blocks = [block_params(draw) for _ in range(layers)]
    return params | {"blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)}


def _scanned(name: str, layers: int, wrap: Any, **scan_options: Any) -> Program:
    """A transformer as one scan; every layer hands out the mean of what it saw."""

    def step(params: Params, batch: Batch) -> Any:
        def loss_fn(params: Params) -> Any:
            def layer(x: jax.Array, p: Params) -> Any:
                x = wrap(block)(p, x)
                return x, x.mean(-1)

            x = embed(params, batch["tokens"])
            x, seen = jax.lax.scan(layer, x, params["blocks"], **scan_options)
            return cross_entropy(x @ params["embed"].T, batch["labels"]).mean(), seen

        (loss, seen), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return new, {"loss": loss, "seen": seen, "grads": grads}

    def make() -> Run:
        draw = np.random.default_rng(126)
        return Run(step, (_stacked(draw, layers), tokens(draw)))

    return Program(name, "B10", make)


_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

scans: tuple[Program, ...] = (
    _scanned("scan_over_layers", 6, lambda f: f),
    _scanned("scan_over_layers_with_remat", 5, jax.checkpoint),
    _scanned("scan_over_layers_with_a_policy", 5, lambda f: jax.checkpoint(f, policy=_DOTS)),
    _scanned("scan_inside_jit_inside_checkpoint", 4, lambda f: jax.checkpoint(jax.jit(f))),
    _scanned("scan_unrolled_twice", 4, lambda f: f, unroll=2),
    _scanned("scan_reversed", 4, lambda f: f, reverse=True),
)


def _checkpointed(name: str, policy: Any, **options: Any) -> Program:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x = embed(params, batch["tokens"])
        for p in params["blocks"]:
            x = jax.checkpoint(block, policy=policy, **options)(p, x)
        return cross_entropy(x @ params["embed"].T, batch["labels"]).mean()

    def make() -> Run:
        draw = np.random.default_rng(127)
        return Run(sgd_step(loss_fn), (transformer_params(draw, layers=3), tokens(draw)))

    return Program(name, "B10", make)


checkpoints: tuple[Program, ...] = (
    _checkpointed("checkpoint_saving_nothing", None),
    _checkpointed("checkpoint_saving_everything", jax.checkpoint_policies.everything_saveable),
    _checkpointed("checkpoint_saving_products", jax.checkpoint_policies.dots_saveable),
    _checkpointed("checkpoint_without_barrier", None, prevent_cse=False),
)


@program("B10")
def checkpoint_by_name_inside_scan_inside_jit() -> Run:
    from jax.ad_checkpoint import checkpoint_name

    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    def layer(p: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(checkpoint_name(x @ p, "hidden")) @ p.T

    @jax.jit
    def body(params: Params, x: jax.Array) -> jax.Array:
        kept = jax.checkpoint(layer, policy=policy)
        return jax.lax.scan(lambda x, p: (kept(p, x), None), x, params["ws"])[0]

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        return ((body(params, batch["x"]) @ params["out"] - batch["y"]) ** 2).mean()

    draw = np.random.default_rng(128)
    params = {"ws": normal(draw, 4, DIM, 12, scale=0.2), "out": weight(draw, DIM, 4)}
    return Run(sgd_step(loss_fn), (params, regression(draw)))


@program("B10")
def deep_unrolled_network() -> Run:
    def loss_fn(params: list[Params], batch: Batch) -> jax.Array:
        x = batch["x"]
        for p in params[:-1]:
            x = x + 0.3 * jnp.tanh(x @ p["w"] + p["b"])
        return ((x @ params[-1]["w"] - batch["y"]) ** 2).mean()

    draw = np.random.default_rng(129)
    params = mlp_params(draw, *([DIM] * 17), 4)
    del params[-1]["b"]
    return Run(sgd_step(loss_fn), (params, regression(draw)))
