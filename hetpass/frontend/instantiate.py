"""The microbatch program: equations at B, rebuilt at b = B / M.

Sizes come from the fit over the probes; values stay those of the full batch. Batch producers
(random bits, iota) make the full-batch value and take the microbatch's slice, so that example k
gets the number that it gets in the unpipelined step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from hetpass import _jax
from hetpass._jax import Atom, Jaxpr, JaxprEqn, Literal, ShapedArray, Var
from hetpass.frontend.emit import emit
from hetpass.frontend.probes import NESTED_PARAMS, SIZE_PARAMS, Probes, at_microbatch
from hetpass.frontend.rules.values import Context, Draw, Mixes, Rebase, Val
from hetpass.ir.kinds import Batched, Kind, Whole, Zero

_PER_DIMENSION = (
    "start_indices",
    "limit_indices",
    "slice_sizes",
    "window_dimensions",
    "padding_config",
    "padding",
)
"""Parameters with one entry for each dimension of the first operand."""

OFFSET_AVAL = ShapedArray((), jnp.dtype("int32"))


@dataclass
class Region:
    """Builds the region's equations; local to one split.

    Attributes:
      probes, context: sizes, and what rules noted.
      num_microbatches: M.
      values: at B, the kind of every region variable (top level).
      variables: a variable at B -> its variable in the region.
      full_variables: the same for values of the region that are also wanted before it.
      kinds: of every region variable, nested ones too.
      offset: the variable that holds m * b; made when first needed.
      of_slice: numbers that are no sizes of the batch's own dimension are those of one slice too,
        not the full batch's.
    """

    probes: Probes
    context: Context
    num_microbatches: int
    values: Mapping[Var, Val]
    variables: dict[Var, Var] = field(default_factory=dict)
    full_variables: dict[Var, Var] = field(default_factory=dict)
    kinds: dict[Var, Kind] = field(default_factory=dict)
    offset: Var | None = None
    of_slice: bool = False

    def variable(self, var: Var) -> Var:
        """The region's variable for a full-batch one."""
        if var not in self.variables:
            self.variables[var] = self._new(var, self.values[var])
        return self.variables[var]

    def full_kind(self, var: Var) -> Kind:
        """The kind that a value computed before the region has inside it."""
        dims = self.context.batch_dims(var)
        return Batched(dims[0], 1) if dims else Whole()

    def full_variable(self, var: Var) -> Var:
        """The region's variable for a value that is computed before the region too."""
        if var not in self.full_variables:
            self.full_variables[var] = self._new(var, Val(self.full_kind(var)))
        return self.full_variables[var]

    def needs_offset(self) -> Var:
        if self.offset is None:
            self.offset = _jax.make_var(OFFSET_AVAL)
            self.kinds[self.offset] = Whole()
        return self.offset

    def aval(self, var: Var) -> Any:
        """The aval at b.

        Raises:
          ValueError: a size is no whole number there.
        """
        growth = self.context.growth[var]
        if growth is None or not any(growth):
            return var.aval
        shape = at_microbatch(
            tuple(var.aval.shape),
            tuple(s + g for s, g in zip(var.aval.shape, growth, strict=True)),
            self.num_microbatches,
        )
        return var.aval.update(shape=shape)

    def equation(self, eqn: JaxprEqn, ones: Sequence[int], early: Sequence[int]) -> list[JaxprEqn]:
        """The region's equations for one at B.

        Operands numbered in `ones` are replaced by 1; those in `early` are read from before the
        region.
        """
        made: list[JaxprEqn] = []
        operands: list[Atom] = []
        for i, atom in enumerate(eqn.invars):
            if i in ones:
                operands.append(self._one(atom, eqn, made))
            elif isinstance(atom, Literal):
                operands.append(atom)
            else:
                operands.append(self.full_variable(atom) if i in early else self.variable(atom))
        outvars = [self.variable(v) for v in eqn.outvars]
        offset = self.needs_offset() if self._uses_offset(eqn) else None
        self._rebuild(eqn, operands, outvars, offset, made)
        return made

    # -- pieces

    def _new(self, var: Var, val: Val) -> Var:
        new = _jax.make_var(self.aval(var))
        zero = val.zero and isinstance(val.kind, Whole)
        self.kinds[new] = Zero() if zero else val.kind
        return new

    def _one(self, atom: Atom, eqn: JaxprEqn, made: list[JaxprEqn]) -> Atom:
        aval = atom.aval
        (one,) = self._emit(eqn, lambda: jnp.ones(aval.shape, aval.dtype), (), made)
        return one

    def _emit(
        self,
        eqn: JaxprEqn,
        function: Callable[..., Any],
        operands: Sequence[Atom],
        made: list[JaxprEqn],
        results: Sequence[Var] | None = None,
    ) -> list[Atom]:
        """Append the equations of a small function; what they make is whole."""
        eqns, outs = emit(eqn, function, operands, results)
        kept = set(results or ())
        for new in eqns:
            self.kinds.update((v, Whole()) for v in new.outvars if v not in kept)
        made += eqns
        return outs

    def _uses_offset(self, eqn: JaxprEqn) -> bool:
        if id(eqn) in self.context.actions:
            return True
        return any(
            self._uses_offset(inner) for nested in nested_jaxprs(eqn) for inner in nested.eqns
        )

    def _rebuild(
        self,
        eqn: JaxprEqn,
        operands: list[Atom],
        outvars: list[Var],
        offset: Var | None,
        made: list[JaxprEqn],
    ) -> None:
        action = self.context.actions.get(id(eqn))
        if isinstance(action, Draw):
            self._draw(eqn, action, operands, outvars[0], offset, made)
            return
        if isinstance(action, Rebase):
            operands = list(operands)
            operands[action.operand] = self._rebased(eqn, action, operands, offset, made)
        params = self._params(eqn, offset)
        if offset is not None and action is None:
            operands = _with_offset(eqn, operands, offset)
        made.append(_jax.make_eqn(eqn, operands, outvars, params))

    def _draw(
        self,
        eqn: JaxprEqn,
        action: Draw,
        operands: Sequence[Atom],
        out: Var,
        offset: Var | None,
        made: list[JaxprEqn],
    ) -> None:
        assert offset is not None
        full = _jax.make_var(eqn.outvars[0].aval)
        self.kinds[full] = Whole()
        made.append(_jax.make_eqn(eqn, operands, [full]))
        dim = action.kind.dim
        size = out.aval.shape[dim]
        per_example = eqn.outvars[0].aval.shape[dim] // self.context.batch_size

        def take(value: Any, first: Any) -> Any:
            starts = [jnp.int32(0)] * value.ndim
            starts[dim] = first if per_example == 1 else first * per_example
            sizes = list(value.shape)
            sizes[dim] = size
            return jax.lax.dynamic_slice(value, starts, sizes, allow_negative_indices=False)

        self._emit(eqn, take, [full, offset], made, [out])

    def _rebased(
        self,
        eqn: JaxprEqn,
        action: Rebase,
        operands: Sequence[Atom],
        offset: Var | None,
        made: list[JaxprEqn],
    ) -> Atom:
        assert offset is not None
        indices = operands[action.operand]

        def shift(values: Any, first: Any) -> Any:
            column = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
            counts = jnp.zeros(values.shape, bool)
            for c in action.columns:
                counts = counts | (column == c)
            return values - jnp.where(counts, first, 0).astype(values.dtype)

        (shifted,) = self._emit(eqn, shift, [indices, offset], made)
        self.kinds[shifted] = self.kinds.get(indices, Whole())
        return shifted

    def _params(self, eqn: JaxprEqn, offset: Var | None) -> dict[str, Any]:
        doubled = self.probes.doubled[id(eqn)]
        params = dict(eqn.params)
        for name, value in eqn.params.items():
            try:
                if name in SIZE_PARAMS:
                    params[name] = self._size(eqn, name, value, doubled.params[name])
            except (ValueError, TypeError) as error:
                raise Mixes(eqn, f"has a size that the microbatch cannot have ({error})") from None
        for name in NESTED_PARAMS & set(params):
            value = params[name]
            if isinstance(value, tuple):
                params[name] = tuple(self._nested(v, offset) for v in value)
            else:
                params[name] = self._nested(value, offset)
        if offset is not None:
            params = _params_with_offset(eqn, params)
        return params

    def _size(self, eqn: JaxprEqn, name: str, full: Any, doubled: Any) -> Any:
        """A parameter at b: of the numbers per dimension, those of the batch's dimension only.

        `x[:, n]` on a batch of n examples means column B, in every microbatch.
        """
        count = self.num_microbatches
        if self.of_slice or full == doubled or name not in (*_PER_DIMENSION, "length"):
            return at_microbatch(full, doubled, count)
        if name == "length":
            items = eqn.invars[sum(_jax.scan_counts(eqn)) :]
            over_batch = bool(items) and bool((self.context.growth_of(items[0]) or (0,))[0])
            return at_microbatch(full, doubled, count) if over_batch else full
        growth = self.context.growth_of(eqn.invars[0])
        if growth is None or len(growth) != len(full):
            return full
        parts = zip(full, doubled, growth, strict=True)
        return type(full)([at_microbatch(f, d, count) if g else f for f, d, g in parts])

    def _nested(self, closed: Any, offset: Var | None) -> Any:
        jaxpr, consts = _jax.open_jaxpr(closed)
        env: dict[Var, Var] = {}

        def new(var: Var) -> Var:
            env[var] = self._new(var, self.context.nested[var])
            return env[var]

        inner_offset = None
        firsts: list[Var] = []
        if offset is not None:
            inner_offset = _jax.make_var(OFFSET_AVAL)
            self.kinds[inner_offset] = Whole()
            firsts = [inner_offset]
        constvars = [new(v) for v in jaxpr.constvars]
        invars = [new(v) for v in jaxpr.invars]
        made: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            operands = [a if isinstance(a, Literal) else env[a] for a in eqn.invars]
            outvars = [new(v) for v in eqn.outvars]
            uses = inner_offset if self._uses_offset(eqn) else None
            self._rebuild(eqn, operands, outvars, uses, made)
        outs = [a if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]
        body = _jax.make_jaxpr_value([*firsts, *invars], outs, made, constvars=constvars)
        return _jax.close(body, consts)


