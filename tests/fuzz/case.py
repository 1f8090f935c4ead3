"""One random step from one integer: `make_case(seed)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz import blocks, losses, metrics, updates
from tests.fuzz.builder import PIECES, Builder, dense

MODULES = (blocks, losses, metrics, updates)

SHARES = {
    "losses": 6,
    "masks": 6,
    "tied": 4,
    "dropout": 6,
    "positions": 5,
    "merged_dims": 5,
    "scan": 6,
    "cond": 4,
    "remat": 4,
    "loops": 4,
    "custom": 3,
    "indexing": 5,
    "ordering": 3,
    "spectral": 3,
    "einsum": 3,
    "metrics": 4,
    "clipping": 3,
    "optimizers": 5,
    "reductions": 4,
    "nonlinear": 4,
    "batch_numbers": 3,
    "constants": 2,
    "infinities": 2,
    "mixes": 4,
    "precision": 2,
}
"""Kind -> programs of every hundred that hold it for certain. The other pieces of a program are
drawn from all kinds but "mixes", "infinities" and "precision"."""

_DECK = tuple(
    np.random.default_rng(0).permutation([kind for kind, n in SHARES.items() for _ in range(n)])
)
_RARE = ("mixes", "infinities", "precision")


@dataclass(frozen=True)
class Case:
    """A step with its arguments, and how it is to be run.

    Attributes:
      seed, kind: the case is `make_case(seed)`; `kind` is what it holds for certain.
      pieces: names of all that it is made of.
      step: `step(state, batch)`.
      state, batch: numpy arrays.
      batch_axes: as in `hp.Options`.
      num_microbatches, num_groups: of the run.
      precision: the coarsest type that it computes in.
    """

    seed: int
    kind: str
    pieces: tuple[str, ...]
    step: Callable[..., Any]
    state: Any
    batch: Any
    batch_axes: dict[str, int | None]
    num_microbatches: int
    num_groups: int
    precision: str

    def args(self, dtype: str = "float32") -> tuple[Any, Any]:
        """Fresh arrays; floats of the given type. "float32" is the case's own, which may be coarser
        for the parameters."""

        def array(x: Any) -> Any:
            floating = np.issubdtype(x.dtype, np.floating)
            return jnp.asarray(x.astype(dtype) if floating else x)

        state, batch = jax.tree.map(array, (self.state, self.batch))
        if self.precision == "bfloat16" and dtype == "float32":
            state["params"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["params"])
        return {**state, "key": jax.random.key(self.seed)}, batch

    def __str__(self) -> str:
        return (
            f"seed {self.seed} ({self.kind}), M={self.num_microbatches}, "
            f"{self.num_groups} groups: {', '.join(self.pieces)}"
        )


def kind_of(seed: int) -> str:
    """What the case of this seed holds for certain."""
    return str(_DECK[seed % len(_DECK)])


def make_case(seed: int) -> Case:
    """The same case for the same seed, in every process."""
    kind = kind_of(seed)
    draw = np.random.default_rng(seed)
    rows = int(draw.choice([8, 8, 16]))
    build = Builder(
        draw,
        rows,
        length=int(draw.choice([3, 5, rows])),
        width=int(draw.choice([6, 8, 12, rows])),
        classes=int(draw.choice([5, 7, rows])),
        sequential=bool(draw.integers(2)),
    )
    chosen = {slot: _choose(build, slot, kind) for slot in ("loss", "metric", "update")}
    stack = [
        _choose(build, "block", kind if i == 0 else "")
        for i in range(int(draw.choice([1, 1, 1, 2, 2, 3])))
    ]
    stack = [stack[i] for i in draw.permutation(len(stack))]
    names = [make.__name__ for make in (*stack, *chosen.values())]
    step = _step(build, stack, chosen)
    return Case(
        seed,
        kind,
        tuple(names),
        step,
        {"params": build.params, "step": np.int32(draw.integers(5)), **build.state},
        build.batch,
        {f"batch['{name}']": dim for name, dim in build.axes.items()},
        int(draw.choice([1, 2, 4, 8], p=[0.1, 0.3, 0.35, 0.25])),
        int(draw.integers(1, 4)),
        "bfloat16" if kind == "precision" else "float32",
    )


def _choose(build: Builder, slot: str, kind: str) -> Callable[[Builder], Any]:
    """The certain kind if this slot has it, else anything but the rare ones."""
    found = PIECES[slot]
    options = found.get(kind) or [
        make for other, makes in found.items() if other not in _RARE for make in makes
    ]
    return options[int(build.draw.integers(len(options)))]


def _element_losses(build: Builder) -> Callable[[Any, Any], Any]:
    """Losses per example or token from the outputs and the batch's targets."""
    shape = build.hidden[:-1]
    how = build.pick("cross_entropy", "squared", "logistic", "absolute")
    if how == "cross_entropy":
        labels = build.integers(build.classes, *shape)

        def entropy(out: Any, b: Any) -> Any:
            scores = jax.nn.log_softmax(out)
            return -jnp.take_along_axis(scores, b[labels][..., None], -1)[..., 0]

        return entropy
    target = build.data(*shape, build.classes)
    functions = {
        "squared": lambda out, y: ((out - y) ** 2).mean(-1),
        "logistic": lambda out, y: jnp.logaddexp(0, -out * jnp.sign(y)).mean(-1),
        "absolute": lambda out, y: jnp.sqrt((out - y) ** 2 + 0.01).sum(-1),
    }
    return lambda out, b: functions[how](out, b[target].astype(out.dtype))


def _step(build: Builder, stack: Any, chosen: Any) -> Callable[..., Any]:
    inputs = build.data(*build.hidden)
    layers = [make(build) for make in stack]
    head = dense(build, build.classes)
    element_losses = _element_losses(build)
    reduce = chosen["loss"](build)
    metric = chosen["metric"](build)
    update = chosen["update"](build)

    def step(state: Any, batch: Any) -> Any:
        whole = {"key": state["key"], "step": state["step"]}

        def loss_fn(params: Any) -> Any:
            known = {**batch, **whole}
            h = batch[inputs].astype(params[next(iter(params))].dtype)
            for layer in layers:
                h = layer(params, h, known)
            out = head(params, h)
            losses = element_losses(out, batch)
            loss = reduce(params, losses, known)
            return loss, metric(params, out, losses, known)

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        rest = {k: v for k, v in state.items() if k not in ("params", "key")}
        kept, params, extra = update(rest, state["params"], grads, loss)
        key = jax.random.key_data(jax.random.split(state["key"])[0])
        return {"params": params, "rest": kept, "key": key}, {
            "loss": loss,
            "grads": grads,
            "aux": aux,
            "extra": extra,
        }

    return step
