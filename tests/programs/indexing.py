"""A9b: indexing by position, mixing along the batch: right or refused, never per microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.models import (
    BATCH,
    DIM,
    SEQ,
    Batch,
    Params,
    block,
    classes,
    cross_entropy,
    embed,
    mlp,
    mlp_params,
    normal,
    sgd,
    sgd_step,
    tokens,
    transformer_params,
    weight,
)
from tests.programs.program import Program, Run, mean_of_slices, program

KINDS = 5
_LAST_BIAS = ("*'grads'][1]['b']",)  # only differences of logits matter: no gradient


def _classifier(name: str, loss_fn: Callable[[Any, Batch], jax.Array], **marks: Any) -> Program:
    """A classifier with this loss; the batch has x, y, w (weights) and order (a permutation)."""

    def make() -> Run:
        draw = np.random.default_rng(110)
        batch = classes(draw, kinds=KINDS)
        batch["w"] = jnp.asarray(draw.uniform(0.2, 2, BATCH), jnp.float32)
        batch["order"] = jnp.asarray(draw.permutation(BATCH), jnp.int32)
        return Run(sgd_step(loss_fn), (mlp_params(draw, DIM, 12, KINDS), batch))

    return Program(name, "A9b", make, "either", **marks)


def _metric(name: str, metric: Callable[[jax.Array, Batch], Any], **marks: Any) -> Program:
    """A classifier trained on a plain mean, with a metric of its logits that mixes examples."""

    def step(params: list[Params], batch: Batch) -> Any:
        def loss_fn(params: list[Params]) -> Any:
            logits = mlp(params, batch["x"])
            return cross_entropy(logits, batch["y"]).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return sgd(params, grads), {"loss": loss, "metric": metric(logits, batch), "grads": grads}

    def make() -> Run:
        draw = np.random.default_rng(111)
        return Run(step, (mlp_params(draw, DIM, 12, KINDS), classes(draw, kinds=KINDS)))

    return Program(name, "A9b", make, "either", **marks)


def _logp(params: Any, batch: Batch) -> jax.Array:
    return jax.nn.log_softmax(mlp(params, batch["x"]))


def _picked(params: Any, batch: Batch) -> jax.Array:
    return -_logp(params, batch)[jnp.arange(batch["y"].shape[0]), batch["y"]].mean()


def _weighted_by_class(params: Any, batch: Batch) -> jax.Array:
    counts = jnp.bincount(batch["y"], length=KINDS)
    weights = (1.0 / jnp.maximum(counts, 1))[batch["y"]]
    return (weights * cross_entropy(mlp(params, batch["x"]), batch["y"])).sum()


def _hardest(params: Any, batch: Batch) -> jax.Array:
    hardest, _ = jax.lax.top_k(cross_entropy(mlp(params, batch["x"]), batch["y"]), 2)
    return hardest.mean()


def _curriculum(params: Any, batch: Batch) -> jax.Array:
    """Weights by the rank of the position in the batch."""
    rank = jnp.arange(batch["y"].shape[0]) / batch["y"].shape[0]
    return ((1 + rank) * cross_entropy(mlp(params, batch["x"]), batch["y"])).mean()


def _pairs(params: Any, batch: Batch) -> jax.Array:
    logits = mlp(params, batch["x"])
    half = logits.shape[0] // 2
    return jax.nn.softplus(logits[:half, 0] - logits[half:, 0]).mean()


def _neighbours(params: Any, batch: Batch) -> jax.Array:
    logits = mlp(params, batch["x"]).reshape(-1, 2, KINDS)
    return jax.nn.softplus(logits[:, 0, 0] - logits[:, 1, 0]).mean()


def _mixed_up(params: Any, batch: Batch) -> jax.Array:
    """Mixup with the reversed batch."""
    x = 0.7 * batch["x"] + 0.3 * batch["x"][::-1]
    logits = mlp(params, x)
    direct = cross_entropy(logits, batch["y"])
    return (0.7 * direct + 0.3 * cross_entropy(logits, batch["y"][::-1])).mean()


def _loop_until_small(params: Any, batch: Batch) -> jax.Array:
    """A while loop whose number of rounds depends on the largest value of the batch."""

    def shrink(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1.0, lambda x: x * 0.7, x)

    x = jax.lax.stop_gradient(shrink(batch["x"]))
    return cross_entropy(mlp(params, x), batch["y"]).mean()


def _mapped(params: Any, batch: Batch) -> jax.Array:
    def one(example: Any) -> jax.Array:
        x, y = example
        return cross_entropy(mlp(params, x), y)

    return jax.lax.map(one, (batch["x"], batch["y"])).mean()


def _scanned(params: Any, batch: Batch) -> jax.Array:
    """A running mean over examples: the order along the batch matters."""

    def body(carry: jax.Array, x: jax.Array) -> Any:
        carry = 0.9 * carry + 0.1 * x
        return carry, x - carry

    _, x = jax.lax.scan(body, jnp.zeros(DIM), batch["x"])
    return cross_entropy(mlp(params, x), batch["y"]).mean()


def _accumulated(params: Any, batch: Batch) -> jax.Array:
    """The user's own accumulation over two chunks of the batch."""

    def chunk(total: jax.Array, piece: Any) -> Any:
        return total + cross_entropy(mlp(params, piece[0]), piece[1]).sum(), None

    pieces = (batch["x"].reshape(2, -1, DIM), batch["y"].reshape(2, -1))
    total, _ = jax.lax.scan(chunk, 0.0, pieces)
    return total / batch["y"].shape[0]


