"""The rules of a Staged step; see `verify`.

Time inside a step is a pair (role, phase): prologue phases, then forward, backward and weight
tasks of a microbatch, then epilogue phases. A slot is *defined* by exactly one of: a feed, a
transfer, a Write or a WriteSplit; or filled during the microbatches by Accumulate or WriteRow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hetpass._jax import DropVar, ShapedArray, jaxpr_fault
from hetpass.ir.kinds import Batched, Partial
from hetpass.ir.program import (
    Accumulate,
    Fragment,
    FragmentInput,
    FragmentOutput,
    FromInput,
    FromLiteral,
    FromSlot,
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
from hetpass.ir.text import aval_text

_ROLES: Mapping[str, int] = {
    "prologue": 0,
    "forward": 1,
    "backward": 2,
    "weight": 3,
    "epilogue": 4,
}
_MICROBATCH = ("forward", "backward", "weight")
_START = (-1, 0)

Time = tuple[int, int]


class _Fault(Exception):
    """Carries the first breach to `verify_staged`."""


def verify_staged(value: Staged) -> str:
    """The first breach of a rule, "" if there is none."""
    check = _Check(value)
    try:
        check.slots()
        check.fragments()
        check.transfers_and_feeds()
        check.definitions()
        check.reads()
        check.frees()
        check.results()
    except _Fault as fault:
        return str(fault)
    return ""


def _time(fragment: Fragment) -> Time:
    return _ROLES[fragment.role], fragment.phase


def _name(fragment: Fragment) -> str:
    return f"the {fragment.role} fragment of stage {fragment.stage}, phase {fragment.phase}"


def _same(first: ShapedArray, second: ShapedArray) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


@dataclass
class _Check:
    staged: Staged
    writers: dict[int, list[Time]] = field(default_factory=dict)

    def require(self, condition: bool, fault: str) -> None:
        if not condition:
            raise _Fault(fault)

    def slot(self, index: int, who: str) -> Slot:
        self.require(0 <= index < len(self.staged.slots), f"{who} names slot {index}: none such")
        return self.staged.slots[index]

    @cached_property
    def sources(self) -> Mapping[int, int]:
        """From the target of a transfer to its source."""
        return {transfer.target: transfer.source for transfer in self.staged.transfers}

    def accesses(self) -> Iterator[tuple[Fragment, FragmentInput | FragmentOutput, Any]]:
        """Every input and output of every fragment, with its variable."""
        for fragment in self.staged.fragments:
            yield from (
                (fragment, access, var)
                for accesses, variables in (
                    (fragment.inputs, fragment.jaxpr.invars),
                    (fragment.outputs, fragment.jaxpr.outvars),
                )
                for access, var in zip(accesses, variables, strict=True)
            )

    # -- shapes and places --------------------------------------------------------------------

    def slots(self) -> None:
        for position, slot in enumerate(self.staged.slots):
            who = f"slot {position} ({slot.name})"
            self.require(slot.index == position, f"{who} calls itself {slot.index}")
            self.require(0 <= slot.stage < self.staged.num_stages, f"{who} is on no stage")
            for sort, flag in (
                ("stacked", slot.stacked),
                ("partial", isinstance(slot.kind, Partial)),
            ):
                self.require(
                    not flag or slot.scope == "step" or sort == "partial",
                    f"{who} is {sort} and lives for one microbatch only",
                )
            self.require(
                not slot.stacked or isinstance(slot.kind, Batched),
                f"{who} is stacked and {slot.kind}",
            )

    def fragments(self) -> None:
        seen = set()
        for fragment in self.staged.fragments:
            who = _name(fragment)
            key = (fragment.stage, fragment.role, fragment.phase)
            self.require(key not in seen, f"{who} stands twice")
            seen.add(key)
            jaxpr = fragment.jaxpr
            for what, entries, variables in (
                ("inputs", fragment.inputs, jaxpr.invars),
                ("outputs", fragment.outputs, jaxpr.outvars),
            ):
                self.require(
                    len(entries) == len(variables),
                    f"{who} has {len(entries)} {what} for {len(variables)} variables",
                )
            fault = jaxpr_fault(jaxpr)
            self.require(not fault, f"{who}: {fault}")
            if fragment.role in _MICROBATCH:
                bound = [*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]
                self.require(
                    all(v in self.staged.kinds or isinstance(v, DropVar) for v in bound),
                    f"{who} has a variable without a kind",
                )
        for fragment, access, var in self.accesses():
            self._access(fragment, access, var.aval)

    def _access(
        self, fragment: Fragment, access: FragmentInput | FragmentOutput, aval: ShapedArray
    ) -> None:
        who = f"{_name(fragment)}, {type(access).__name__}"
        micro = fragment.role in _MICROBATCH
        if isinstance(access, ReadOffset):
            self.require(micro, f"{who}: only microbatches have an offset")
            self.require(aval.shape == () and aval.dtype == np.int32, f"{who}: not i32[]")
            return
        slot = self.slot(access.slot, who)
        who = f"{who} of slot {slot.index} ({slot.name})"
        self.require(slot.stage == fragment.stage, f"{who}: it is on stage {slot.stage}")
        self.require(
            slot.scope == "step" or micro, f"{who}: it lives for one microbatch, this runs once"
        )
        partial = isinstance(slot.kind, Partial) and slot.scope == "step"
        rows = isinstance(access, (ReadRow, ReadJoined, WriteRow, WriteSplit))
        self.require(rows == slot.stacked, f"{who}: it is {'' if slot.stacked else 'not '}stacked")
        if isinstance(access, (ReadRow, WriteRow, Accumulate)):
            self.require(micro, f"{who}: only microbatches do that")
        if isinstance(access, (ReadJoined, WriteSplit)):
            self.require(not micro, f"{who}: a microbatch has no full batch")
        if isinstance(access, Write):
            self.require(
                (slot.scope == "microbatch") == micro,
                f"{who}: a fragment that runs {'M times' if micro else 'once'} cannot write it",
            )
        self.require(
            isinstance(access, Accumulate) == partial or isinstance(access, Read),
            f"{who}: it is {slot.kind}",
        )
        if partial and isinstance(access, Read):
            self.require(
                fragment.role == "epilogue", f"{who}: it is not complete before the epilogue"
            )
        self._aval(who, slot, access, aval)

    def _aval(
        self, who: str, slot: Slot, access: FragmentInput | FragmentOutput, aval: ShapedArray
    ) -> None:
        expected = slot.aval
        if isinstance(access, (ReadJoined, WriteSplit)):
            expected = self.full_batch(slot)
        # An accumulator may be wider than what is added to it.
        equal = (
            aval.shape == expected.shape
            if isinstance(access, Accumulate)
            else _same(aval, expected)
        )
        self.require(equal, f"{who}: it holds {aval_text(expected)}, not {aval_text(aval)}")

    def full_batch(self, slot: Slot) -> ShapedArray:
        """What the M parts of a stacked slot make."""
        shape = list(slot.aval.shape)
        if isinstance(slot.kind, Batched):
            self.require(slot.kind.dim < len(shape), f"slot {slot.index} has no {slot.kind}")
            shape[slot.kind.dim] *= self.staged.num_microbatches
        return slot.aval.update(shape=tuple(shape))

    def transfers_and_feeds(self) -> None:
        for transfer in self.staged.transfers:
            source = self.slot(transfer.source, "a transfer")
            target = self.slot(transfer.target, "a transfer")
            who = f"the transfer from slot {source.index} to slot {target.index}"
            self.require(source.stage != target.stage, f"{who} stays on stage {source.stage}")
            self.require(
                not (isinstance(source.kind, Partial) and source.scope == "step"),
                f"{who} sends an accumulator",
            )
            for what in ("scope", "kind", "stacked"):
                self.require(
                    getattr(source, what) == getattr(target, what), f"{who} changes the {what}"
                )
            self.require(
                _same(source.aval, target.aval),
                f"{who} turns {aval_text(source.aval)} into {aval_text(target.aval)}",
            )
        inputs = self.staged.layered.program.traced.inputs
        for feed in self.staged.feeds:
            slot = self.slot(feed.slot, "a feed")
            who = f"the feed of slot {slot.index} ({slot.name})"
            self.require(0 <= feed.input < len(inputs), f"{who} names input {feed.input}")
            self.require(slot.scope == "step", f"{who}: it lives for one microbatch")
            expected = self.full_batch(slot) if slot.stacked else slot.aval
            aval = inputs[feed.input].aval
            self.require(
                _same(expected, aval),
                f"{who}: it needs {aval_text(expected)}, {inputs[feed.input].path} is "
                f"{aval_text(aval)}",
            )

    # -- order --------------------------------------------------------------------------------

    def definitions(self) -> None:
        once: dict[int, list[str]] = {}
        for feed in self.staged.feeds:
            once.setdefault(feed.slot, []).append("a feed")
            self.writers.setdefault(feed.slot, []).append(_START)
        for transfer in self.staged.transfers:
            once.setdefault(transfer.target, []).append("a transfer")
        for fragment, access, _ in self.accesses():
            if isinstance(access, (Write, WriteSplit)):
                once.setdefault(access.slot, []).append(_name(fragment))
            if isinstance(access, (Write, WriteSplit, WriteRow, Accumulate)):
                self.writers.setdefault(access.slot, []).append(_time(fragment))
        for slot, sources in once.items():
            self.require(
                len(sources) == 1, f"slot {slot} is defined twice: by {' and '.join(sources)}"
            )
        for fragment, access, _ in self.accesses():
            if isinstance(access, (WriteRow, Accumulate)):
                self.require(
                    access.slot not in once,
                    f"slot {access.slot} is filled by {_name(fragment)} and defined by "
                    f"{once.get(access.slot, [''])[0]}",
                )

    def origin(self, index: int) -> int:
        """The slot whose value arrives here through transfers."""
        seen = {index}
        while index in self.sources:
            index = self.sources[index]
            self.require(index not in seen, f"slot {index} is transferred to itself")
            seen.add(index)
        return index

    def reads(self) -> None:
        for transfer in self.staged.transfers:
            origin = self.origin(transfer.source)
            self.require(
                origin in self.writers, f"slot {transfer.source} is sent and never written"
            )
        for fragment, access, _ in self.accesses():
            if isinstance(access, (Read, ReadRow, ReadJoined)):
                self._read(fragment, access.slot)

    def _read(self, fragment: Fragment, index: int) -> None:
        origin = self.origin(index)
        who = f"{_name(fragment)} reads slot {index} ({self.staged.slots[index].name})"
        self.require(origin in self.writers, f"{who}: it is never written")
        read = _time(fragment)
        sender, reader = self.staged.slots[origin].stage, fragment.stage
        for written in self.writers[origin]:
            if written < read:
                continue
            # Within one role a microbatch walks from stage to stage.
            along = written == read and (
                (fragment.role == "forward" and sender < reader)
                or (fragment.role in ("backward", "weight") and sender > reader)
            )
            self.require(along, f"{who}: it is written later, or at the same time")

    def frees(self) -> None:
        last_read: dict[int, Time] = {}
        for fragment, access, _ in self.accesses():
            if isinstance(access, (Read, ReadRow, ReadJoined)):
                last_read[access.slot] = max(_time(fragment), last_read.get(access.slot, _START))
        kept = {result.slot for result in self.staged.results if isinstance(result, FromSlot)}
        for fragment in self.staged.fragments:
            for index in fragment.frees:
                slot = self.slot(index, _name(fragment))
                who = f"{_name(fragment)} frees slot {index} ({slot.name})"
                self.require(slot.stage == fragment.stage, f"{who} of stage {slot.stage}")
                self.require(index not in kept, f"{who}, which is a result")
                self.require(
                    last_read.get(index, _START) <= _time(fragment), f"{who}, which is read later"
                )
                self.require(
                    fragment.role not in _MICROBATCH or slot.scope == "microbatch",
                    f"{who}, which the next microbatch needs",
                )

    # -- results ------------------------------------------------------------------------------

    def results(self) -> None:
        staged = self.staged
        program = staged.layered.program
        self.require(
            len(staged.results) == len(program.outvars),
            f"{len(staged.results)} results for {len(program.outvars)} outputs",
        )
        self.require(
            staged.num_microbatches == program.num_microbatches,
            "the numbers of microbatches differ",
        )
        avals = []
        for path, var, result in zip(
            program.traced.out_paths, program.outvars, staged.results, strict=True
        ):
            if isinstance(result, FromSlot):
                slot = self.slot(result.slot, f"the result {path}")
                self.require(
                    slot.scope == "step"
                    and not slot.stacked
                    and not isinstance(slot.kind, Partial),
                    f"the result {path} cannot be read from slot {slot.index}",
                )
                self.require(
                    self.origin(slot.index) in self.writers, f"the result {path} is never written"
                )
                aval = slot.aval
            elif isinstance(result, FromInput):
                known = 0 <= result.input < len(program.traced.inputs)
                self.require(known, f"the result {path} names input {result.input}")
                aval = program.traced.inputs[result.input].aval
            else:
                assert isinstance(result, FromLiteral)
                aval = result.aval
            self.require(
                _same(aval, var.aval),
                f"the result {path} is {aval_text(aval)}, not {aval_text(var.aval)}",
            )
            avals.append(aval)
        for source, target in staged.pairs:
            known = 0 <= source < len(program.traced.inputs) and 0 <= target < len(avals)
            self.require(known, f"the pair ({source}, {target}) names no leaf")
            self.require(
                _same(program.traced.inputs[source].aval, avals[target]),
                f"the pair ({source}, {target}) is not of one shape",
            )
