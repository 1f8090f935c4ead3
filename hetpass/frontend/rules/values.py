"""What the rules pass around: values with their kinds, and the refusal to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from hetpass import _jax
from hetpass._jax import JaxprEqn, Var
from hetpass._jax import Literal as JaxLiteral
from hetpass.frontend.probes import Growth
from hetpass.ir.kinds import Batched, Kind, Partial, Position, Whole


@dataclass(frozen=True)
class Val:
    """What is known of a value in the microbatch program.

    Attributes:
      kind: how it relates to the batch.
      factors: full-batch scalars, known only after the region, that the value still has to be
        multiplied by. The gradient of (mean loss)^2 is `2 * loss` times a region value: the
        region computes the value, the epilogue multiplies.
      const: the number that it holds everywhere, if known.
      columns: for integer indices, the value of each column of the last dimension.
    """

    kind: Kind
    factors: tuple[Var, ...] = ()
    const: Any = None
    columns: tuple[Val, ...] | None = None

    @property
    def zero(self) -> bool:
        return self.const is not None and self.const == 0

    @property
    def along_batch(self) -> bool:
        return isinstance(self.kind, (Batched, Position))


WHOLE = Val(Whole())


Cause = Literal["", "sum", "max", "min", "prod", "or", "and", "scales", "start", "shape"]
"""Why an equation is refused, where its primitive does not say it: it needs a reduction over the
batch whole; adds what waits for different sums; adds a sum to what is no zero; a shape that is only
a consequence of something before."""


class Mixes(Exception):
    """The equation is not proved to act example by example, or needs a sum whole.

    Attributes:
      eqn: the innermost equation.
      reason: a clause for the message, "sorts along the batch".
    """

    def __init__(self, eqn: JaxprEqn, reason: str, cause: Cause = "") -> None:
        self.eqn = eqn
        self.reason = reason
        self.cause: Cause = cause
        super().__init__(f"`{eqn.primitive.name}` {reason}")


_WORDS: Mapping[str, str] = MappingProxyType(
    {"max": "maximum", "min": "minimum", "prod": "product", "or": "logical or",
     "and": "logical and"}
)  # fmt: skip


def needs_full(eqn: JaxprEqn, vals: Iterable[Val]) -> Mixes:
    """The refusal of an equation that needs the full value of a partial operand."""
    ops = {v.kind.op for v in vals if isinstance(v.kind, Partial)}
    if len(ops) > 1:
        return Mixes(eqn, "combines different reductions over the batch", "sum")
    op: Cause = "sum"
    for known in ("max", "min", "prod", "or", "and"):
        op = known if known in ops else op
    return Mixes(eqn, f"needs the full {_WORDS.get(op, op)} over the batch", op)


@dataclass(frozen=True)
class Draw:
    """The equation makes a batch dimension from whole operands (random bits, iota): the region
    makes the full-batch value and takes the microbatch's slice."""

    kind: Batched


@dataclass(frozen=True)
class Rebase:
    """Index columns that count examples of the full batch: the region subtracts its offset."""

    operand: int
    columns: tuple[int, ...]


Action = Draw | Rebase


@dataclass
class Context:
    """What rules may look up, and where they note what the region must do differently.

    Attributes:
      growth: of every variable at B.
      batch_size: B.
      apply: the rule for any equation; bodies of control flow are walked with it.
      actions: by id of the equation.
      nested: kinds of variables inside nested jaxprs.
    """

    growth: Mapping[Var, Growth]
    batch_size: int
    apply: Callable[[JaxprEqn, Sequence[Val], Context], list[Val]]
    actions: dict[int, Action] = field(default_factory=dict)
    nested: dict[Var, Val] = field(default_factory=dict)

    def growth_of(self, atom: Any) -> Growth:
        if isinstance(atom, JaxLiteral):
            return (0,) * len(getattr(atom.aval, "shape", ()))
        return self.growth[atom]

    def grows(self, atom: Any) -> bool:
        growth = self.growth_of(atom)
        return growth is None or any(growth)

    def batch_dims(self, atom: Any) -> list[int] | None:
        growth = self.growth_of(atom)
        return None if growth is None else [d for d, g in enumerate(growth) if g]


Rule = Callable[[JaxprEqn, Sequence[Val], Context], list[Val]]


def literal(atom: JaxLiteral) -> Val:
    value = atom.val
    for plain in (bool, int, float):  # JAX's typed numbers are subclasses
        if isinstance(value, plain):
            return Val(Whole(), const=plain(value))
    return Val(Whole(), const=_item(value))


def _item(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () else None


def check_result(eqn: JaxprEqn, var: Var, val: Val, ctx: Context) -> None:
    """Shapes must agree with what the rule proved.

    Raises:
      Mixes: a dimension grows with the batch that the kind does not know of, or the other way.
    """
    dims = ctx.batch_dims(var)
    if dims is None:
        raise Mixes(eqn, "has a size that is no multiple of the batch")
    kind = val.kind
    if isinstance(kind, (Batched, Position)):
        shape = var.aval.shape
        size = shape[kind.dim] if kind.dim < len(shape) else 0
        growth = ctx.growth_of(var)
        unit = ctx.batch_size * (getattr(kind, "outer", 1) or 1)
        if dims != [kind.dim] or growth is None or growth[kind.dim] != size or size % unit:
            raise Mixes(
                eqn, f"gives {tuple(shape)}, where examples do not lie as expected", "shape"
            )
    elif dims:
        raise Mixes(eqn, "makes a dimension that grows with the batch", "shape")


def join_batched(eqn: JaxprEqn, vals: Sequence[Val]) -> Batched | None:
    """The common layout of the operands along the batch; None if none is along it."""
    found: Batched | None = None
    for val in vals:
        if not val.along_batch:
            continue
        kind = val.kind if isinstance(val.kind, Batched) else Batched(val.kind.dim, 1)
        if found is None or found == kind:
            found = kind
        elif found.dim != kind.dim:
            raise Mixes(eqn, "combines values whose examples lie along different dimensions")
        elif found.outer is None:
            found = kind
        elif kind.outer is not None:
            raise Mixes(eqn, "combines values whose examples lie in different orders")
    return found


def join(eqn: JaxprEqn, a: Val, b: Val) -> Val:
    """The least value that both are: for carries of loops and branches of conditionals."""
    if a == b:
        return a
    if a.zero and not a.along_batch:
        return Val(b.kind, b.factors)
    if b.zero and not b.along_batch:
        return Val(a.kind, a.factors)
    factors = b.factors if a.zero else a.factors
    if not a.zero and not b.zero and sorted(map(id, a.factors)) != sorted(map(id, b.factors)):
        raise Mixes(eqn, "joins values that are scaled differently")
    if a.along_batch and b.along_batch:
        kind = join_batched(eqn, [a, b])
        assert kind is not None
        return Val(kind, factors)
    if type(a.kind) is not type(b.kind) or a.kind != b.kind:
        raise Mixes(eqn, f"joins a {a.kind} with a {b.kind} value")
    return Val(a.kind, factors)


def is_partial(val: Val) -> bool:
    return isinstance(val.kind, Partial)


def frame(eqn: JaxprEqn) -> str:
    return _jax.user_frame(eqn)
