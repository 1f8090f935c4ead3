"""Staged -> the functions that run on each stage, over whole slot arrays.

A fragment reads and writes parts of slots (a row, a joined batch, an accumulator); its *program*
is one pure function from the stored arrays of its slots to those of the slots that it writes, ready
for `jax.jit`. Programs know the axes of their mesh, not its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from hetpass._jax import Literal as LiteralAtom
from hetpass._jax import ShapedArray, make_jaxpr_value, make_var, with_weak_type, zero_keys
from hetpass.backend.assigned_fragments import AssignedFragments
from hetpass.backend.assigned_stages import AssignedStages
from hetpass.backend.combine import identity, only_first, pairwise, reduce_leading
from hetpass.backend.laid_out import Emitted
from hetpass.backend.layout import batch_layout, join_batch, split_batch
from hetpass.backend.shard import data_parts, stored_aval
from hetpass.backend.split import DataSplit, evaluate
from hetpass.ir.kinds import Kind, Partial, Whole, Zero
from hetpass.ir.plan import Replica
from hetpass.ir.program import (
    Accumulate,
    Fragment,
    FragmentInput,
    FragmentOutput,
    FromSlot,
    Read,
    ReadJoined,
    ReadOffset,
    ReadRow,
    Role,
    Slot,
    Staged,
    Write,
    WriteRow,
    WriteSplit,
)

MICROBATCH_ROLES = ("forward", "backward", "weight")


@dataclass(frozen=True)
class StageProgram:
    """A function over stored arrays: `function(*arguments, m) -> (*results, token)`.

    The token is an int32 scalar that exists once the program has run, and is never donated.

    Attributes:
      role: of the fragment, or "start": makes the identities of accumulators and row slots.
      per_microbatch: takes the microbatch number m (int32 scalar) last.
      arguments, results: slot indices, each once.
      updated: slots that are arguments and results, to be changed in place.
      frees: slots whose last use this is.
      mesh: the axes of the stage's mesh, if it runs by assignments; else ().
      emitted: once it has been traced, the collectives that its assignment asks for.
    """

    stage: int
    role: Role | Literal["start"]
    phase: int
    function: Callable[..., tuple[Any, ...]]
    per_microbatch: bool
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    updated: tuple[int, ...]
    frees: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...] = ()
    emitted: Callable[[], tuple[Emitted, ...]] = tuple


def lower(
    staged: Staged, replicas: Sequence[Replica], assigned: AssignedStages | None = None
) -> tuple[StageProgram, ...]:
    """One program per fragment, in their order, then one "start" per stage that needs it.

    Args:
      assigned: what the plan's assignments say, and its `staged`.
    """
    lowering = [_Lowering(staged, replica) for replica in replicas]
    for stage in assigned.choices if assigned is not None else ():
        assert assigned is not None
        examples = lowering[stage].examples
        fragments = AssignedFragments(assigned, stage, examples)
        lowering[stage] = replace(lowering[stage], assigned=fragments)
    programs = [lowering[f.stage].program(f) for f in staged.fragments]
    starts = (lowering[stage].start(stage) for stage in range(staged.num_stages))
    return (*programs, *(s for s in starts if s is not None))


def finish_results(staged: Staged) -> Staged:
    """Every output leaf gets a slot of its own, whole and of the leaf's dtype.

    Accumulators that are results themselves, and results that share a slot or may share buffers
    with a slot of another stage, go through one more epilogue fragment per stage. (Two leaves must
    not share an array: the caller may give both away in the next step.)
    """
    received = {transfer.target for transfer in staged.transfers}
    leaves = staged.layered.program.traced.jaxpr.outvars
    slots, results = list(staged.slots), list(staged.results)
    seen: set[int] = set()
    reads: dict[int, list[tuple[int, int, ShapedArray]]] = {}
    for number, (result, leaf) in enumerate(zip(staged.results, leaves, strict=True)):
        if not isinstance(result, FromSlot):
            continue
        slot = staged.slots[result.slot]
        fits = not isinstance(slot.kind, Partial) and _type(slot.aval) == _type(leaf.aval)
        if fits and result.slot not in seen and result.slot not in received:
            seen.add(result.slot)
            continue
        aval = ShapedArray(slot.aval.shape, *_type(leaf.aval))
        slots.append(Slot(len(slots), slot.stage, aval, "step", Whole(), False, f"{slot.name}'"))
        results[number] = FromSlot(slots[-1].index)
        reads.setdefault(slot.stage, []).append((result.slot, slots[-1].index, aval))
    if not reads:
        return staged
    last = 1 + max((f.phase for f in staged.fragments if f.role == "epilogue"), default=0)
    added = tuple(_copies(stage, last, reads[stage]) for stage in sorted(reads))
    return replace(
        staged,
        slots=tuple(slots),
        results=tuple(results),
        fragments=(*staged.fragments, *added),
    )


def _type(aval: ShapedArray) -> tuple[Any, bool]:
    return aval.dtype, aval.weak_type


def _copies(stage: int, phase: int, reads: Sequence[tuple[int, int, ShapedArray]]) -> Fragment:
    invars = [make_var(aval) for _, _, aval in reads]
    return Fragment(
        stage=stage,
        role="epilogue",
        phase=phase,
        jaxpr=make_jaxpr_value(invars, invars, []),
        inputs=tuple(Read(source) for source, _, _ in reads),
        outputs=tuple(Write(target) for _, target, _ in reads),
        frees=(),
    )


@dataclass(frozen=True)
class _Lowering:
    """What all programs of one stage share."""

    staged: Staged
    replica: Replica
    assigned: AssignedFragments | None = None

    @property
    def examples(self) -> int:
        """b: in one microbatch."""
        batch = self.staged.layered.program.traced.batch_size
        return (batch or 0) // self.staged.num_microbatches

    @property
    def split(self) -> DataSplit:
        names = tuple(name for name, _ in self.replica.mesh)
        sizes = tuple(size for _, size in self.replica.mesh)
        mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
        return DataSplit(data_parts(self.replica), self.examples, mesh)

    def program(self, fragment: Fragment) -> StageProgram:
        per_microbatch = fragment.role in MICROBATCH_ROLES
        updated = _slots_of(fragment.outputs, (Accumulate, WriteRow))
        arguments = _once(
            [i.slot for i in fragment.inputs if not isinstance(i, ReadOffset)] + updated
        )
        results = _once([o.slot for o in fragment.outputs])

        emitted: list[Emitted] = []

        def function(*values: Any) -> tuple[Any, ...]:
            held = dict(zip(arguments, values, strict=False))
            number = values[-1] if per_microbatch else None
            if self.assigned is not None:
                outcome, emitted[:] = self.assigned.run(fragment, held, number)
            else:
                outcome = self._run(fragment, held, number)
            token = jnp.int32(0) if number is None else number + 1
            return (*(outcome[slot] for slot in results), token)

        return StageProgram(
            stage=fragment.stage,
            role=fragment.role,
            phase=fragment.phase,
            function=function,
            per_microbatch=per_microbatch,
            arguments=tuple(arguments),
            results=tuple(results),
            updated=tuple(_once(updated)),
            frees=tuple(s for s in fragment.frees if s in arguments and s not in updated),
            mesh=self.replica.mesh if self.assigned is not None else (),
            emitted=lambda: tuple(emitted),
        )

    def start(self, stage: int) -> StageProgram | None:
        """Identities for every accumulator and row slot of the stage."""
        updated: list[int] = []
        for fragment in self.staged.fragments:
            if fragment.stage == stage:
                updated += _slots_of(fragment.outputs, (Accumulate, WriteRow))
        slots = [self.staged.slots[index] for index in _once(updated)]
        if not slots:
            return None

        def function() -> tuple[Any, ...]:
            return (*(self._identity(slot) for slot in slots), jnp.int32(0))

        results = tuple(slot.index for slot in slots)
        return StageProgram(stage, "start", 0, function, False, (), results, (), ())

    def _identity(self, slot: Slot) -> Any:
        layout = None if self.assigned is None else self.assigned.layout(slot)
        aval = stored_aval(slot, self.replica, self.staged.num_microbatches, layout)
        if _is_extended(aval):
            return zero_keys(aval.shape, aval.dtype)
        op = slot.kind.op if isinstance(slot.kind, Partial) else "sum"
        return jnp.full(aval.shape, identity(op, aval.dtype), aval.dtype)

    def _run(self, fragment: Fragment, held: dict[int, Any], number: Any | None) -> dict[int, Any]:
        jaxpr = fragment.jaxpr
        kinds = self.staged.kinds if number is not None else {}
        split = self.split if number is not None else replace(self.split, parts=1)
        arguments = [
            self._in_parts(source, kinds.get(var), self._read(source, var.aval, held, number))
            for source, var in zip(fragment.inputs, jaxpr.invars, strict=True)
        ]
        pairs = zip(fragment.inputs, jaxpr.invars, strict=True)
        offsets = [var for source, var in pairs if isinstance(source, ReadOffset)]
        values = evaluate(jaxpr, arguments, kinds, split, offsets)
        outcome = dict(held)
        for output, atom, value in zip(fragment.outputs, jaxpr.outvars, values, strict=True):
            kind = None if isinstance(atom, LiteralAtom) else kinds.get(atom)
            outcome[output.slot] = self._write(output, value, kind, outcome, number)
        return outcome

    def _read(
        self, source: FragmentInput, aval: ShapedArray, held: dict[int, Any], number: Any | None
    ) -> Any:
        if isinstance(source, ReadOffset):
            return (number * self.examples).astype(aval.dtype)  # type: ignore[operator,union-attr]
        slot, value = self.staged.slots[source.slot], held[source.slot]
        if isinstance(source, ReadRow):
            return jax.lax.dynamic_index_in_dim(value, number, 0, keepdims=False)
        if isinstance(source, ReadJoined):
            return join_batch(value, *_layout(slot))
        if isinstance(slot.kind, Partial) and number is None:
            if _is_extended(slot.aval):
                return value[0] if data_parts(self.replica) > 1 else value
            if data_parts(self.replica) > 1:
                value = reduce_leading(slot.kind.op, value)
            return value.astype(aval.dtype)
        return value

    def _in_parts(self, source: FragmentInput, kind: Kind | None, value: Any) -> Any:
        """A sum that crossed whole (`crossing_sums`) is the first part here."""
        parts = data_parts(self.replica)
        if parts == 1 or not isinstance(source, Read) or not isinstance(kind, Partial):
            return value
        crossed = isinstance(self.staged.slots[source.slot].kind, Whole)
        return only_first(kind.op, value, parts) if crossed else value

    def _write(
        self,
        output: FragmentOutput,
        value: Any,
        kind: Kind | None,
        held: dict[int, Any],
        number: Any | None,
    ) -> Any:
        slot = self.staged.slots[output.slot]
        if isinstance(output, WriteRow):
            return jax.lax.dynamic_update_index_in_dim(held[slot.index], value, number, 0)
        if isinstance(output, WriteSplit):
            return split_batch(value, *_layout(slot), self.staged.num_microbatches)
        parts = data_parts(self.replica)
        if isinstance(output, Accumulate) and _stays(slot, kind):
            stored = stored_aval(slot, self.replica, self.staged.num_microbatches)
            typed = value if _is_extended(slot.aval) else value.astype(slot.aval.dtype)
            return jnp.broadcast_to(typed, stored.shape)
        if isinstance(slot.kind, Partial) and parts > 1 and not isinstance(kind, Partial):
            value = only_first(slot.kind.op, value, parts)
        if isinstance(slot.kind, Whole) and parts > 1 and isinstance(kind, Partial):
            value = reduce_leading(kind.op, value).astype(slot.aval.dtype)
        if isinstance(output, Accumulate):
            op = slot.kind.op if isinstance(slot.kind, Partial) else "sum"
            return pairwise(op, held[slot.index], value.astype(slot.aval.dtype))
        return with_weak_type(value, slot.aval.weak_type)


def _stays(slot: Slot, kind: Kind | None) -> bool:
    """A whole value, the same in every microbatch, under an operation that repeats do not change:
    there is nothing to combine (and PRNG keys cannot be)."""
    idempotent = isinstance(slot.kind, Partial) and slot.kind.op in (
        "max",
        "min",
        "or",
        "and",
        "same",
    )
    return idempotent and isinstance(kind, (Whole, Zero))


def _is_extended(aval: ShapedArray) -> bool:
    """PRNG keys."""
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.extended))


def _layout(slot: Slot) -> tuple[int, int]:
    layout = batch_layout(slot.kind)
    if layout is None:
        raise ValueError(f"slot {slot.name!r} is stacked but has no batch dimension")
    return layout


def _slots_of(outputs: Sequence[FragmentOutput], kinds: tuple[type, ...]) -> list[int]:
    return [output.slot for output in outputs if isinstance(output, kinds)]


def _once(values: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(values))
