"""Naive behaviours, put into the code one by one: each must make a comparison with jax.jit fail.

A pipeline that is careless in one of these ways runs without an error and returns wrong numbers.
The tests of equality are worth what they notice: here every mistake is made on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hetpass as hp
from hetpass._jax import Literal
from hetpass.backend import lower
from hetpass.frontend import assemble, instantiate, phases
from hetpass.frontend.microbatch import SplitOptions, split
from hetpass.frontend.probes import at_microbatch
from hetpass.frontend.rules import apply, elementwise, indexing, linear, reductions, shapes
from hetpass.frontend.rules.values import Val
from hetpass.frontend.trace import trace
from hetpass.ir.kinds import Batched, Partial
from hetpass.ir.program import Read, ReadRow
from tests.equality import differences
from tests.frontend.evaluate import evaluate

B, T, D, H, M = 8, 3, 6, 12, 4

# ---------------------------------------------------------------------------------------------
# Steps that expose the mistakes


def _arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    params = {"w1": normal(D, H) / 2, "w2": normal(H, D) / 3, "table": normal(D, D)}
    mask = jnp.array([1, 1, 0, 0, 1, 0, 1, 1], jnp.float32)  # microbatch 1 is fully masked
    index = jnp.asarray(draw.integers(0, D, B), jnp.int32)
    return params, {"x": normal(B, D), "y": normal(B, D), "m": mask, "i": index}


def _net(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w1"]) @ p["w2"]


def _losses(p: Any, b: Any) -> Any:
    return ((_net(p, b["x"]) - b["y"]) ** 2).sum(-1)


def _training(loss: Callable[..., Any], update: Callable[..., Any] | None = None) -> Any:
    def step(params: Any, batch: Any) -> Any:
        found, grads = jax.value_and_grad(lambda p: loss(p, batch), has_aux=True)(params)
        grads, extra = update(params, grads) if update else (grads, ())
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), found, grads, extra

    return step


def _plain(p: Any, b: Any) -> Any:
    return _losses(p, b).mean(), ()


def _clip(p: Any, grads: Any) -> Any:
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1, 0.1 / norm), grads), norm


def _accumulate_twice(p: Any, grads: Any) -> Any:
    return jax.tree.map(lambda g, old: g + 0.5 * old, grads, p), ()


def _masked(p: Any, b: Any) -> Any:
    each = _losses(p, b)
    return (each * b["m"]).sum() / b["m"].sum(), ()


def _dropout(p: Any, b: Any) -> Any:
    h = jnp.tanh(b["x"] @ p["w1"])
    h = h * jax.random.bernoulli(jax.random.key(1), 0.5, h.shape)
    return ((h @ p["w2"] - b["y"]) ** 2).mean(), ()


def _remat_dropout(p: Any, b: Any) -> Any:
    return jax.checkpoint(_dropout)(p, b)


def _tied(p: Any, b: Any) -> Any:
    h = jnp.tanh(jnp.tanh(b["x"] @ p["w1"]) @ p["w1"].T)
    return ((h - b["y"]) ** 2).mean(), ()


def _positions(p: Any, b: Any) -> Any:
    out = jax.nn.log_softmax(_net(p, b["x"]))
    return -out[jnp.arange(out.shape[0]), b["i"]].mean(), ()


def _ramp(p: Any, b: Any) -> Any:
    each = _losses(p, b)
    return (each * jnp.arange(each.shape[0])).mean(), ()


def _time_major(p: Any, b: Any) -> Any:
    steps = jnp.stack([b["x"] * (t + 1) for t in range(T)])  # [T, B, D]
    flat = _net(p, steps.reshape(-1, D))
    weights = jnp.stack([b["y"], b["y"] ** 2, -b["y"]])
    return (flat.reshape(T, -1, D) * weights).mean(), flat


def _metrics(p: Any, b: Any) -> Any:
    each = _losses(p, b)
    return each.mean(), {"max": each.max(), "any": (each * b["m"] > 0).any()}


def _order(p: Any, b: Any) -> Any:
    each = lax.stop_gradient(_losses(p, b))
    return _losses(p, b).mean(), {"sort": jnp.sort(each), "cumsum": jnp.cumsum(each)}


def _best(p: Any, b: Any) -> Any:
    each = lax.stop_gradient(_losses(p, b))
    return _losses(p, b).mean(), each.argmax()


def _counted(p: Any, b: Any) -> Any:
    counts = jnp.ones(D).at[b["i"]].add(_losses(p, b))
    return _losses(p, b).mean(), counts


def _column(p: Any, b: Any) -> Any:
    out = jnp.concatenate([_net(p, b["x"] * k) for k in range(1, 6)], axis=1)
    return (out[:, out.shape[0] : out.shape[0] + 2] ** 2).mean(), ()


def _batch_norm(p: Any, b: Any) -> Any:
    h = b["x"] @ p["w1"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
    return ((jnp.tanh(h) @ p["w2"] - b["y"]) ** 2).mean(), ()


def _halved(p: Any, b: Any) -> Any:
    return _losses(p, b).mean(), _losses(p, b).sum().astype(jnp.bfloat16).astype(jnp.float32)


# ---------------------------------------------------------------------------------------------
# The mistakes


def _numbers_of_the_slice(patch: Any) -> None:
    """A mean's 1 / N is the microbatch's: the sum of the means."""
    right = instantiate.Region.equation

    def wrong(self: Any, eqn: Any, *rest: Any) -> Any:
        doubled = self.probes.doubled[id(eqn)]
        operands = []
        for a, d in zip(eqn.invars, doubled.invars, strict=True):
            if isinstance(a, Literal) and np.ndim(a.val) == 0 and a.val != d.val:
                value = a.val - (d.val - a.val) * (M - 1) / M
                a = Literal(np.asarray(value, a.aval.dtype)[()], a.aval)
            operands.append(a)
        made = eqn.replace(invars=operands)
        self.probes.doubled[id(made)] = doubled
        if id(eqn) in self.context.actions:
            self.context.actions[id(made)] = self.context.actions[id(eqn)]
        return right(self, made, *rest)

    patch.setattr(instantiate.Region, "equation", wrong)


def _everything_is_linear(patch: Any) -> None:
    """Whatever is computed from a microbatch's sum is computed per microbatch, and summed."""
    patch.setattr(apply, "partial_result", lambda eqn, vals: Partial("sum"))
    patch.setattr(phases, "_is_linear_tail", lambda eqn, found: False)