def nested_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs that a scan, while or cond holds."""
    found = []
    for name in sorted(NESTED_PARAMS & set(eqn.params)):
        value = eqn.params[name]
        for nested in value if isinstance(value, tuple) else (value,):
            if _jax.is_jaxpr(nested):
                found.append(_jax.open_jaxpr(nested)[0])
    return found


def _with_offset(eqn: JaxprEqn, operands: Sequence[Atom], offset: Var) -> list[Atom]:
    """Operands of a control-flow equation whose every jaxpr takes the offset first."""
    name = eqn.primitive.name
    if name == "scan":
        return [offset, *operands]
    if name == "cond":
        return [operands[0], offset, *operands[1:]]
    split = eqn.params["cond_nconsts"]
    return [offset, *operands[:split], offset, *operands[split:]]


def _params_with_offset(eqn: JaxprEqn, params: dict[str, Any]) -> dict[str, Any]:
    name = eqn.primitive.name
    if name == "while":
        return dict(
            params,
            cond_nconsts=params["cond_nconsts"] + 1,
            body_nconsts=params["body_nconsts"] + 1,
        )
    if name != "scan":
        return params
    consts, carry = _jax.scan_counts(eqn)
    total_in, total_out = len(eqn.invars), len(eqn.outvars)
    staged = eqn.replace(params=params)
    return _jax.scan_params(
        staged,
        params["jaxpr"],
        length=params["length"],
        num_consts=consts + 1,
        num_carry=carry,
        num_xs=total_in - consts - carry,
        num_ys=total_out - carry,
    )
