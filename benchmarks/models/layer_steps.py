"""Train steps of a layer or two of each sort of model, small, for checks of sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import gpt_linen, gpt_nnx
from benchmarks.models.sizes import GPT_SIZES
from tests.backend.assigned_cases import Case, draw, trained

BATCH, SEQ, HIDDEN, VOCABULARY = 16, 32, 64, 256


def gpt_step() -> Case:
    """One GPT block, attention and MLP, as functions: fused QKV, causal softmax, GELU."""
    heads, ff = 4, 2 * HIDDEN

    def norm(x: Any, g: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g

    def loss(p: Any, batch: Any) -> Any:
        x = batch["x"]
        q, k, v = jnp.split(
            (norm(x, p["g1"]) @ p["qkv"] + p["b"]).reshape(*x.shape[:2], heads, -1), 3, -1
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        causal = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + mixed @ p["out"]
        x = x + jax.nn.gelu(norm(x, p["g2"]) @ p["up"]) @ p["down"]
        return ((x - batch["y"]) ** 2).mean()

    params = {
        "g1": jnp.ones(HIDDEN),
        "g2": jnp.ones(HIDDEN),
        "qkv": draw(0, HIDDEN, 3 * HIDDEN),
        "b": draw(1, 3 * HIDDEN),
        "out": draw(2, HIDDEN, HIDDEN),
        "up": draw(3, HIDDEN, ff),
        "down": draw(4, ff, HIDDEN),
    }
    batch = {"x": draw(5, BATCH, SEQ, HIDDEN), "y": draw(6, BATCH, SEQ, HIDDEN)}
    return trained(loss, params, batch)


def _tokens(vocabulary: int = VOCABULARY) -> dict[str, jax.Array]:
    tokens = jnp.arange(BATCH * SEQ).reshape(BATCH, SEQ) * 7 % vocabulary
    return {"tokens": tokens, "labels": tokens * 3 % vocabulary}


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _rms(x: Any, g: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def llama(layers: int = 2, heads: int = 8, ff: int = 128) -> Case:
    """Rotary positions, three separate products for Q, K, V, a gated MLP, RMS norms."""

    def rotate(x: Any) -> Any:
        half = x.shape[-1] // 2
        rates = 1.0 / (10000 ** (jnp.arange(half) / half))
        angles = jnp.arange(x.shape[1])[:, None] * rates
        cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def block(p: Any, x: Any) -> Any:
        y = _rms(x, p["n1"])
        q, k, v = ((y @ p[w]).reshape(*y.shape[:2], heads, -1) for w in ("wq", "wk", "wv"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k))
        causal = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(y.shape) @ p["wo"]
        y = _rms(x, p["n2"])
        return x + (jax.nn.silu(y @ p["w1"]) * (y @ p["w3"])) @ p["w2"]

    def loss(p: Any, batch: Any) -> Any:
        x = p["embedding"][batch["tokens"]]
        for layer in p["layers"]:
            x = block(layer, x)
        return _cross_entropy(_rms(x, p["norm"]) @ p["head"], batch["labels"])

    def layer(seed: int) -> dict[str, Any]:
        square = {w: draw(seed + k, HIDDEN, HIDDEN) for k, w in enumerate(("wq", "wk", "wv", "wo"))}
        wide = {w: draw(seed + 4, HIDDEN, ff) for w in ("w1", "w3")}
        ones = {n: jnp.ones(HIDDEN) for n in ("n1", "n2")}
        return {**square, **wide, **ones, "w2": draw(seed + 5, ff, HIDDEN)}

    params = {
        "embedding": draw(90, VOCABULARY, HIDDEN),
        "head": draw(91, HIDDEN, VOCABULARY),
        "norm": jnp.ones(HIDDEN),
        "layers": [layer(10 * k) for k in range(layers)],
    }
    return trained(loss, params, _tokens())


def moe(experts: int = 8, capacity: int = 8, ff: int = 64) -> Case:
    """A mixture of experts as in GShard (Lepikhin et al., 2020), one expert per token, every
    example a group of its own."""
    hidden, vocabulary = 32, 128

    def mixture(p: Any, x: Any) -> Any:
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, p["gate"]), -1)
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = jnp.cumsum(chosen, 1) * chosen - 1.0
        kept = (place < capacity) & (place >= 0)
        dispatch = chosen[..., None] * jax.nn.one_hot(place.astype(int), capacity)
        dispatch = dispatch * kept[..., None]
        combine = dispatch * (gates * chosen).sum(-1)[..., None, None]
        taken = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        made = jax.nn.relu(jnp.einsum("egcm,emh->egch", taken, p["wi"]))
        made = jnp.einsum("egch,ehm->egcm", made, p["wo"])
        return jnp.einsum("gsec,egcm->gsm", combine, made)

    def loss(p: Any, batch: Any) -> Any:
        x = p["embedding"][batch["tokens"]]
        x = x + mixture(p, _rms(x, p["norm"]))
        return _cross_entropy(x @ p["head"], batch["labels"])

    params = {
        "embedding": draw(0, vocabulary, hidden),
        "head": draw(1, hidden, vocabulary),
        "norm": jnp.ones(hidden),
        "gate": draw(2, hidden, experts),
        "wi": draw(3, experts, hidden, ff),
        "wo": draw(4, experts, ff, hidden),
    }
    return trained(loss, params, _tokens(vocabulary))


def wide_resnet(blocks: int = 2, channels: int = 16, size: int = 16) -> Case:
    """Residual blocks of two convolutions with group norms."""

    def convolve(x: Any, w: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    def norm(x: Any, g: Any) -> Any:
        y = x.reshape(*x.shape[:3], 4, -1)
        mean = y.mean((1, 2, 4), keepdims=True)
        scale = jax.lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
        return ((y - mean) * scale).reshape(x.shape) * g

    def loss(p: Any, batch: Any) -> Any:
        x = convolve(batch["x"], p["stem"])
        for b in p["blocks"]:
            y = convolve(jax.nn.relu(norm(x, b["g1"])), b["w1"])
            x = x + convolve(jax.nn.relu(norm(y, b["g2"])), b["w2"])
        return _cross_entropy(x.mean((1, 2)) @ p["head"], batch["y"])

    def block(seed: int) -> dict[str, Any]:
        kernels = {w: draw(seed + k, 3, 3, channels, channels) for k, w in enumerate(("w1", "w2"))}
        return {**kernels, "g1": jnp.ones(channels), "g2": jnp.ones(channels)}

    params = {
        "stem": draw(0, 3, 3, 3, channels),
        "head": draw(1, channels, 8),
        "blocks": [block(10 * k + 2) for k in range(blocks)],
    }
    batch = {"x": draw(7, BATCH, size, size, 3), "y": jnp.arange(BATCH) % 8}
    return trained(loss, params, batch)


def _flax_gpt(library: Any, make_step: Callable[..., Any], scan: bool) -> Case:
    config = dataclasses.replace(GPT_SIZES["tiny"], scan=scan)
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(library.make_create_state(config, optimizer), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((BATCH, config.seq), "int32")
    return Case(make_step(config, optimizer), state, {"tokens": tokens, "labels": tokens})


def gpt_linen_step(scan: bool = False) -> Case:
    """The tiny GPT in flax linen, with adamw; shapes only."""
    return _flax_gpt(gpt_linen, lambda config, optimizer: gpt_linen.train_step, scan)


def gpt_nnx_step() -> Case:
    """The tiny GPT in flax nnx, with adamw; shapes only."""
    return _flax_gpt(gpt_nnx, gpt_nnx.make_train_step, False)


STEPS: dict[str, Callable[[], Case]] = {
    "gpt_linen": gpt_linen_step,
    "gpt_scan": lambda: gpt_linen_step(scan=True),
    "gpt_nnx": gpt_nnx_step,
    "llama": llama,
    "moe": moe,
    "wide_resnet": wide_resnet,
}
