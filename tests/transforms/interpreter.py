"""Runs a Staged value in plain Python, one equation at a time, and holds it to its contract.

Every rule that program.py states for slots, fragments, transfers and feeds is checked on the way:
a stage touches only its own slots, a microbatch slot is written once, a transfer has a written
source, a phase reads across stages only what an earlier phase wrote, nothing freed is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetpass.ir.kinds import Batched, Partial, Position
from hetpass.ir.program import (
    Accumulate,
    Fragment,
    FromInput,
    FromLiteral,
    Read,
    ReadJoined,
    ReadOffset,
    ReadRow,
    Slot,
    Staged,
    Write,
    WriteRow,
    WriteSplit,
)

_COMBINE = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "prod": jnp.multiply,
    "or": jnp.logical_or,
    "and": jnp.logical_and,
}


def run(staged: Staged, leaves: Sequence[Any]) -> list[Any]:
    """The output leaves for the given input leaves.

    Schedule: all forwards, then all backwards, then all weight gradients."""
    machine = _Machine(staged, list(leaves))
    machine.start()
    once = {"prologue": [], "epilogue": []}
    for fragment in staged.fragments:
        if fragment.role in once:
            once[fragment.role].append(fragment)
    micro = {(f.role, f.stage): f for f in staged.fragments if f.role not in once}
    for fragment in sorted(once["prologue"], key=lambda f: (f.phase, -f.stage)):
        machine.execute(fragment, None)
    for m in range(staged.num_microbatches):
        for stage in range(staged.num_stages):
            if ("forward", stage) in micro:
                machine.execute(micro["forward", stage], m)
    for m in range(staged.num_microbatches):
        for stage in reversed(range(staged.num_stages)):
            if ("backward", stage) in micro:
                machine.execute(micro["backward", stage], m)
    for stage in range(staged.num_stages):
        for m in range(staged.num_microbatches):
            if ("weight", stage) in micro:
                machine.execute(micro["weight", stage], m)
    for fragment in sorted(once["epilogue"], key=lambda f: (f.phase, -f.stage)):
        machine.execute(fragment, None)
    return machine.finish()


@dataclass
class _Machine:
    staged: Staged
    leaves: list[Any]
    step: dict[int, Any] = field(default_factory=dict)
    micro: dict[tuple[int, int], Any] = field(default_factory=dict)
    written_at: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    freed: set[Any] = field(default_factory=set)

    def start(self) -> None:
        staged = self.staged
        self.sends: dict[int, list[int]] = {}
        for t in staged.transfers:
            a, b = staged.slots[t.source], staged.slots[t.target]
            assert (a.aval, a.scope, a.kind, a.stacked) == (b.aval, b.scope, b.kind, b.stacked)
            assert a.stage != b.stage
            assert not (isinstance(a.kind, Partial) and a.scope == "step")
            self.sends.setdefault(t.source, []).append(t.target)
        for slot in staged.slots:
            assert staged.slots[slot.index] is slot
        rows = {o.slot for f in staged.fragments for o in f.outputs if isinstance(o, WriteRow)}
        sums = {o.slot for f in staged.fragments for o in f.outputs if isinstance(o, Accumulate)}
        for slot in rows:
            self.step[slot] = [None] * staged.num_microbatches
        for slot in sums:
            self.step[slot] = None
        for feed in staged.feeds:
            slot = staged.slots[feed.slot]
            value = self.leaves[feed.input]
            self._store(feed.slot, self._split(slot, value) if slot.stacked else value)

    def execute(self, fragment: Fragment, microbatch: int | None) -> None:
        self.now = (fragment.role, fragment.stage, fragment.phase)
        args = [self._read(fragment, source, microbatch) for source in fragment.inputs]
        for var, value in zip(fragment.jaxpr.invars, args, strict=True):
            assert var.aval.shape == jnp.shape(value), (var.aval, jnp.shape(value))
            assert var.aval.dtype == value.dtype
        values = jax.core.eval_jaxpr(fragment.jaxpr, (), *args)
        for output, value in zip(fragment.outputs, values, strict=True):
            self._write(fragment, output, value, microbatch)
        own = {o.slot for o in fragment.outputs if not isinstance(o, (Accumulate, WriteRow))}
        for slot in fragment.frees:
            assert slot not in own
            assert self.staged.slots[slot].stage == fragment.stage
            if self.staged.slots[slot].scope == "microbatch":
                del self.micro[slot, microbatch]
            else:
                assert microbatch is None
                del self.step[slot]

    def finish(self) -> list[Any]:
        staged = self.staged
        assert not self._left_over(), self._left_over()
        slots = [r.slot for r in staged.results if hasattr(r, "slot")]
        assert len(slots) == len(set(slots)), "two results share a slot"
        home = {}
        for feed in staged.feeds:
            if not staged.slots[feed.slot].stacked:
                assert feed.input not in home, "fed twice"
                home[feed.input] = staged.slots[feed.slot].stage
        values = []
        for j, result in enumerate(staged.results):
            if isinstance(result, FromInput):
                values.append(self.leaves[result.input])
            elif isinstance(result, FromLiteral):
                values.append(jnp.asarray(result.value, result.aval.dtype))
            else:
                slot = staged.slots[result.slot]
                assert slot.scope == "step"
                assert not slot.stacked
                for i, out in staged.pairs:
                    if out == j and i in home:
                        assert home[i] == slot.stage, "state comes back elsewhere"
                values.append(self.step[result.slot])
        return values

    def _left_over(self) -> list[Any]:
        """Microbatch values that a fragment reads, and that are still there at the end."""
        read = {
            source.slot
            for f in self.staged.fragments
            for source in f.inputs
            if not isinstance(source, ReadOffset)
        }
        return [key for key in self.micro if key[0] in read]

    def _read(self, fragment: Fragment, source: Any, microbatch: int | None) -> Any:
        staged = self.staged
        if isinstance(source, ReadOffset):
            assert microbatch is not None
            total = staged.layered.program.traced.batch_size
            return jnp.int32(microbatch * total // staged.num_microbatches)
        slot = staged.slots[source.slot]
        assert slot.stage == fragment.stage
        if slot.scope == "microbatch":
            assert isinstance(source, Read)
            assert microbatch is not None
            return self.micro[source.slot, microbatch]
        self._check_phase(source.slot)
        value = self.step[source.slot]
        if isinstance(source, ReadRow):
            assert slot.stacked
            assert microbatch is not None
            return value[microbatch]
        if isinstance(source, ReadJoined):
            assert slot.stacked
            assert microbatch is None
            return self._join(slot, value)
        assert not slot.stacked
        return value

    def _check_phase(self, slot: int) -> None:
        origin = self.written_at.get(slot)
        if origin is None:
            return
        order = ("prologue", "forward", "backward", "weight", "epilogue")
        role, _stage, phase = origin
        now_role, _now_stage, now_phase = self.now
        assert order.index(role) <= order.index(now_role)
        if role == now_role and role in ("prologue", "epilogue"):
            assert phase < now_phase, f"slot {slot}: written in phase {phase}, read in {now_phase}"

    def _write(self, fragment: Fragment, output: Any, value: Any, microbatch: int | None) -> None:
        slot = self.staged.slots[output.slot]
        assert slot.stage == fragment.stage
        if isinstance(output, Accumulate):
            assert isinstance(slot.kind, Partial)
            assert microbatch is not None
            value = value.astype(slot.aval.dtype)
            old = self.step[output.slot]
            self.step[output.slot] = value if old is None else _COMBINE[slot.kind.op](old, value)
        elif isinstance(output, WriteRow):
            assert slot.stacked
            assert microbatch is not None
            self.step[output.slot][microbatch] = value
        elif isinstance(output, WriteSplit):
            assert slot.stacked
            assert microbatch is None
            self._store(output.slot, self._split(slot, value))
        elif slot.scope == "microbatch":
            self._store_micro(output.slot, microbatch, value)
        else:
            assert isinstance(output, Write)
            assert microbatch is None
            assert not slot.stacked
            self._store(output.slot, value)

    def _store(self, slot: int, value: Any) -> None:
        assert slot not in self.step, f"slot {slot} is written twice"
        self.step[slot] = value
        if hasattr(self, "now"):
            self.written_at[slot] = self.now
        for target in self.sends.get(slot, ()):
            self._store(target, value)

    def _store_micro(self, slot: int, microbatch: int | None, value: Any) -> None:
        assert microbatch is not None
        assert (slot, microbatch) not in self.micro
        assert value.shape == self.staged.slots[slot].aval.shape
        self.micro[slot, microbatch] = value
        for target in self.sends.get(slot, ()):
            self._store_micro(target, microbatch, value)

    def _split(self, slot: Slot, value: Any) -> list[Any]:
        dim, outer = _layout(slot)
        shape = value.shape
        parts = self.staged.num_microbatches
        grouped = value.reshape(*shape[:dim], outer, parts, -1, *shape[dim + 1 :])
        rows = jnp.moveaxis(grouped, dim + 1, 0)
        return [r.reshape(slot.aval.shape) for r in rows]

    def _join(self, slot: Slot, rows: Any) -> Any:
        dim, outer = _layout(slot)
        shape = slot.aval.shape
        grouped = jnp.stack(
            [r.reshape(*shape[:dim], outer, -1, *shape[dim + 1 :]) for r in rows], dim + 1
        )
        total = shape[dim] * self.staged.num_microbatches
        return grouped.reshape(*shape[:dim], total, *shape[dim + 1 :])


def _layout(slot: Slot) -> tuple[int, int]:
    assert isinstance(slot.kind, (Batched, Position))
    return slot.kind.dim, getattr(slot.kind, "outer", 1) or 1


def assert_equal(actual: Sequence[Any], expected: Sequence[Any], rtol: float = 1e-5) -> None:
    """Leaf by leaf, relative to the norm of the leaf."""
    assert len(actual) == len(expected)
    for j, (a, e) in enumerate(zip(actual, expected, strict=True)):
        e = jnp.asarray(e)
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, j
        finite = np.isfinite(e)
        assert np.array_equal(a[~finite], e[~finite], equal_nan=True), f"leaf {j}: {a} != {e}"
        a, e = a[finite], e[finite]
        scale = max(float(np.linalg.norm(e)), 1e-6)
        assert float(np.linalg.norm(a - e)) <= rtol * scale, f"leaf {j}: {a} != {e}"