def _maxima_add_up(patch: Any) -> None:
    patch.setitem(reductions._REDUCERS, "reduce_max", "sum")


def _any_is_all(patch: Any) -> None:
    patch.setitem(reductions._REDUCERS, "reduce_or", "and")


def _draws_per_microbatch(patch: Any) -> None:
    """Every microbatch draws numbers of its own size from the key."""

    def wrong(
        self: Any, eqn: Any, action: Any, operands: Any, out: Any, offset: Any, made: Any
    ) -> None:
        params = dict(eqn.params, shape=tuple(out.aval.shape))
        made.append(instantiate._jax.make_eqn(eqn, operands, [out], params))

    patch.setattr(instantiate.Region, "_draw", wrong)


def _positions_are_not_rebased(patch: Any) -> None:
    wrong = lambda self, eqn, action, operands, offset, made: operands[action.operand]  # noqa: E731
    patch.setattr(instantiate.Region, "_rebased", wrong)


def _scales_are_dropped(patch: Any) -> None:
    """The factor of a gradient of a nonlinear loss is forgotten."""
    right = assemble.scaled
    patch.setattr(
        assemble, "scaled", lambda eqn, source, by, result: right(eqn, source, 1.0, result)
    )


def _sums_in_bfloat16(patch: Any) -> None:
    patch.setattr(assemble, "accumulator_dtype", lambda dtype, at_least=None: jnp.dtype("bfloat16"))


def _merged_dimensions_lead_with_the_batch(patch: Any) -> None:
    def wrong(eqn: Any, vals: Any, ctx: Any) -> Any:
        if not vals[0].along_batch:
            return [vals[0]]
        (new,) = ctx.batch_dims(eqn.outvars[0])
        return [Val(Batched(new, 1))]

    patch.setitem(apply._RULES, "reshape", wrong)


def _casts_before_adding(patch: Any) -> None:
    patch.setattr(linear, "narrows", lambda eqn: False)
    patch.setattr(phases, "_is_linear_tail", lambda eqn, found: False)


def _second_use_is_dropped(patch: Any) -> None:
    """Of a parameter that is read twice, one gradient is kept."""
    right = instantiate.Region.equation

    def wrong(self: Any, eqn: Any, *rest: Any) -> Any:
        made = right(self, eqn, *rest)
        tied = eqn.primitive.name == "add_any" and eqn.outvars[0].aval.shape == (D, H)
        if not tied:
            return made
        kept: list[Any] = made[:-1]
        last = made[-1]
        self._emit(eqn, lambda first: first + 0, last.invars[:1], kept, list(last.outvars))
        return kept

    patch.setattr(instantiate.Region, "equation", wrong)


