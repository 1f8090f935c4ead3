"""The step at B, 2B and 3B laid side by side: what grows with the batch, and how.

The three traces must correspond equation by equation. Sizes that differ must be affine in the
batch, fitted on two traces and verified on the third; from the fit the program at any b is
instantiated. Numbers that are values, not sizes (the 1/N of a mean, a clip bound), stay those of
the full batch: a mean's partial sums then add up to the full mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpass import _jax
from hetpass._jax import Jaxpr, JaxprEqn, Literal, Var

Growth = tuple[int, ...] | None
"""Per dimension how much its size grows from B to 2B (0: free of the batch). None: some size is
not affine in the batch."""

SIZE_PARAMS = frozenset(
    {
        "shape",
        "new_sizes",
        "sizes",
        "start_indices",
        "limit_indices",
        "slice_sizes",
        "length",
        "batch_group_count",
        "feature_group_count",
        "window_dimensions",
        "padding_config",
        "padding",
        "k",
    }
)
"""Parameters that hold sizes. Any other number that differs is a value and is kept from B."""

NESTED_PARAMS = frozenset({"jaxpr", "branches", "cond_jaxpr", "body_jaxpr"})


class ProbeMismatch(Exception):
    """The traces do not correspond. `str()` is a sentence for the user, `where` the user's line,
    `function` what it called."""

    def __init__(self, what: str, where: str = "", function: str = "") -> None:
        super().__init__(what)
        self.where, self.function = where, function


@dataclass
class Probes:
    """What `compare` found.

    Attributes:
      growth: of every variable at B, also inside nested jaxprs.
      doubled: id of an equation at B -> its equation at 2B.
    """

    growth: dict[Var, Growth] = field(default_factory=dict)
    doubled: dict[int, JaxprEqn] = field(default_factory=dict)


def compare(jaxprs: Sequence[Jaxpr]) -> Probes:
    """Lay the traces at B, 2B, 3B side by side.

    Raises:
      ProbeMismatch: they do not correspond equation by equation.
    """
    found = Probes()
    _compare(tuple(jaxprs), found)
    return found


def _compare(jaxprs: tuple[Jaxpr, ...], found: Probes, inside: JaxprEqn | None = None) -> None:
    numbering: list[dict[Var, int]] = [{} for _ in jaxprs]

    def define(variables: tuple[Var, ...]) -> None:
        for table, var in zip(numbering, variables, strict=True):
            table[var] = len(table)
        found.growth[variables[0]] = _growth([v.aval for v in variables])

    firsts = [[*j.constvars, *j.invars] for j in jaxprs]
    if len({len(f) for f in firsts}) != 1:
        raise _mismatch("takes another number of values at another batch size", inside)
    for variables in zip(*firsts, strict=True):
        define(variables)
    for i, eqn in enumerate(jaxprs[0].eqns):
        others = [j.eqns[i] if i < len(j.eqns) else None for j in jaxprs[1:]]
        _check_equation(eqn, others, numbering)
        eqns = (eqn, *(e for e in others if e is not None))
        for variables in zip(*(e.outvars for e in eqns), strict=True):
            define(variables)
        for name in eqn.params:
            if name in NESTED_PARAMS:
                for nested in zip(*(_nested(e.params[name]) for e in eqns), strict=True):
                    _compare(nested, found, eqn)
        found.doubled[id(eqn)] = eqns[1]
    if any(len(j.eqns) != len(jaxprs[0].eqns) for j in jaxprs):
        raise _mismatch("has more equations at a larger batch", inside or _first_added(jaxprs))
    outs = [_reads(j.outvars, table) for j, table in zip(jaxprs, numbering, strict=True)]
    if any(o != outs[0] for o in outs):
        other = next(k for k, reads in enumerate(zip(*outs, strict=True)) if len(set(reads)) > 1)
        maker = inside or _maker(jaxprs[0], jaxprs[0].outvars[other])
        raise _mismatch("returns other values at another batch size", maker)


def _mismatch(what: str, eqn: JaxprEqn | None) -> ProbeMismatch:
    """Of the whole step, or of what an equation holds."""
    if eqn is None:
        return ProbeMismatch(f"it {what}")
    frame = _jax.user_frame(eqn)
    return ProbeMismatch(
        f"`{eqn.primitive.name}` ({frame}) {what}", frame, _jax.library_function(eqn)
    )


def _maker(jaxpr: Jaxpr, atom: Any) -> JaxprEqn | None:
    return next((e for e in jaxpr.eqns if any(v is atom for v in e.outvars)), None)


def _first_added(jaxprs: Sequence[Jaxpr]) -> JaxprEqn:
    count = len(jaxprs[0].eqns)
    return next(j.eqns[count] for j in jaxprs if len(j.eqns) > count)


def _check_equation(
    eqn: JaxprEqn, others: Sequence[JaxprEqn | None], numbering: Sequence[dict[Var, int]]
) -> None:
    reads = _reads(eqn.invars, numbering[0])
    for k, other in enumerate(others):
        fault = _fault(eqn, other, reads, numbering[k + 1])
        if fault:
            frame = _jax.user_frame(eqn)
            where = f"`{eqn.primitive.name}` ({frame})"
            what = f"at {k + 2} times the batch {fault.format(where=where)}"
            raise ProbeMismatch(what, frame, _jax.library_function(eqn))


def _fault(
    eqn: JaxprEqn, other: JaxprEqn | None, reads: list[int], numbering: dict[Var, int]
) -> str:
    """Why an equation has no equal in another trace; "" if it has."""
    if other is None:
        return "it has no equation that matches {where}"
    if other.primitive is not eqn.primitive:
        return f"{{where}} becomes `{other.primitive.name}`"
    if reads != _reads(other.invars, numbering) or len(eqn.outvars) != len(other.outvars):
        return "{where} reads other values"
    for a, b in zip([*eqn.invars, *eqn.outvars], [*other.invars, *other.outvars], strict=True):
        if len(getattr(a.aval, "shape", ())) != len(getattr(b.aval, "shape", ())):
            return "{where} has values of another rank"
    return ""


def _reads(atoms: Sequence[Any], numbering: dict[Var, int]) -> list[int]:
    return [-1 if isinstance(a, Literal) else numbering[a] for a in atoms]


def _nested(param: Any) -> list[Jaxpr]:
    params = param if isinstance(param, tuple) else (param,)
    return [_jax.open_jaxpr(p)[0] for p in params if _jax.is_jaxpr(p)]


def _growth(avals: Sequence[Any]) -> Growth:
    shapes = [getattr(a, "shape", ()) for a in avals]
    steps = []
    for sizes in zip(*shapes, strict=True):
        differences = {b - a for a, b in zip(sizes, sizes[1:], strict=False)}
        if len(differences) > 1:
            return None
        steps.append(differences.pop() if differences else 0)
    return tuple(steps)


def at_microbatch(full: Any, doubled: Any, num_microbatches: int) -> Any:
    """A size (or nested tuple of sizes) at b = B / M from its values at B and 2B.

    Raises:
      ValueError: it is not a whole number there, or negative.
    """
    if isinstance(full, (tuple, list)):
        parts = [at_microbatch(f, d, num_microbatches) for f, d in zip(full, doubled, strict=True)]
        return type(full)(parts) if not hasattr(full, "_fields") else type(full)(*parts)
    if isinstance(full, bool) or not _is_integer(full) or full == doubled:
        return full
    shrink = (int(doubled) - int(full)) * (num_microbatches - 1)
    if shrink % num_microbatches:
        raise ValueError(f"{full} at B and {doubled} at 2B is no whole number at B / M")
    size = int(full) - shrink // num_microbatches
    if size < 0 <= int(full):
        raise ValueError(f"{full} at B would be {size} at B / M")
    return size


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__")
