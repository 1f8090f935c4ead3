"""scan, while and cond: their bodies obey the same rules; carries go to a fixpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetpass import _jax
from hetpass._jax import Jaxpr, JaxprEqn, Literal, Var
from hetpass.frontend.probes import NESTED_PARAMS
from hetpass.frontend.rules.values import (
    WHOLE,
    Context,
    Mixes,
    Rule,
    Val,
    check_result,
    is_partial,
    join,
    literal,
)
from hetpass.ir.kinds import Batched, Partial, Position, Whole


def run_body(jaxpr: Jaxpr, inputs: Sequence[Val], ctx: Context) -> list[Val]:
    """The kinds of a nested jaxpr's results; those of its variables go to `ctx.nested`."""
    env: dict[Var, Val] = dict(zip(jaxpr.invars, inputs, strict=True))
    env.update((v, WHOLE) for v in jaxpr.constvars)
    if jaxpr.eqns and any(ctx.grows(v) for v in jaxpr.constvars):
        raise Mixes(jaxpr.eqns[0], "stands beside a captured array of the size of the batch")

    def read(atom: Any) -> Val:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        results = ctx.apply(eqn, [read(a) for a in eqn.invars], ctx)
        env.update(zip(eqn.outvars, results, strict=True))
    ctx.nested.update(env)
    return [read(a) for a in jaxpr.outvars]


def _fixpoint(
    eqn: JaxprEqn,
    jaxpr: Jaxpr,
    fixed: Sequence[Val],
    carry: list[Val],
    xs: Sequence[Val],
    ctx: Context,
) -> tuple[list[Val], list[Val]]:
    """(carry, other results) once the carry's kinds no longer change.

    A kind can only rise (zero to anything, any layout to one), so that two or three rounds do.
    """
    for _ in range(2 * len(carry) + 2):
        results = run_body(jaxpr, [*fixed, *carry, *xs], ctx)
        after = [join(eqn, a, b) for a, b in zip(carry, results, strict=False)]
        if after == carry:
            return carry, results[len(carry) :]
        carry = after
    raise Mixes(eqn, "carries a value whose relation to the batch does not settle")