def _order_within_a_microbatch(patch: Any) -> None:
    def wrong(eqn: Any, vals: Any, ctx: Any) -> Any:
        return [Val(vals[0].kind) for _ in eqn.outvars]

    for name in ("sort", "cumsum"):
        patch.setitem(apply._RULES, name, wrong)


def _argmax_within_a_microbatch(patch: Any) -> None:
    patch.setitem(apply._RULES, "argmax", lambda eqn, vals, ctx: [Val(Partial("max"))])


def _tables_are_added_in_every_microbatch(patch: Any) -> None:
    patch.setattr(indexing, "_onto_table", lambda *_: Val(Partial("sum")))


def _numbers_are_sizes(patch: Any) -> None:
    """A column numbered by the batch size becomes that of the microbatch's."""

    def wrong(self: Any, eqn: Any, name: str, full: Any, doubled: Any) -> Any:
        return at_microbatch(full, doubled, self.num_microbatches)

    patch.setattr(instantiate.Region, "_size", wrong)


def _statistics_per_microbatch(patch: Any) -> None:
    patch.setattr(SplitOptions, "__init__", _per_microbatch_options)


def _per_microbatch_options(self: Any, *_: Any, **__: Any) -> None:
    object.__setattr__(self, "accumulate_dtype", None)
    object.__setattr__(self, "per_microbatch", True)


def _orders_of_examples_do_not_matter(patch: Any) -> None:
    """Values whose examples lie in different orders are combined all the same."""

    def wrong(eqn: Any, vals: Any) -> Any:
        return next((v.kind for v in vals if v.along_batch), None)

    patch.setattr(elementwise, "join_batched", wrong)
    patch.setattr(shapes, "join_batched", wrong)


def _transposed(p: Any, b: Any) -> Any:
    once = jnp.stack([b["x"], b["y"]])  # [2, B, D]
    flipped = once.transpose(1, 0, 2).reshape(-1, D)  # the batch leads
    straight = once.reshape(-1, D)
    return (_net(p, straight) * flipped).mean(), ()


@dataclass(frozen=True)
class Mutation:
    """A mistake, a loss (and update) that exposes it, and how loudly: the least relative error."""

    name: str
    mistake: Callable[[Any], None]
    step: Any
    shouts: float


MUTATIONS = (
    Mutation("sum of means", _numbers_of_the_slice, _training(_plain), 2.9),
    Mutation("clip per microbatch", _everything_is_linear, _training(_plain, _clip), 0.05),
    Mutation(
        "state added per microbatch",
        _everything_is_linear,
        _training(_plain, _accumulate_twice),
        0.1,
    ),
    Mutation("masked mean of means", _everything_is_linear, _training(_masked), 0.1),
    Mutation(
        "penalty per microbatch",
        _everything_is_linear,
        _training(lambda p, b: (_plain(p, b)[0] + sum((v**2).sum() for v in p.values()), ())),
        0.5,
    ),
    Mutation(
        "exp of a share of the mean",
        _everything_is_linear,
        _training(lambda p, b: (jnp.exp(0.1 * _plain(p, b)[0]), ())),
        1e-4,
    ),
    Mutation("maxima add up", _maxima_add_up, _training(_metrics), 0.1),
    Mutation("any is all", _any_is_all, _training(_metrics), 0.0),
    Mutation("dropout per microbatch", _draws_per_microbatch, _training(_dropout), 0.1),
    Mutation(
        "dropout per microbatch, remat", _draws_per_microbatch, _training(_remat_dropout), 0.1
    ),
    Mutation("positions per microbatch", _positions_are_not_rebased, _training(_positions), 0.1),
    Mutation("ramp per microbatch", _draws_per_microbatch, _training(_ramp), 0.1),
    Mutation(
        "scale of a nonlinear loss",
        _scales_are_dropped,
        _training(lambda p, b: (_plain(p, b)[0] ** 2, ())),
        0.1,
    ),
    Mutation("sums in bfloat16", _sums_in_bfloat16, _training(_plain), 5e-4),
    Mutation(
        "time-major merge", _merged_dimensions_lead_with_the_batch, _training(_time_major), 0.1
    ),
    Mutation("orders of examples", _orders_of_examples_do_not_matter, _training(_transposed), 0.1),
    Mutation("cast before adding", _casts_before_adding, _training(_halved), 1e-4),
    Mutation("tied gradient", _second_use_is_dropped, _training(_tied), 0.1),
    Mutation("sort per microbatch", _order_within_a_microbatch, _training(_order), 0.1),
    Mutation("argmax per microbatch", _argmax_within_a_microbatch, _training(_best), 0.0),
    Mutation(
        "table per microbatch", _tables_are_added_in_every_microbatch, _training(_counted), 0.1
    ),
    Mutation("numbers as sizes", _numbers_are_sizes, _training(_column), 0.1),
    Mutation("statistics per microbatch", _statistics_per_microbatch, _training(_batch_norm), 0.1),
)

