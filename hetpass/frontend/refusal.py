"""What a refused step is told: the equation that a person can act on, and the ways out that fit it.

An equation is refused for what stands before it. Of everything that holds it up, what mixes
examples by its nature (a sort, a loop, a cut through the batch) says more than the arithmetic that
follows from it, and an earlier equation more than a later one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp

from hetpass import _jax
from hetpass._jax import JaxprEqn, Literal
from hetpass.errors import SplitError
from hetpass.frontend.phases import Phases
from hetpass.frontend.rules.values import Mixes
from hetpass.ir.program import Traced
from hetpass.ir.quantities import counted

_SORTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys("sort top_k argmax argmin reduce".split(), "order"),
        **dict.fromkeys(
            "cumsum cumprod cummax cummin cumlogsumexp rev reduce_window reduce_window_sum "
            "reduce_window_max fft".split(),
            "neighbours",
        ),
        **dict.fromkeys(
            "concatenate split slice dynamic_slice dynamic_update_slice unstack squeeze pad "
            "gather".split(),
            "pieces",
        ),
        "reshape": "torn",
        **dict.fromkeys("dot_general conv_general_dilated".split(), "pairs"),
        "while": "while",
        "cond": "cond",
        "scan": "scan",
    }
)
"""Primitives that mix examples by their nature -> what fits."""

_SEVERAL_SUMS = (
    "take the gradient of each sum by itself and combine them after: s, J = sums(p), "
    "jax.jacrev(sums)(p); weights = jax.grad(combine)(s); one backward pass per sum "
    "(docs/exactness.md)"
)
_ORDER = (
    "weigh the examples by a threshold that is known before, from the state: "
    "jnp.where(loss > threshold, loss, 0.0)",
    "keep it as a metric, with no gradient through it",
)
_NO_LOOP = "no accumulation loop of your own: num_microbatches cuts the batch"
_LAST_STEP = "take last step's value, kept in the state"

_WAYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "order": _ORDER,
        "neighbours": (
            "if this is no dimension of examples, say so: hp.Options(batch_axes={...})",
            "do it to the inputs, before the model",
        ),
        "torn": (_NO_LOOP, "mix examples in the inputs, before the model"),
        "pieces": (
            "give the parts to the model one by one, f(p, a) and f(p, b), not joined along the "
            "batch; or joined along another dimension: jnp.stack([a, b], axis=1)",
            "mix examples in the inputs, before the model",
            _NO_LOOP,
        ),
        "pairs": (
            "compare with examples that are known before: a queue of earlier results, kept in the "
            "state",
        ),
        "while": (
            "jax.lax.map over the examples in place of jax.vmap: each loops for itself",
            "as many rounds for all, with a mask: lax.fori_loop(0, most, ...) and "
            "jnp.where(i < rounds, new, old)",
        ),
        "cond": ("choose for each example: jnp.where", f"{_LAST_STEP}, to choose by"),
        "scan": ("carry only sums of one term per example, from zeros",),
        "sum": (
            "normalize each example by itself (layer norm, group norm), or by statistics of "
            "earlier steps, kept in the state",
            f"for a loss of several sums (a variance, a ratio): {_SEVERAL_SUMS}",
        ),
        "max": ("take the maximum of each example by itself", _LAST_STEP),
        "min": ("take the minimum of each example by itself", _LAST_STEP),
        "or": ("decide for each example by itself", _LAST_STEP),
        "and": ("decide for each example by itself", _LAST_STEP),
        "prod": ("jnp.exp(jnp.log(x).sum()) for positive x",),
        "scales": (
            _SEVERAL_SUMS,
            "denominators that are known before the model: from labels or masks",
        ),
        "start": (
            "if it is a sum that you accumulate: start it at zeros, and add the value behind it",
            "if it is an update that a second loss goes by (two players, a line search): take all "
            "gradients at the values before it, or decorate each update as a step of its own",
        ),
    }
)

_DRAWS = frozenset({"poisson", "binomial"})
_FUNCTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "logsumexp": (
            "jnp.log(jnp.exp(x - c).sum()) + c, with a number c that is free of the batch",
        ),
        **{
            name: (
                f"a key per example: jax.lax.map(lambda a: jax.random.{name}(*a), "
                "(jax.random.split(key, x.shape[0]), ...)), which gives other numbers",
                "draw before the step, and pass the numbers with the batch",
            )
            for name in _DRAWS
        },
        **dict.fromkeys("median nanmedian percentile quantile sort argsort".split(), _ORDER),
    }
)
"""Functions of JAX that a user calls -> what fits, whatever primitive was refused."""

_MODULES = (jnp, jax.lax, jax.random, jax.nn)
"""Where functions that people call are found."""

_ONE = "num_microbatches=1 (the step still runs in stages)"
_EACH_FOR_ITSELF = (
    'hp.Options(batch_statistics="per_microbatch"), for experts routing="per_microbatch": every '
    "microbatch for itself, which is another result"
)
_ALIKE = "rewrite the line so that every example is treated alike"


def mixes_refusal(
    traced: Traced, phases: Phases, index: int, share: float, num_microbatches: int
) -> SplitError:
    """HP-SPLIT-MIXES: heavy work would have to follow a value of the whole batch.

    Args:
      index: the first heavy equation that would.
      share: of the work on the batch that would.
    """
    follower = traced.jaxpr.eqns[index]
    root = root_cause(phases, index)
    return SplitError(
        "HP-SPLIT-MIXES",
        f"{root.named} {root.reason.reason}, and heavy work follows it: "
        f"{traced.name} has no equal in {counted(num_microbatches, 'microbatch')}",
        where=root.place or _jax.user_frame(follower) or _jax.name_stack(root.eqn),
        details=[
            f"equation: {describe(root.reason.eqn)}",
            f"what follows would run on the whole batch at once, first "
            f"`{follower.primitive.name}` ({_jax.user_frame(follower)}): "
            f"{100 * share:.0f} % of the work on the batch",
        ],
        ways_out=[*(root.ways_out or (_ALIKE,)), _ONE, _EACH_FOR_ITSELF],
    )


def probe_ways_out(traced: Traced) -> list[str]:
    """Of a step that is another program at another batch size, or has no batch."""
    if traced.batch_size is None:
        arguments = traced.inputs[: len(traced.inputs) - len(traced.constants)]
        keywords = dict.fromkeys(
            re.split(r"[\[.]", leaf.path)[0]
            for leaf in arguments
            if leaf.argnum is None and leaf.aval.shape
        )
        return [
            "num_microbatches=1",
            "batch_argnums naming the argument whose leading dimension is the batch",
            *(f"hp.Options(batch_axes={{{name!r}: 0}}) if {name} is it" for name in keywords),
        ]
    if traced.probe_function == "prod":
        return [
            "of a metric that is not differentiated: jnp.prod(jax.lax.stop_gradient(x))",
            "jnp.exp(jnp.log(x).sum()) for positive x, or the sum of the logarithms as the loss: "
            "the gradient of a product is another program for every number of factors",
            _ONE,
        ]
    special = (
        f"another batch size: at {traced.batch_size} alone it is another program, as where the "
        "batch is as large as a width and JAX lets a weight and an activation share a place",
    )
    return [
        *(special if traced.probes_agree else ()),
        *_by_example(traced),
        "write the step for any number of examples: take sizes from x.shape, not from constants",
        "no equations per example (a Python loop over the batch, lax.associative_scan): "
        "jnp on all of them at once, or jax.lax.map",
        _ONE,
    ]


def _by_example(traced: Traced) -> list[str]:
    """State that has as many rows as there are examples (a cache, a hidden state) may be theirs."""
    rows = [
        leaf.path
        for leaf in traced.inputs
        if leaf.argnum is not None
        and leaf.batch_dim is None
        and leaf.aval.shape[:1]
        and leaf.aval.shape[0] == traced.batch_size
    ]
    return [
        f"if {path} holds a row per example, so that it grows with the batch: "
        f"hp.Options(batch_axes={{{path!r}: 0}})"
        for path in rows[:3]
    ]


@dataclass(frozen=True)
class Root:
    """What a refusal is about.

    Attributes:
      reason: with the innermost equation.
      eqn: of the step itself; it may hold the other one.
    """

    reason: Mixes
    eqn: JaxprEqn

    @property
    def function(self) -> str:
        """The function of JAX that the user called; "" if none is known."""
        name = _jax.library_function(self.reason.eqn) or _jax.library_function(self.eqn)
        return name if any(hasattr(module, name) for module in _MODULES) else ""

    @property
    def named(self) -> str:
        """The equation by its primitive, and by the function that the user called."""
        primitive, function = self.reason.eqn.primitive.name, self.function
        alike = (primitive, f"{primitive}_loop", primitive.removeprefix("reduce_"))
        plain = not function or function in alike
        return f"`{primitive}`" if plain else f"`{primitive}` of `{function}`"

    @property
    def place(self) -> str:
        """The user's line."""
        return _jax.user_frame(self.reason.eqn) or _jax.user_frame(self.eqn)

    @property
    def ways_out(self) -> Sequence[str]:
        """What fits this cause; () if nothing is known but what fits all."""
        by_nature = _SORTS.get(self.reason.eqn.primitive.name, "")
        return _FUNCTIONS.get(self.function) or _WAYS.get(self.reason.cause or by_nature, ())