def scan(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    num_consts, num_carry = _jax.scan_counts(eqn)
    body, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
    consts, carry = vals[:num_consts], list(vals[num_consts : num_consts + num_carry])
    xs = vals[num_consts + num_carry :]
    if any(v.along_batch and v.kind.dim == 0 for v in xs):
        return _map_examples(eqn, body, consts, carry, xs, ctx)
    items = [_item(v) for v in xs]
    carry, ys = _fixpoint(eqn, body, consts, [_settled(v) for v in carry], items, ctx)
    return [*carry, *(_stacked(v) for v in ys)]


def _settled(val: Val) -> Val:
    """Positions and columns are facts of one iteration only; a carried position may move."""
    if isinstance(val.kind, Position):
        return Val(Batched(val.kind.dim, 1), val.factors)
    return Val(val.kind, val.factors, 0 if val.zero else None)


def _item(val: Val) -> Val:
    """One iteration's slice of a stacked input."""
    if val.along_batch:
        kind = val.kind
        if isinstance(kind, Position):
            return Val(Position(kind.dim - 1, kind.plus), val.factors)
        return Val(Batched(kind.dim - 1, kind.outer), val.factors, val.const)
    return Val(val.kind, val.factors, val.const)


def _stacked(val: Val) -> Val:
    if val.along_batch:
        return Val(Batched(val.kind.dim + 1, getattr(val.kind, "outer", 1)), val.factors)
    return Val(val.kind, val.factors, 0 if val.zero else None)


def _map_examples(
    eqn: JaxprEqn,
    body: Jaxpr,
    consts: Sequence[Val],
    carry: Sequence[Val],
    xs: Sequence[Val],
    ctx: Context,
) -> list[Val]:
    """`lax.map` over the batch: one iteration is one example, and nothing is carried."""
    if eqn.params["length"] != ctx.batch_size or not all(
        v.along_batch and v.kind.dim == 0 and getattr(v.kind, "outer", 1) in (1, None) for v in xs
    ):
        raise Mixes(eqn, "loops over the batch beside something else")
    if any(v.along_batch or is_partial(v) for v in consts):
        raise Mixes(eqn, "lets one example read the whole batch")
    _require_per_example(eqn, body, ctx)
    sums = [_carried(eqn, body, len(consts) + i, i, v) for i, v in enumerate(carry)]
    # One example knows of no batch; the scales that values wait for go through the body.
    starts = [Val(Whole(), v.factors, 0 if v.zero else None) for v in carry]
    items = [Val(Whole(), v.factors) for v in xs]
    after, ys = _fixpoint(eqn, body, consts, starts, items, ctx)
    ctx.nested.update((v, WHOLE) for v in all_variables(body))
    return [
        *(Val(v.kind, scaled.factors, v.const) for v, scaled in zip(sums, after, strict=True)),
        *(Val(Batched(0, 1), v.factors) for v in ys),
    ]


def _carried(eqn: JaxprEqn, body: Jaxpr, position: int, index: int, start: Val) -> Val:
    """A carry of a loop over examples: unchanged, or zero plus one term per example.

    The second is how the gradient of a closed-over parameter is summed.
    """
    carried, result = body.invars[position], body.outvars[index]
    if result is carried:
        return start
    if isinstance(result, Literal):
        return _replaced(eqn, body, carried)
    chain: set[Var] = {carried}
    for inner in body.eqns:
        on_chain = [a for a in inner.invars if isinstance(a, Var) and a in chain]
        if not on_chain:
            continue
        if inner.primitive.name not in ("add", "add_any") or len(on_chain) != 1:
            raise Mixes(eqn, "carries a value from example to example")
        chain.update(inner.outvars)
    uses = [a for inner in body.eqns for a in inner.invars if isinstance(a, Var) and a in chain]
    elsewhere = [a for i, a in enumerate(body.outvars) if i != index and isinstance(a, Var)]
    others = [a for a in elsewhere if a in chain]
    linear = len(uses) == len(set(uses)) and not others and result in chain and result not in uses
    if not linear or not (start.zero or is_partial(start)):
        raise Mixes(eqn, "carries a value from example to example")
    return Val(Partial("sum"))


def _replaced(eqn: JaxprEqn, body: Jaxpr, carried: Var) -> Val:
    """A carry that every example sets to the same number, and none reads."""
    reads = [a for inner in body.eqns for a in inner.invars] + list(body.outvars)
    if any(a is carried for a in reads):
        raise Mixes(eqn, "carries a value from example to example")
    return WHOLE


def _require_per_example(eqn: JaxprEqn, body: Jaxpr, ctx: Context) -> None:
    """One example at a time, nothing inside may have the size of the batch."""
    for var in all_variables(body):
        if ctx.grows(var):
            raise Mixes(eqn, "lets one example read the whole batch")


def all_variables(jaxpr: Jaxpr) -> list[Var]:
    """The variables of a jaxpr and of those inside it."""
    found = [*jaxpr.constvars, *jaxpr.invars]
    for inner in jaxpr.eqns:
        found += inner.outvars
        for name in NESTED_PARAMS & set(inner.params):
            param = inner.params[name]
            for nested in param if isinstance(param, tuple) else (param,):
                if _jax.is_jaxpr(nested):
                    found += all_variables(_jax.open_jaxpr(nested)[0])
    return [v for v in found if isinstance(v, Var)]


def while_(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    params = eqn.params
    cond, _ = _jax.open_jaxpr(params["cond_jaxpr"])
    body, _ = _jax.open_jaxpr(params["body_jaxpr"])
    split = params["cond_nconsts"]
    cond_consts, rest = vals[:split], vals[split:]
    body_consts, carry = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :]
    carry, _ = _fixpoint(eqn, body, body_consts, [_settled(v) for v in carry], (), ctx)
    (decision,) = run_body(cond, [*cond_consts, *carry], ctx)
    if not isinstance(decision.kind, Whole) or decision.factors:
        raise Mixes(eqn, "loops until something holds for the whole batch")
    return carry


def cond(eqn: JaxprEqn, vals: Sequence[Val], ctx: Context) -> list[Val]:
    index, operands = vals[0], vals[1:]
    if not isinstance(index.kind, Whole) or index.factors:
        raise Mixes(eqn, "chooses a branch by the whole batch")
    branches = [_jax.open_jaxpr(b)[0] for b in eqn.params["branches"]]
    results = run_body(branches[0], operands, ctx)
    for branch in branches[1:]:
        others = run_body(branch, operands, ctx)
        results = [join(eqn, a, b) for a, b in zip(results, others, strict=True)]
    for var, val in zip(eqn.outvars, results, strict=True):
        check_result(eqn, var, val, ctx)
    return [Val(v.kind, v.factors, 0 if v.zero else None) for v in results]


RULES: dict[str, Rule] = {"scan": scan, "while": while_, "cond": cond}