NOT_IN_MICROBATCHES = {"statistics per microbatch", "orders of examples"}
"""Exact only at M = 1: refused otherwise."""


def _found(step: Any, num_microbatches: int) -> list[Any]:
    params, batch = _arguments()
    traced = trace(step, (params, batch), {})
    program = split(traced, num_microbatches, SplitOptions())
    actual = jax.tree.unflatten(traced.out_tree, evaluate(program, (params, batch), compiled=True))
    expected = jax.jit(step)(params, batch)
    strong = lambda x: lax.convert_element_type(x, x.dtype)  # noqa: E731
    return differences(jax.tree.map(strong, actual), jax.tree.map(strong, expected))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mistake_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation.name in NOT_IN_MICROBATCHES:
        with pytest.raises(hp.HetpassError, match="HP-SPLIT-MIXES"):
            _found(mutation.step, M)
    else:
        assert _found(mutation.step, M) == []
    mutation.mistake(monkeypatch)
    found = _found(mutation.step, M)
    assert found, "the mistake was not noticed"
    assert max(d.relative for d in found) >= mutation.shouts


# ---------------------------------------------------------------------------------------------
# Mistakes of the runtime's programs, on the whole pipeline


def _compiled_differences(update: Callable[..., Any] | None = None) -> list[Any]:
    params, batch = _arguments()
    step = hp.het_parallelize(
        _training(lambda p, b: (_masked(p, b)[0], _losses(p, b)), update),
        cluster=hp.Cluster.emulated({"a": 2, "b": 1}),
        num_microbatches=M,
        donate_argnums=(),
    )
    expected = step.jitted()(params, batch)
    compiled = step.trace(params, batch).with_plan("a(data=2): 0 | b: 1").compile()
    return differences(compiled(params, batch), expected)


def test_the_whole_pipeline_is_right() -> None:
    assert _compiled_differences() == []


def test_labels_of_another_microbatch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lower._Lowering._read

    def wrong(self: Any, source: Any, aval: Any, held: Any, number: Any) -> Any:
        if isinstance(source, ReadRow) and len(aval.shape) == 1:  # the mask
            number = (number + 1) % M
        return right(self, source, aval, held, number)

    monkeypatch.setattr(lower._Lowering, "_read", wrong)
    found = _compiled_differences()
    assert max(d.relative for d in found) > 5e-3


def test_sums_divided_by_the_number_of_microbatches_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = lower.pairwise

    def wrong(op: Any, left: Any, value: Any) -> Any:
        return right(op, left, value / M if op == "sum" else value)

    monkeypatch.setattr(lower, "pairwise", wrong)
    assert max(d.relative for d in _compiled_differences()) > 0.7


def test_a_norm_of_one_stage_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other stages add to the global norm is lost: each clips by what it has itself."""
    assert _compiled_differences(_clip) == []
    right = lower._Lowering._read

    def wrong(self: Any, source: Any, aval: Any, held: Any, number: Any) -> Any:
        value = right(self, source, aval, held, number)
        if number is None and isinstance(source, Read) and aval.shape == ():
            received = {t.target: t.source for t in self.staged.transfers}
            if source.slot in received and _phase(self.staged, received[source.slot]) == 0:
                return jnp.zeros_like(value)
        return value

    monkeypatch.setattr(lower._Lowering, "_read", wrong)
    assert max(d.relative for d in _compiled_differences(_clip)) > 0.05


def _phase(staged: Any, slot: int) -> int:
    """Of the epilogue fragment that writes the slot; -1: none does."""
    writers = [f for f in staged.fragments if any(o.slot == slot for o in f.outputs)]
    return max((f.phase for f in writers if f.role == "epilogue"), default=-1)
