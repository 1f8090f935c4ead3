"""A fragment of an assigned stage, from the stored arrays of its slots to those it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hetpass._jax import Literal, ShapedArray, with_weak_type
from hetpass.backend.assigned import AssignedRun
from hetpass.backend.assigned_stages import AssignedStages
from hetpass.backend.combine import pairwise
from hetpass.backend.laid_out import Emitted, LaidOut, MeshLayouts
from hetpass.backend.layout import batch_layout, join_batch, split_batch
from hetpass.backend.unpartitioned import bind_whole
from hetpass.ir.kinds import Partial, Whole, Zero
from hetpass.ir.operation_graph import Layout
from hetpass.ir.program import (
    Accumulate,
    Fragment,
    FragmentInput,
    FragmentOutput,
    ReadJoined,
    ReadOffset,
    ReadRow,
    Slot,
    WriteRow,
    WriteSplit,
)


@dataclass(frozen=True)
class AssignedFragments:
    """The fragments of one stage.

    Attributes:
      examples: b, in a microbatch.
    """

    assigned: AssignedStages
    stage: int
    examples: int

    def layout(self, slot: Slot) -> Layout:
        found = self.assigned.layouts[slot.index]
        assert found is not None
        return found

    def run(
        self, fragment: Fragment, held: dict[int, Any], number: Any | None
    ) -> tuple[dict[int, Any], tuple[Emitted, ...]]:
        """The stored arrays of all slots afterwards, and the collectives that are asked for."""
        layouts = MeshLayouts.of(self.assigned.assignments[self.stage])
        jaxpr = fragment.jaxpr
        values = [
            self._read(source, var.aval, held, number, layouts)
            for source, var in zip(fragment.inputs, jaxpr.invars, strict=True)
        ]
        run = AssignedRun(self.assigned.choices[self.stage], layouts)
        if number is None:
            run.values.update(zip(jaxpr.invars, values, strict=True))
            for eqn in jaxpr.eqns:
                made = bind_whole(eqn, [run.whole(a) for a in eqn.invars], layouts.mesh)
                run.values.update((v, LaidOut(r)) for v, r in zip(eqn.outvars, made, strict=True))
            results = [run.read(atom) for atom in jaxpr.outvars]
        else:
            results = run.run(jaxpr, values)
        outcome = dict(held)
        kinds = self.assigned.staged.kinds if number is not None else {}
        for output, atom, value in zip(fragment.outputs, jaxpr.outvars, results, strict=True):
            kind = None if isinstance(atom, Literal) else kinds.get(atom)
            same = isinstance(kind, (Whole, Zero))
            outcome[output.slot] = self._write(output, value, same, outcome, number, run)
        return outcome, tuple(layouts.emitted)

    def _read(
        self,
        source: FragmentInput,
        aval: ShapedArray,
        held: dict[int, Any],
        number: Any | None,
        layouts: MeshLayouts,
    ) -> LaidOut:
        if isinstance(source, ReadOffset):
            return LaidOut((number * self.examples).astype(aval.dtype))  # type: ignore[operator,union-attr]
        slot = self.assigned.staged.slots[source.slot]
        value, layout = held[source.slot], self.layout(slot)
        if isinstance(source, ReadRow):
            row = jax.lax.dynamic_index_in_dim(value, number, 0, keepdims=False)
            return LaidOut(layouts.constrain(row, layout), layout)
        if isinstance(source, ReadJoined):
            return LaidOut(join_batch(value, *_batch(slot)))
        if isinstance(slot.kind, Partial) and number is None:
            summed = self._total(LaidOut(value, layout), slot, layouts)
            if jnp.issubdtype(slot.aval.dtype, jax.dtypes.extended):
                return summed
            return LaidOut(summed.array.astype(aval.dtype), summed.layout)
        return LaidOut(value, layout)

    def _total(self, value: LaidOut, slot: Slot, layouts: MeshLayouts) -> LaidOut:
        """An accumulator, reduced once per step: to where the parameter rests, if it is one's."""
        assert value.layout is not None
        target = self.assigned.totals.get(slot.index, Layout(value.layout.dims))
        return layouts.reshard(value, target, slot.name)

    def _write(
        self,
        output: FragmentOutput,
        value: LaidOut,
        same: bool,
        held: dict[int, Any],
        number: Any | None,
        run: AssignedRun,
    ) -> Any:
        slot = self.assigned.staged.slots[output.slot]
        layout = self.layout(slot)
        if isinstance(output, WriteSplit):
            return split_batch(value.array, *_batch(slot), self.assigned.staged.num_microbatches)
        extended = jnp.issubdtype(slot.aval.dtype, jax.dtypes.extended)
        if not extended:
            made = self.assigned.totals.get(slot.index)
            if number is None and value.layout is None and made is not None:
                value = run.pinned(value.array, made)
            value = run.to_layout(value, layout, slot.name)
        if isinstance(output, WriteRow):
            row = value.array
            return jax.lax.dynamic_update_index_in_dim(held[slot.index], row, number, 0)
        if isinstance(output, Accumulate):
            op = slot.kind.op if isinstance(slot.kind, Partial) else "sum"
            typed = value.array if extended else value.array.astype(slot.aval.dtype)
            if same and op in ("max", "min", "or", "and", "same"):
                return typed  # the same in every microbatch, under what repeats do not change
            return pairwise(op, held[slot.index], typed)
        return with_weak_type(value.array, slot.aval.weak_type)


def _batch(slot: Slot) -> tuple[int, int]:
    layout = batch_layout(slot.kind)
    assert layout is not None, slot.name
    return layout