def _on_hidden(change: Callable[[jax.Array, Batch], jax.Array]) -> Callable[..., jax.Array]:
    """A change along the batch in the middle of the network."""

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params[0]["w"] + params[0]["b"])
        x = change(x, batch)
        return cross_entropy(x @ params[1]["w"] + params[1]["b"], batch["y"]).mean()

    return loss_fn


losses: tuple[Program, ...] = (
    _classifier("position_and_label", _picked),
    _classifier("weights_of_classes", _weighted_by_class, naive=mean_of_slices, shouts=0.05),
    _classifier("hardest_examples", _hardest, naive=mean_of_slices, shouts=0.05),
    _classifier("weights_by_position", _curriculum, naive=mean_of_slices, shouts=0.02),
    _classifier("halves_paired", _pairs, zeros=_LAST_BIAS, naive=mean_of_slices, shouts=0.05),
    _classifier("neighbours_paired", _neighbours, zeros=_LAST_BIAS),
    _classifier("mixup_with_the_reversed_batch", _mixed_up, naive=mean_of_slices, shouts=0.02),
    _classifier("while_on_a_batch_maximum", _loop_until_small, naive=mean_of_slices, shouts=0.01),
    _classifier("map_over_examples", _mapped),
    _classifier("scan_along_the_batch", _scanned, naive=mean_of_slices, shouts=0.01),
    _classifier("accumulation_of_the_user", _accumulated),
    _classifier("reversed", _on_hidden(lambda x, b: x[::-1]), naive=mean_of_slices, shouts=0.05),
    _classifier(
        "rolled", _on_hidden(lambda x, b: jnp.roll(x, 1, 0)), naive=mean_of_slices, shouts=0.05
    ),
    _classifier(
        "cumulated",
        _on_hidden(lambda x, b: jnp.cumsum(x, 0) / 4),
        naive=mean_of_slices,
        shouts=0.05,
    ),
    _classifier("permuted", _on_hidden(lambda x, b: x[b["order"]])),
    _classifier(
        "permuted_data", lambda p, b: cross_entropy(mlp(p, b["x"][b["order"]]), b["y"]).mean()
    ),
    _classifier("sorted", _on_hidden(lambda x, b: jnp.sort(x, axis=0)), naive=mean_of_slices,
                shouts=0.05),
    _classifier("shifted_by_pad", _on_hidden(lambda x, b: jnp.pad(x, ((1, 0), (0, 0)))[:-1])),
    _classifier("first_example_to_all", _on_hidden(lambda x, b: x + x[:1])),
    _classifier("even_examples", lambda p, b: cross_entropy(
        mlp(p, b["x"][::2]), b["y"][::2]).mean()),
    _classifier("all_but_the_last", lambda p, b: cross_entropy(
        mlp(p, b["x"][:-1]), b["y"][1:]).mean()),
    _classifier("batch_concatenated_with_itself", lambda p, b: cross_entropy(
        mlp(p, jnp.concatenate([b["x"], -b["x"]])), jnp.concatenate([b["y"], b["y"]])).mean()),
    _classifier("batch_tiled", lambda p, b: cross_entropy(
        mlp(p, jnp.tile(b["x"], (2, 1)) * 1.1), jnp.tile(b["y"], 2)).mean()),
    _classifier("examples_repeated", lambda p, b: cross_entropy(
        mlp(p, jnp.repeat(b["x"], 2, axis=0)), jnp.repeat(b["y"], 2)).mean()),
    _classifier("distances_between_examples", lambda p, b: (
        (mlp(p, b["x"])[:, None] - mlp(p, b["x"])[None]) ** 2).mean(),
        zeros=_LAST_BIAS),
    _classifier("centred_on_the_batch", lambda p, b: cross_entropy(
        mlp(p, b["x"]) - mlp(p, b["x"]).mean(0), b["y"]).mean(), zeros=_LAST_BIAS),
    _classifier("softmax_over_the_batch", lambda p, b: (
        jax.nn.softmax(mlp(p, b["x"])[:, 0]) * b["w"]).sum(), zeros=_LAST_BIAS),
    _classifier("weights_normalized_by_softmax", lambda p, b: (
        jax.nn.softmax(b["w"]) * cross_entropy(mlp(p, b["x"]), b["y"])).sum()),
    _classifier("convolution_along_the_batch", _on_hidden(lambda x, b: jnp.stack(
        [jnp.convolve(c, jnp.array([0.5, 0.3, 0.2]), "same") for c in x.T], -1))),
)  # fmt: skip

