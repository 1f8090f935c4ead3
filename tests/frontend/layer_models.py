"""Train steps with known structure, for tests of segment."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

B, T, H, V, HEADS = 4, 8, 16, 50, 2
KEY = jax.random.key(0)


def sds(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens() -> dict[str, Any]:
    return {"x": sds(B, T, dtype=jnp.int32), "y": sds(B, T, dtype=jnp.int32)}


def norm(scale: Any, x: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def heads(x: Any) -> Any:
    return x.reshape(*x.shape[:2], HEADS, -1)


def attention(p: Any, x: Any, rotary: Any) -> Any:
    def turn(v: Any) -> Any:
        half = v.shape[-1] // 2
        a, b = v[..., :half], v[..., half:]
        cos, sin = rotary
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k, v = (heads(x @ p[n]) for n in ("q", "k", "v"))
    q, k = turn(q), turn(k)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["o"]


def block(p: Any, x: Any, rotary: Any) -> Any:
    x = x + attention(p, norm(p["n1"], x), rotary)
    y = norm(p["n2"], x)
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def block_shapes(h: int = H, lead: tuple[int, ...] = ()) -> dict[str, Any]:
    square = {n: sds(*lead, h, h) for n in "qkvo"}
    wide = {"gate": sds(*lead, h, 4 * h), "up": sds(*lead, h, 4 * h), "down": sds(*lead, 4 * h, h)}
    return {**square, **wide, "n1": sds(*lead, h), "n2": sds(*lead, h)}


def llama_shapes(layers: int, h: int = H) -> dict[str, Any]:
    blocks = [block_shapes(h) for _ in range(layers)]
    return {"embed": sds(V, h), "blocks": blocks, "norm": sds(h), "head": sds(h, V)}


def rotary(d: int) -> tuple[Any, Any]:
    angles = jnp.arange(T)[:, None] / 1e4 ** (jnp.arange(d // 2) / (d // 2))
    return jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]


def llama(params: Any, x: Any) -> Any:
    x = params["embed"][x]
    table = rotary(x.shape[-1] // HEADS)
    for p in params["blocks"]:
        x = block(p, x, table)
    return norm(params["norm"], x) @ params.get("head", params["embed"].T)


def scan_llama(params: Any, x: Any, remat: bool = False) -> Any:
    x = params["embed"][x]
    table = rotary(x.shape[-1] // HEADS)

    def body(x: Any, p: Any) -> tuple[Any, None]:
        return block(p, x, table), None

    x, _ = lax.scan(jax.checkpoint(body) if remat else body, x, params["blocks"])
    return norm(params["norm"], x) @ params["head"]


def entropy(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


def sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def lm_step(model: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: entropy(model(p, batch["x"]), batch["y"]))(
            params
        )
        return sgd(params, grads), loss

    return step


# ---------------------------------------------------------------------------------------------


def mlp_shapes(*sizes: int) -> list[Any]:
    return [{"w": sds(a, b), "b": sds(b)} for a, b in zip(sizes, sizes[1:], strict=False)]


def mlp(params: Any, x: Any) -> Any:
    for p in params[:-1]:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def mlp_step(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: ((mlp(p, batch["x"]) - batch["y"]) ** 2).mean())(
        params
    )
    return sgd(params, grads), loss


def conv(w: Any, x: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def unet_shapes(widths: tuple[int, ...] = (8, 16, 32)) -> dict[str, Any]:
    down, up, c = [], [], 3
    for w in widths:
        down.append({"a": sds(3, 3, c, w), "b": sds(3, 3, w, w)})
        c = w
    for w, wide in zip(widths[-2::-1], widths[::-1], strict=False):
        up.append({"a": sds(3, 3, w + wide, w), "b": sds(3, 3, w, w)})
    return {"down": down, "up": up, "out": sds(1, 1, widths[0], 3)}


def unet(params: Any, x: Any) -> Any:
    skips = []
    for i, p in enumerate(params["down"]):
        x = jax.nn.relu(conv(p["a"], x, 1 if i == 0 else 2))
        x = jax.nn.relu(conv(p["b"], x))
        skips.append(x)
    skips.pop()
    for p in params["up"]:
        b, h, w, c = x.shape
        x = jnp.broadcast_to(x[:, :, None, :, None, :], (b, h, 2, w, 2, c))
        x = jnp.concatenate([x.reshape(b, 2 * h, 2 * w, c), skips.pop()], -1)
        x = jax.nn.relu(conv(p["b"], jax.nn.relu(conv(p["a"], x))))
    return conv(params["out"], x)


def unet_step(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: ((unet(p, batch["x"]) - batch["y"]) ** 2).mean())(
        params
    )
    return sgd(params, grads), loss


def resnet_shapes(blocks: int, c: int = 8) -> dict[str, Any]:
    body = [{"a": sds(3, 3, c, c), "b": sds(3, 3, c, c)} for _ in range(blocks)]
    return {"stem": sds(3, 3, 3, c), "blocks": body, "head": sds(c, 10)}


def resnet_step(params: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        x = jax.nn.relu(conv(params["stem"], batch["x"]))
        for p in params["blocks"]:
            x = jax.nn.relu(x + conv(p["b"], jax.nn.relu(conv(p["a"], x))))
        return ((x.mean((1, 2)) @ params["head"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return sgd(params, grads), loss


def images() -> dict[str, Any]:
    return {"x": sds(B, 8, 8, 3), "y": sds(B, 8, 8, 3)}


def vectors(features: int, targets: int) -> dict[str, Any]:
    return {"x": sds(B, features), "y": sds(B, targets)}


def distill_step(state: Any, batch: Any) -> Any:
    """A frozen teacher, then a student that imitates it."""

    def loss_fn(student: Any) -> Any:
        teacher = llama(state["teacher"], batch["x"])
        own = llama(student, batch["x"])
        return ((own - lax.stop_gradient(teacher)) ** 2).mean() + entropy(own, batch["y"])

    loss, grads = jax.value_and_grad(loss_fn)(state["student"])
    return {**state, "student": sgd(state["student"], grads)}, loss


def gan_step(state: Any, batch: Any) -> Any:
    """Two losses over one generator and one discriminator."""

    def d_loss(d: Any) -> Any:
        fake = mlp(d, mlp(state["g"], batch["z"]))
        real = mlp(d, batch["x"])
        return jax.nn.softplus(fake).mean() + jax.nn.softplus(-real).mean()

    def g_loss(g: Any) -> Any:
        return jax.nn.softplus(-mlp(state["d"], mlp(g, batch["z"]))).mean()

    dl, dg = jax.value_and_grad(d_loss)(state["d"])
    gl, gg = jax.value_and_grad(g_loss)(state["g"])
    return {"d": sgd(state["d"], dg), "g": sgd(state["g"], gg)}, (dl, gl)


def metrics_step(params: Any, batch: Any) -> Any:
    """A forward pass without dropout, then one with it, computed twice and trained."""

    def forward(params: Any, drop: bool) -> Any:
        x = batch["x"]
        for i, p in enumerate(params):
            x = jax.nn.relu(x @ p["w"] + p["b"])
            if drop:
                keep = jax.random.bernoulli(jax.random.fold_in(KEY, i), 0.9, x.shape)
                x = jnp.where(keep, x / 0.9, 0.0)
        return x

    plain = forward(params, False)
    again = forward(params, True)
    loss, grads = jax.value_and_grad(lambda p: ((forward(p, True) - batch["y"]) ** 2).mean())(
        params
    )
    return sgd(params, grads), (loss, jnp.abs(plain - batch["y"]).mean(), again.sum())


def lora_shapes(layers: int, rank: int = 2) -> dict[str, Any]:
    def adapter() -> Any:
        return {n: {"a": sds(H, rank), "b": sds(rank, H)} for n in "qkvo"}

    return {"base": llama_shapes(layers), "lora": [adapter() for _ in range(layers)]}


def lora_step(state: Any, batch: Any) -> Any:
    table = rotary(H // HEADS)

    class Sum:
        def __init__(self, w: Any, p: Any) -> None:
            self.w, self.p = w, p

        def __rmatmul__(self, x: Any) -> Any:
            return x @ self.w + (x @ self.p["a"]) @ self.p["b"]

    def loss_fn(lora: Any) -> Any:
        base = state["base"]
        x = base["embed"][batch["x"]]
        for p, adapter in zip(base["blocks"], lora, strict=True):
            both = {**p, **{n: Sum(p[n], adapter[n]) for n in "qkvo"}}
            x = block(both, x, table)
        return entropy(norm(base["norm"], x) @ base["head"], batch["y"])

    loss, grads = jax.value_and_grad(loss_fn)(state["lora"])
    return {**state, "lora": sgd(state["lora"], grads)}, loss
