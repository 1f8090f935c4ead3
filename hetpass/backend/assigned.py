"""A jaxpr as an assignment has it: every operand brought to what its operation wants, every result
pinned as it comes out and as it is kept.

Constraints never change a value, so any legal assignment computes what the jaxpr does. One thing
goes beyond constraints: a sum that stays partial is made in parts (`MeshLayouts.split`), and linear
operations are applied to the parts.

Equations without a tag (what partition added, what fragments make for themselves) run as they are,
and lie as the compiler likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from hetpass._jax import (
    Atom,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    open_jaxpr,
    scan_counts,
    with_weak_type,
)
from hetpass.analysis.layer_operations import LOOP_IN, LOOP_OUT
from hetpass.analysis.operation_graph import JOINTLY_LINEAR
from hetpass.backend.combine import only_first
from hetpass.backend.laid_out import LaidOut, MeshLayouts, over_parts
from hetpass.backend.rewritten import bind
from hetpass.backend.stage_choices import LayerChoices, OperationAt, StageChoices
from hetpass.backend.unpartitioned import bind_whole
from hetpass.ir.operation_graph import Layout

_SCATTERED_SUMS = ("scatter-add", "scatter_add")


@dataclass
class AssignedRun:
    """Evaluates jaxprs of one stage.

    Attributes:
      values: variable -> array and layout.
      resharded: (variable, layout) -> the same value in that layout, for several readers; also as
        its operation leaves it.
    """

    choices: StageChoices
    layouts: MeshLayouts
    values: dict[Var, LaidOut] = field(default_factory=dict)
    resharded: dict[tuple[Var, Layout], LaidOut] = field(default_factory=dict)
    zeros: set[Var] = field(default_factory=set)

    def run(self, jaxpr: Jaxpr, arguments: Sequence[LaidOut]) -> list[LaidOut]:
        """The results, as they are kept.

        Args:
          jaxpr: open, without constants.
          arguments: one per invar.
        """
        self.values.update(zip(jaxpr.invars, arguments, strict=True))
        for eqn in jaxpr.eqns:
            results = self.equation(eqn)
            self.values.update(
                (v, r) for v, r in zip(eqn.outvars, results, strict=True) if not _dropped(v)
            )
        return [self.read(atom) for atom in jaxpr.outvars]

    def read(self, atom: Atom) -> LaidOut:
        if isinstance(atom, Literal):
            return LaidOut(jnp.asarray(atom.val, atom.aval.dtype))
        return self.values[atom]

    def whole(self, atom: Atom) -> Any:
        """The array of an operand without summands; it lies as it does."""
        if isinstance(atom, Literal):
            return atom.val
        value = self.values[atom]
        if value.layout is None or not value.layout.partial:
            return value.array
        return self.in_layout(atom, Layout(value.layout.dims)).array

    def in_layout(self, atom: Var, target: Layout) -> LaidOut:
        """A value as one of its readers wants it."""
        return self.brought(atom, self.values[atom], target)

    def brought(self, atom: Var, value: LaidOut, target: Layout) -> LaidOut:
        """One layout of a value to another; a step serves all readers whose way it is on."""
        if value.layout == target:
            return value
        if (atom, target) in self.resharded:
            return self.resharded[atom, target]
        for stop in self.layouts.way(value, target):
            if (atom, stop) not in self.resharded:
                reason = str(atom.aval.str_short())
                self.resharded[atom, stop] = self.layouts.reshard(value, stop, reason)
            value = self.resharded[atom, stop]
        return value

    def wanted(self, atom: Atom, layer: LayerChoices, number: int, target: Layout) -> LaidOut:
        """An operand: from where it comes to how the layer keeps it, and on to `target`."""
        if isinstance(atom, Literal):
            return LaidOut(self.layouts.constrain(jnp.asarray(atom.val, atom.aval.dtype), target))
        kept = layer.kept(number)
        if self.values[atom].layout is None or kept is None or kept == target:
            return self.in_layout(atom, target)
        return self.brought(atom, self.in_layout(atom, kept), target)

    # -- Equations ----------------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn) -> list[LaidOut]:
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn)
        if name == "while":
            return self.loop(eqn)
        if name == "cond":
            return self.branch(eqn)
        at = self.choices.of_equation(eqn)
        return self.untagged(eqn) if at is None else self.tagged(eqn, at)

    def untagged(self, eqn: JaxprEqn) -> list[LaidOut]:
        if eqn.primitive.name == "broadcast_in_dim" and _is_zero(eqn.invars[0]):
            self.zeros.update(eqn.outvars)
        values = [self.read(a) for a in eqn.invars if isinstance(a, Var)]
        parts = {v.layout.partial for v in values if v.layout is not None and v.layout.partial}
        apart = [v for v in values if v.layout is not None and v.layout.partial]
        linear = eqn.primitive.name in JOINTLY_LINEAR and len(apart) == len(eqn.invars)
        if len(parts) == 1 and linear:
            (partial,) = parts
            axes = self.layouts.ordered(partial)
            run = over_parts(lambda *v: bind(eqn, list(v)), [axes] * len(values), axes)
            made = run(*(v.array for v in values))
            if eqn.primitive.name in ("add", "add_any") and values[0].layout == values[-1].layout:
                return [LaidOut(made[0], values[0].layout)]
            free = [Layout(((),) * v.aval.ndim, partial) for v in eqn.outvars]
            return [
                LaidOut(self.layouts.constrain(m, layout), layout)
                for m, layout in zip(made, free, strict=True)
            ]
        whole = [self.whole(a) for a in eqn.invars]
        return [LaidOut(r) for r in bind_whole(eqn, whole, self.layouts.mesh)]

    def tagged(self, eqn: JaxprEqn, at: OperationAt) -> list[LaidOut]:
        operands: list[LaidOut] = []
        wanted = dict(zip(at.draft.rows[0], at.wanted, strict=True))
        for position, atom in enumerate(eqn.invars):
            number = at.operand(position)
            if number is None:
                operands.append(LaidOut(self.whole(atom)))
            else:
                operands.append(self.wanted(atom, at.layer, number, wanted[position]))
        apart = self._left_partial(eqn, at)
        axes = self.layouts.ordered(apart | at.choice.partial)
        if apart and eqn.primitive.name == "conv_general_dilated":
            made = self._convolution(eqn, at, operands, apart)
        else:
            parts = [self._parted(eqn, at, k, v, apart) for k, v in enumerate(operands)]
            own = [self.layouts.ordered(v.layout.partial) if v.layout else () for v in parts]
            run = over_parts(lambda *v: bind(eqn, list(v)), own, axes)
            made = run(*(v.array for v in parts))
        return self._pinned(eqn, at, made, frozenset(axes))

    def _left_partial(self, eqn: JaxprEqn, at: OperationAt) -> frozenset[str]:
        """The axes that the operation contracts over and whose sums are made in parts.

        Those that stay partial, and those that are reduced together though they cut different
        dimensions: the partitioner would reduce along one after the other.
        """
        if not at.operation.sums or at.operation.rule is None:
            return frozenset()
        left = {a for layout in at.choice.results for a in layout.partial}
        rule, factors = at.operation.rule, at.choice.factors
        cuts = [set(factors[f]) for f in rule.reduction if factors[f]]
        if len(cuts) > 1:
            aval = eqn.outvars[0].aval
            ends = (at.natural[0], at.choice.results[0])
            steps = self.layouts.steps(tuple(aval.shape), float(aval.dtype.itemsize), ends)
            for step in steps:
                if step.kind in ("all_reduce", "reduce_scatter"):
                    together = [cut & set(step.axes) for cut in cuts]
                    left.update(*together if sum(map(bool, together)) > 1 else ())
        return frozenset(left) - at.choice.partial

    def _parted(
        self, eqn: JaxprEqn, at: OperationAt, position: int, value: LaidOut, apart: frozenset[str]
    ) -> LaidOut:
        """An operand cut into parts along the contracted axes that it has."""
        if not apart or position not in at.draft.rows[0] or at.operation.rule is None:
            return value
        rule, row = at.operation.rule, at.draft.rows[0].index(position)
        if eqn.primitive.name in _SCATTERED_SUMS and position == 0:
            return self._first_part(eqn.invars[0], value, apart)
        dims = [
            [(rule.sizes[f], at.choice.factors[f]) for f in factors]
            for factors in rule.operands[row]
        ]
        return self.layouts.split(value, dims, set(apart))

    def _first_part(self, atom: Atom, value: LaidOut, apart: frozenset[str]) -> LaidOut:
        """What is added to: counted once, so the first part has it and the others zeros."""
        if (isinstance(atom, Var) and atom in self.zeros) or value.layout is None:
            return value
        array = value.array
        axes = self.layouts.ordered(apart)
        for axis in reversed(axes):
            array = only_first("sum", array, self.layouts.size(axis))
        layout = Layout(value.layout.dims, apart)
        return LaidOut(self.layouts.constrain(array, layout), layout)

    def _convolution(
        self, eqn: JaxprEqn, at: OperationAt, operands: Sequence[LaidOut], apart: frozenset[str]
    ) -> Sequence[Any]:
        """Each device runs its part as it is. (Batched over parts it would be a grouped
        convolution, which the partitioner gets wrong; see `backend.split`.)"""
        (natural,) = at.natural
        summed = self.layouts.ordered(natural.partial - apart)
        leading = self.layouts.ordered(apart)

        def one(*values: Any) -> Any:
            (result,) = bind(eqn, list(values))
            if summed:
                result = jax.lax.psum(result, summed)
            return result.reshape((1,) * len(leading) + result.shape)

        kept = Layout(natural.dims, apart)
        result = jax.shard_map(
            one,
            mesh=self.layouts.mesh,
            in_specs=tuple(self.layouts.spec(v.layout or Layout(())) for v in operands),
            out_specs=self.layouts.spec(kept),
            axis_names={name for name, _ in self.layouts.linked.axes},
            check_vma=False,
        )(*(v.array for v in operands))
        return [result]

    def _pinned(
        self, eqn: JaxprEqn, at: OperationAt, made: Sequence[Any], parts: frozenset[str]
    ) -> list[LaidOut]:
        """Results from how they come out to how they are kept."""
        results = []
        for position, (var, array) in enumerate(zip(eqn.outvars, made, strict=True)):
            number = at.result(position)
            if number is None:
                results.append(LaidOut(array))
                continue
            place = at.draft.rows[1].index(position)
            natural, pinned = at.natural[place], at.choice.results[place]
            reason = f"{eqn.primitive.name} {'.'.join(map(str, at.draft.path))}"
            value = LaidOut(array, natural)
            summed = natural.partial - parts
            shape, item_bytes = tuple(var.aval.shape), float(var.aval.dtype.itemsize)
            for step in self.layouts.steps(shape, item_bytes, (natural, pinned)):
                value = self.layouts.follow(value, step, reason, summed)
                assert value.layout is not None
                summed &= value.layout.partial
            if value.layout == natural:
                value = LaidOut(self.layouts.constrain(array, natural), natural)
            kept = at.layer.kept(number)
            if kept is not None and kept != pinned:
                self.resharded[var, pinned] = value
                value = self.layouts.reshard(value, kept, reason)
            results.append(value)
        return results

    # -- Loops and branches -------------------------------------------------------------------

    def scan(self, eqn: JaxprEqn) -> list[LaidOut]:
        jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
        num_consts, num_carry = scan_counts(eqn)
        stacked = num_consts + num_carry
        entering = [self._entering(eqn, jaxpr, k) for k in range(len(eqn.invars))]
        carried = entering[num_consts:stacked]
        rows = [_rows_first(v) for v in entering[stacked:]]
        leaving: list[Layout | None] = []

        def body(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[Any, Any]:
            inner = self._inside(eqn.params["length"])
            inner.values.update(zip(jaxpr.constvars, map(LaidOut, consts), strict=True))
            given = [
                *entering[:num_consts],
                *(self.pinned(a, v.layout) for a, v in zip(carry, carried, strict=True)),
                *(
                    self.pinned(a, _row(v.layout))
                    for a, v in zip(xs, entering[stacked:], strict=True)
                ),
            ]
            made = inner.run(jaxpr, given)
            outs = [inner.to_carry(made[k], v, jaxpr.outvars[k]) for k, v in enumerate(carried)]
            ys = [
                self._leaving(eqn, jaxpr, num_carry + k, value, inner)
                for k, value in enumerate(made[num_carry:])
            ]
            leaving[:] = [y.layout for y in ys]
            return tuple(outs), tuple(self.pinned(y.array, y.layout).array for y in ys)

        init = tuple(with_weak_type(v.array, False) for v in carried)
        params = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        outs, ys = jax.lax.scan(body, init, tuple(rows), **params)
        results = [self.pinned(a, v.layout) for a, v in zip(outs, carried, strict=True)]
        for array, layout in zip(ys, leaving, strict=True):
            results.append(_stacked(LaidOut(array, layout), self.layouts))
        return [self._after(eqn, k, value) for k, value in enumerate(results)]

    def pinned(self, array: Any, layout: Layout | None) -> LaidOut:
        """An array that lies so by what is known of it, pinned again: the compiler chooses anew for
        what loops carry and stack."""
        return LaidOut(array if layout is None else self.layouts.constrain(array, layout), layout)

    def _inside(self, times: int) -> AssignedRun:
        """The same for the body of a loop: reshards inside it are done in every iteration."""
        layouts = MeshLayouts(self.layouts.linked, self.layouts.emitted, self.layouts.times * times)
        return AssignedRun(self.choices, layouts, dict(self.values), dict(self.resharded))

    def _entering(self, eqn: JaxprEqn, jaxpr: Jaxpr, position: int) -> LaidOut:
        """What a loop takes: as its operation there wants it, or a carry as the layer keeps it."""
        atom = eqn.invars[position]
        at = self.choices.of_loop(eqn, LOOP_IN, position)
        if at is not None:
            number = at.draft.operands[0] if at.draft.operands else None
            if number is not None:
                value = self.wanted(atom, at.layer, number, at.wanted[0])
                kept = at.layer.kept(at.draft.results[0])
                if kept is None or at.draft.kind == "unstack":
                    return value
                return self.layouts.reshard(value, kept, "a loop's start")
        value = self.read(atom)
        num_consts, num_carry = scan_counts(eqn) if eqn.primitive.name == "scan" else (0, 0)
        if num_consts <= position < num_consts + num_carry:
            inner = self.choices.inner(eqn, jaxpr.invars[position])
            kept = None if inner is None else inner[0].kept(inner[1])
            if kept is not None:
                return self.layouts.reshard(value, kept, "a layer's start")
            return self.without_parts(atom)
        return value

    def without_parts(self, atom: Atom) -> LaidOut:
        """A value as it lies, without summands; whole where that is not known."""
        if isinstance(atom, Literal):
            return LaidOut(jnp.asarray(atom.val, atom.aval.dtype), Layout(()))
        layout = self.values[atom].layout
        dims = layout.dims if layout is not None else ((),) * len(atom.aval.shape)
        return self.in_layout(atom, Layout(dims))

    def to_carry(self, value: LaidOut, like: LaidOut, atom: Atom) -> Any:
        """A result of the body, laid out as the loop carries it."""
        if like.layout is not None:
            array = self.to_layout(value, like.layout, "a loop's carry").array
        else:
            array = value.array
        return with_weak_type(array, False)

    def to_layout(self, value: LaidOut, target: Layout, reason: str) -> LaidOut:
        missing = target.partial - (value.layout.partial if value.layout else frozenset())
        if missing:  # a whole term of a sum that is in parts
            whole = Layout(target.dims, target.partial - missing)
            value = self.layouts.reshard(value, whole, reason)
            return self.spread(value, target)
        return self.layouts.reshard(value, target, reason)

    def spread(self, value: LaidOut, target: Layout) -> LaidOut:
        """A sum in parts, of which the first is the value and the others are zeros."""
        assert value.layout is not None
        assert not value.layout.partial
        array = value.array
        for axis in reversed(self.layouts.ordered(target.partial)):
            array = only_first("sum", array, self.layouts.size(axis))
        return LaidOut(self.layouts.constrain(array, target), target)

    def _leaving(
        self, eqn: JaxprEqn, jaxpr: Jaxpr, position: int, value: LaidOut, inner: AssignedRun
    ) -> LaidOut:
        """A row of a stacked result: as its operation wants it, or as it is accumulated."""
        at, atom = self.choices.of_loop(eqn, LOOP_OUT, position), jaxpr.outvars[position]
        if at is not None and at.draft.operands:
            if isinstance(atom, Var):
                return inner.in_layout(atom, at.wanted[0])
            return inner.layouts.reshard(value, at.wanted[0], "a loop's result")
        known = self.choices.inner(eqn, atom) if isinstance(atom, Var) else None
        if known is not None:
            target = known[0].assignment.accumulators.get(known[1])
            if target is not None:
                return inner.to_layout(value, target, "an accumulator")
        return value

    def _after(self, eqn: JaxprEqn, position: int, value: LaidOut) -> LaidOut:
        at = self.choices.of_loop(eqn, LOOP_OUT, position)
        if at is None or not at.draft.results or value.layout is None:
            return value
        pinned, kept = at.choice.results[0], at.layer.kept(at.draft.results[0])
        value = self.layouts.reshard(value, pinned, "a loop's end")
        if kept is None or kept == pinned:
            return value
        self.resharded[eqn.outvars[position], pinned] = value
        return self.layouts.reshard(value, kept, "a loop's end")

    def loop(self, eqn: JaxprEqn) -> list[LaidOut]:
        cond, cond_consts = open_jaxpr(eqn.params["cond_jaxpr"])
        body, body_consts = open_jaxpr(eqn.params["body_jaxpr"])
        a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first, second = (
            [self.read(v) for v in eqn.invars[:a]],
            [self.read(v) for v in eqn.invars[a : a + b]],
        )
        carried = []
        for k, atom in enumerate(eqn.invars[a + b :]):
            at = self.choices.of_loop(eqn, LOOP_IN, k)
            value = self.without_parts(atom)
            if at is not None and at.draft.operands:
                value = self.wanted(atom, at.layer, at.draft.operands[0], at.wanted[0])
                kept = at.layer.kept(at.draft.results[0])
                value = (
                    value if kept is None else self.layouts.reshard(value, kept, "a loop's start")
                )
            carried.append(value)

        def inside(jaxpr: Jaxpr, own: Sequence[Any], given: Sequence[LaidOut]) -> list[LaidOut]:
            inner = self._inside(1)
            inner.values.update(zip(jaxpr.constvars, map(LaidOut, own), strict=True))
            return inner.run(jaxpr, given)

        def state(carry: Sequence[Any]) -> list[LaidOut]:
            return [self.pinned(x, v.layout) for x, v in zip(carry, carried, strict=True)]

        def test(carry: Sequence[Any]) -> Any:
            return inside(cond, cond_consts, [*first, *state(carry)])[0].array

        def step(carry: Sequence[Any]) -> Any:
            made = inside(body, body_consts, [*second, *state(carry)])
            return tuple(
                self.to_carry(m, v, o) for m, v, o in zip(made, carried, body.outvars, strict=True)
            )

        init = tuple(with_weak_type(v.array, False) for v in carried)
        outs = jax.lax.while_loop(test, step, init)
        results = [self.pinned(x, v.layout) for x, v in zip(outs, carried, strict=True)]
        return [self._after(eqn, k, value) for k, value in enumerate(results)]

    def branch(self, eqn: JaxprEqn) -> list[LaidOut]:
        branches = [open_jaxpr(branch) for branch in eqn.params["branches"]]
        operands = [self.read(atom) for atom in eqn.invars[1:]]
        ends: list[Layout | None] = []
        for k, var in enumerate(eqn.outvars):
            at = self.choices.of_loop(eqn, LOOP_OUT, k)
            free = Layout(((),) * getattr(var.aval, "ndim", 0))
            ends.append(free if at is None or not at.draft.operands else at.wanted[0])

        def runner(jaxpr: Jaxpr, consts: Sequence[Any]) -> Callable[..., Any]:
            def run(*arrays: Any) -> Any:
                inner = self._inside(1)
                inner.values.update(zip(jaxpr.constvars, map(LaidOut, consts), strict=True))
                given = [LaidOut(x, v.layout) for x, v in zip(arrays, operands, strict=True)]
                made = inner.run(jaxpr, given)
                return tuple(
                    with_weak_type(inner.to_layout(m, e or Layout(()), "a branch").array, False)
                    for m, e in zip(made, ends, strict=True)
                )

            return run

        index = self.whole(eqn.invars[0])
        if jnp.issubdtype(jnp.asarray(index).dtype, jnp.bool_):
            index = jnp.asarray(index, jnp.int32)
        outs = jax.lax.switch(index, [runner(*b) for b in branches], *(v.array for v in operands))
        results = [self.pinned(x, e) for x, e in zip(outs, ends, strict=True)]
        return [self._after(eqn, k, value) for k, value in enumerate(results)]


def _dropped(var: Var) -> bool:
    return isinstance(var, DropVar)


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and atom.val == 0


def _row(layout: Layout | None) -> Layout | None:
    return None if layout is None else Layout(layout.dims[1:], layout.partial)


def _rows_first(value: LaidOut) -> Any:
    """The stacked array with its rows in front of the dimensions of partial axes."""
    parts = len(value.layout.partial) if value.layout is not None else 0
    return jnp.moveaxis(value.array, parts, 0) if parts else value.array


def _stacked(value: LaidOut, layouts: MeshLayouts) -> LaidOut:
    """Rows put together; `value.layout` is of one row."""
    if value.layout is None:
        return value
    parts = len(value.layout.partial)
    array = jnp.moveaxis(value.array, 0, parts) if parts else value.array
    layout = Layout(((), *value.layout.dims), value.layout.partial)
    return LaidOut(layouts.constrain(array, layout), layout)