metrics: tuple[Program, ...] = (
    _metric("median", lambda x, b: jnp.median(x[:, 0])),
    _metric("argmax_over_the_batch", lambda x, b: x.argmax(0)),
    _metric("sorted_scores", lambda x, b: jnp.sort(x[:, 0])),
    _metric("top_three", lambda x, b: jax.lax.top_k(x[:, 0], 3)),
    _metric("variance_over_the_batch", lambda x, b: x.var(0)),
    _metric("correlation", lambda x, b: jnp.corrcoef(x[:, 0], b["x"][:, 0])),
    _metric("quantile", lambda x, b: jnp.quantile(x, 0.9, axis=0)),
    _metric("confusion_matrix", lambda x, b: jnp.zeros((5, 5)).at[b["y"], x.argmax(-1)].add(1)),
    _metric("histogram", lambda x, b: jnp.histogram(x, bins=4, range=(-2.0, 2.0))[0]),
    _metric("first_and_last_example", lambda x, b: (x[0], x[-1])),
    _metric("rank_of_positives", lambda x, b: (x[:, 0][:, None] < x[:, 0][None]).sum()),
    _metric("product_over_the_batch", lambda x, b: jax.nn.sigmoid(x).prod(0)),
    _metric("covariance", lambda x, b: x.T @ x),
    _metric("logsumexp_over_the_batch", lambda x, b: jax.nn.logsumexp(x, axis=0)),
)


@program("A9b", expect="either")
def two_batch_dimensions() -> Run:
    """Both sides of a score matrix come from the batch."""

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params["w"])
        return jnp.tanh(x @ x.T).mean()

    draw = np.random.default_rng(112)
    return Run(sgd_step(loss_fn), ({"w": weight(draw, DIM, 12)}, {"x": normal(draw, BATCH, DIM)}))


def _merged(name: str, merge: Callable[[jax.Array], jax.Array], split: Any) -> Program:
    """A transformer whose MLP and loss run on merged (batch, seq) tokens."""

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x = block(params["blocks"][0], embed(params, batch["tokens"]))
        flat = merge(x)
        flat = flat + jnp.tanh(flat @ params["w1"]) @ params["w2"]
        x = split(flat)
        logits = merge(block(params["blocks"][1], x)) @ params["embed"].T
        labels = merge(batch["labels"][..., None])[:, 0]
        return cross_entropy(logits, labels).mean()

    def make() -> Run:
        draw = np.random.default_rng(113)
        params = transformer_params(draw, layers=2)
        params |= {"w1": weight(draw, DIM, 24), "w2": weight(draw, 24, DIM)}
        return Run(sgd_step(loss_fn), (params, tokens(draw)))

    return Program(name, "A9b", make, "either")


merged: tuple[Program, ...] = (
    _merged(
        "merged_batch_outer",
        lambda x: x.reshape(-1, x.shape[-1]),
        lambda x: x.reshape(-1, SEQ, x.shape[-1]),
    ),
    _merged(
        "merged_batch_inner",
        lambda x: x.swapaxes(0, 1).reshape(-1, x.shape[-1]),
        lambda x: x.reshape(SEQ, -1, x.shape[-1]).swapaxes(0, 1),
    ),
)