def root_cause(phases: Phases, index: int) -> Root:
    """Of all refusals that hold an equation up, the one that a person can act on."""
    eqns = phases.traced.jaxpr.eqns
    found: list[tuple[int, int, Root]] = []
    seen: set[int] = set()
    pending = [index]
    while pending:
        place = pending.pop()
        if place in seen:
            continue
        seen.add(place)
        for reason in _reasons(phases, place):
            found.append((_rank(phases, place, reason), place, Root(reason, eqns[place])))
        for atom in eqns[place].invars:
            producer = None if isinstance(atom, Literal) else phases.producer.get(atom)
            if producer is not None and phases.info[atom].val is None:
                pending.append(producer)
    if not found:
        return Root(Mixes(eqns[index], "needs the whole batch"), eqns[index])
    return min(found, key=lambda entry: entry[:2])[2]


def _reasons(phases: Phases, place: int) -> Iterator[Mixes]:
    """Of an equation itself: why it is late, or gives nothing that the region could take."""
    eqn = phases.traced.jaxpr.eqns[place]
    known = {id(r): r for v in eqn.outvars for r in [phases.mixed.get(v)] if r is not None}
    late = phases.reasons.get(place)
    if late is not None:
        known[id(late)] = late
    yield from known.values()
    if _SORTS.get(eqn.primitive.name) == "order" and late is not None and late.eqn is not eqn:
        if phases.context.grows(eqn.invars[0]):  # it waits for something else, and would be refused
            yield Mixes(eqn, "works along the batch")


def _rank(phases: Phases, place: int, reason: Mixes) -> int:
    if reason.cause == "shape" or place in phases.tails:
        return 2
    by_nature = reason.cause == "start" or reason.eqn.primitive.name in _SORTS
    return 0 if by_nature and reason.cause in ("", "start") else 1


def describe(eqn: JaxprEqn) -> str:
    """An equation in one line: results, primitive, operands."""

    def short(atom: object) -> str:
        return str(getattr(atom, "aval", atom))

    ins = ", ".join(short(a) for a in eqn.invars[:6])
    outs = ", ".join(short(v) for v in eqn.outvars[:4])
    return f"{outs} = {eqn.primitive.name}({ins}{', …' if len(eqn.invars) > 6 else ''})"
