"""Slots, transfers and fragments, once it is known where every equation runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal as OneOf

from jax import lax

from hetpass._jax import Atom, JaxprEqn, ShapedArray, Var, make_jaxpr_value, make_var
from hetpass.ir.kinds import Batched, Kind, Partial, Whole
from hetpass.ir.program import (
    Accumulate,
    Accumulated,
    Feed,
    Fragment,
    FragmentInput,
    FragmentOutput,
    Layered,
    Read,
    ReadJoined,
    ReadOffset,
    ReadRow,
    RegionOutput,
    Role,
    SliceInput,
    Slot,
    Transfer,
    WholeInput,
    Write,
    WriteRow,
    WriteSplit,
)
from hetpass.transforms.localize import Localized
from hetpass.transforms.phases import Demand, Instance, Phased
from hetpass.transforms.sizes import SMALL_BYTES, aval_bytes
from hetpass.transforms.splice import equations_of

_MICROBATCH_ROLES: Mapping[str, Role] = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight",
}

ROLE_ORDER: Mapping[str, int] = {
    "prologue": 0,
    "forward": 1,
    "backward": 2,
    "weight": 3,
    "epilogue": 4,
}


@dataclass(frozen=True)
class Code:
    """What the assembly puts together.

    Attributes:
      layered: with every equation in one stage.
      localized: the code of the microbatch fragments.
      phased: the code of the prologue and epilogue fragments.
      inputs: the number of the input leaf that a full-batch variable is.
      owner: the stage of each input leaf.
      results: the region output that makes a full-batch variable.
    """

    layered: Layered
    localized: Localized
    phased: Phased
    inputs: Mapping[Var, int]
    owner: Sequence[int]
    results: Mapping[Var, int]


@dataclass(frozen=True, order=True)
class Key:
    """Identifies a fragment; sorts by time."""

    order: int
    phase: int
    stage: int
    role: Role


@dataclass
class Draft:
    """A fragment being written: equations, and what stands for which slot."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    inputs: dict[Var, FragmentInput] = field(default_factory=dict)
    outputs: list[tuple[Atom, FragmentOutput]] = field(default_factory=list)


@dataclass
class Assembly:
    """Everything so far. Slots, and the copies of values on other stages, are made on demand."""

    code: Code
    slots: list[Slot] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    drafts: dict[Key, Draft] = field(default_factory=dict)
    whole: dict[tuple[Var, int], int] = field(default_factory=dict)
    stacked: dict[tuple[Var, Kind, int], int] = field(default_factory=dict)
    within: dict[tuple[Var, int], int] = field(default_factory=dict)
    collected: dict[int, int] = field(default_factory=dict)
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        self.names = Names(self.code)

    def draft(self, key: Key) -> Draft:
        return self.drafts.setdefault(key, Draft())

    def add_slot(
        self,
        stage: int,
        aval: ShapedArray,
        scope: OneOf["step", "microbatch"],
        kind: Kind,
        name: str,
        stacked: bool = False,
    ) -> int:
        index = len(self.slots)
        unique = self.names.unique(stage, name)
        self.slots.append(Slot(index, stage, aval, scope, kind, stacked, unique))
        return index

    def copy_to(self, stage: int, source: int, name: str) -> int:
        """A slot on `stage` that receives what `source` holds."""
        like = self.slots[source]
        target = self.add_slot(stage, like.aval, like.scope, like.kind, name, like.stacked)
        self.transfers.append(Transfer(source, target))
        return target

    # Values of the whole step.

    def whole_slot(self, var: Var, stage: int) -> int:
        """The slot that holds the full-batch value of `var` on `stage`."""
        if (var, stage) not in self.whole:
            self.whole[var, stage] = self._make_whole(var, stage)
        return self.whole[var, stage]

    def _make_whole(self, var: Var, stage: int) -> int:
        name = self.names.once(var)
        if var in self.code.inputs:
            index = self.code.inputs[var]
            home = self.code.owner[index]
            if stage != home:
                return self.copy_to(stage, self.whole_slot(var, home), name)
            slot = self.add_slot(stage, var.aval, "step", Whole(), name)
            self.feeds.append(Feed(index, slot))
            return slot
        source = self.code.phased.source(var, stage)
        if source.stage != stage:
            return self.copy_to(stage, self.whole_slot(var, source.stage), name)
        return self.extra_slot(var, stage, name)

    def extra_slot(self, var: Var, stage: int, name: str) -> int:
        """A slot of its own for `var`, on the stage that makes it."""
        source = self.code.phased.source(var, stage)
        slot = self.add_slot(stage, var.aval, "step", Whole(), name)
        self.draft(once_key(source)).outputs.append((var, Write(slot)))
        return slot

    def stacked_slot(self, source: SliceInput, stage: int) -> int:
        """The slot with the microbatches' parts of a full-batch value, on `stage`."""
        key = (source.var, source.kind, stage)
        if key not in self.stacked:
            self.stacked[key] = self._make_stacked(source, stage)
        return self.stacked[key]

    def _make_stacked(self, source: SliceInput, stage: int) -> int:
        var, name = source.var, self.names.once(source.var)
        part = self._part(var.aval, source.kind)
        if var in self.code.inputs:  # each stage is fed its own
            slot = self.add_slot(stage, part, "step", source.kind, name, stacked=True)
            self.feeds.append(Feed(self.code.inputs[var], slot))
            return slot
        instance = self.code.phased.source(var, stage)
        if instance.stage != stage:
            return self.copy_to(stage, self.stacked_slot(source, instance.stage), name)
        slot = self.add_slot(stage, part, "step", source.kind, name, stacked=True)
        self.draft(once_key(instance)).outputs.append((var, WriteSplit(slot)))
        return slot

    def _part(self, aval: ShapedArray, kind: Batched) -> ShapedArray:
        shape = list(aval.shape)
        shape[kind.dim] //= self.code.layered.program.num_microbatches
        return aval.update(shape=tuple(shape))

    # Values of one microbatch.

    def within_slot(self, var: Var, stage: int) -> int:
        """The microbatch slot that holds a region value on `stage`."""
        if (var, stage) not in self.within:
            home, role = self.code.localized.home[var]
            name = self.names.within(var)
            if stage == home:
                kind = self.code.layered.program.kinds.get(var, Whole())
                slot = self.add_slot(stage, var.aval, "microbatch", kind, name)
                self.draft(micro_key((home, role))).outputs.append((var, Write(slot)))
            else:
                slot = self.copy_to(stage, self.within_slot(var, home), name)
            self.within[var, stage] = slot
        return self.within[var, stage]

    def collected_slot(self, index: int) -> int:
        """The accumulator, or the stacked slices, of region output `index`."""
        if index not in self.collected:
            program = self.code.layered.program
            var, output = program.region.outvars[index], program.region_outputs[index]
            place = self.code.localized.home[var]
            self.collected[index] = self._collect(var, output, place)
        return self.collected[index]

    def _collect(self, var: Var, output: RegionOutput, place: tuple[int, str]) -> int:
        stage, name = place[0], self.names.within(var)
        write: FragmentOutput
        if isinstance(output, Accumulated):
            aval = var.aval.update(dtype=output.dtype, weak_type=False)
            kind = Partial(output.op)
            slot = self.add_slot(stage, aval, "step", kind, f"{output.op} of {name}")
            write = Accumulate(slot)
        else:
            slot = self.add_slot(
                stage, var.aval, "step", output.kind, f"all of {name}", stacked=True
            )
            write = WriteRow(slot)
        self.draft(micro_key(place)).outputs.append((var, write))
        return slot


class Names:
    """Names for slots, unique on each stage."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._seen: dict[tuple[int, str], int] = {}
        self._once: dict[Var, str] = {}
        self._within: dict[Var, str] = {}
        self._count: dict[str, int] = {}
        program = code.layered.program
        self._mark = {
            v: (code.layered.spans[i].first, code.layered.backward[i])
            for i, eqn in enumerate(program.region.eqns)
            for v in eqn.outvars
        }
        for path, var in zip(program.traced.out_paths, program.outvars, strict=True):
            if isinstance(var, Var):
                self._once.setdefault(var, path)
        for var, index in code.inputs.items():
            self._once[var] = program.traced.inputs[index].path

    def once(self, var: Var) -> str:
        if var not in self._once:
            index = self._code.phased.maker[var]
            if var in self._code.results:
                region = self._code.layered.program.region
                self._once[var] = f"total {self.within(region.outvars[self._code.results[var]])}"
            else:
                self._once[var] = self._next(self._code.phased.nodes[index].role)
        return self._once[var]

    def within(self, var: Var) -> str:
        if var not in self._within:
            layer, backward = self._mark[var]
            label = self._code.layered.names[layer] or f"layer{layer}"
            self._within[var] = self._next(f"{label}.{'grad' if backward else 'out'}")
        return self._within[var]

    def unique(self, stage: int, name: str) -> str:
        count = self._seen.get((stage, name), 0)
        self._seen[stage, name] = count + 1
        return f"{name}#{count}" if count else name

    def _next(self, stem: str) -> str:
        count = self._count.get(stem, 0)
        self._count[stem] = count + 1
        return f"{stem}{count}"


def once_key(instance: Instance) -> Key:
    return Key(ROLE_ORDER[instance.role], instance.phase, instance.stage, instance.role)


def micro_key(place: tuple[int, str]) -> Key:
    stage, role = place
    return Key(ROLE_ORDER[role], 0, stage, _MICROBATCH_ROLES[role])


def fill_region(assembly: Assembly) -> None:
    """The forward and backward fragments."""
    program = assembly.code.layered.program
    sources = dict(zip(program.region.invars, program.region_inputs, strict=True))
    for place, code in assembly.code.localized.code.items():
        draft, stage = assembly.draft(micro_key(place)), place[0]
        draft.eqns.extend(code.eqns)
        for var in code.inputs:
            source = sources[var]
            if isinstance(source, WholeInput):
                draft.inputs[var] = Read(assembly.whole_slot(source.var, stage))
            elif isinstance(source, SliceInput):
                draft.inputs[var] = ReadRow(assembly.stacked_slot(source, stage))
            else:
                draft.inputs[var] = ReadOffset()
        for var in code.imports:
            draft.inputs[var] = Read(assembly.within_slot(var, stage))


def fill_once(assembly: Assembly, demands: Sequence[Demand]) -> None:
    """The prologue and epilogue fragments: their equations, and what they read."""
    phased = assembly.code.phased
    for key, indices in _code_by_fragment(phased, demands).items():
        draft = assembly.draft(key)
        made: set[Var] = set()
        for index in indices:
            node = phased.nodes[index]
            if node.eqn is None:
                _fill_result(assembly, draft, node.results[0])
            else:
                draft.eqns.append(node.eqn)
            made.update(node.results)
            for var in node.operands:
                if var not in made and var not in draft.inputs:
                    draft.inputs[var] = Read(assembly.whole_slot(var, key.stage))


def _code_by_fragment(phased: Phased, demands: Sequence[Demand]) -> dict[Key, list[int]]:
    """The nodes that each fragment runs, in order. A large value that is cheap to make is made
    again in each fragment that reads it, rather than kept between phases."""
    runs: list[set[Key]] = [set() for _ in phased.nodes]
    for demand in demands:
        if demand.var in phased.maker:
            instance = phased.source(demand.var, demand.stage)
            runs[instance.node].add(once_key(instance))
    for instance in phased.instances:
        eqn = phased.nodes[instance.node].eqn
        if eqn is not None and eqn.effects:
            runs[instance.node].add(once_key(instance))
    for index in range(len(phased.nodes) - 1, -1, -1):
        for key in sorted(runs[index]):
            for var in phased.nodes[index].operands:
                if var in phased.maker:
                    source = phased.source(var, key.stage)
                    again = (
                        phased.nodes[source.node].free
                        and source.stage == key.stage
                        and aval_bytes(var.aval) > SMALL_BYTES
                    )
                    runs[source.node].add(key if again else once_key(source))
    code: dict[Key, list[int]] = {}
    for index, keys in enumerate(runs):
        for key in sorted(keys):
            code.setdefault(key, []).append(index)
    return dict(sorted(code.items()))


def _fill_result(assembly: Assembly, draft: Draft, target: Var) -> None:
    """The full-batch value of a region result: combined and cast once, or joined."""
    index = assembly.code.results[target]
    output = assembly.code.layered.program.region_outputs[index]
    slot = assembly.collected_slot(index)
    if not isinstance(output, Accumulated):
        draft.inputs[target] = ReadJoined(slot)
        return
    total = make_var(assembly.slots[slot].aval)
    if total.aval.dtype == target.aval.dtype:
        draft.inputs[target] = Read(slot)
        return
    draft.inputs[total] = Read(slot)
    spliced = equations_of(lambda x: lax.convert_element_type(x, target.aval.dtype), total)
    (cast,) = spliced.eqns
    draft.eqns.append(cast.replace(outvars=[target]))


def finish_fragments(
    drafts: Mapping[Key, Draft], frees: Mapping[Key, Sequence[int]]
) -> tuple[Fragment, ...]:
    """The fragments, in order of time."""
    fragments = []
    for key, draft in sorted(drafts.items()):
        jaxpr = make_jaxpr_value(
            list(draft.inputs), [value for value, _ in draft.outputs], draft.eqns
        )
        fragments.append(
            Fragment(
                key.stage,
                key.role,
                key.phase,
                jaxpr,
                tuple(draft.inputs.values()),
                tuple(output for _, output in draft.outputs),
                tuple(frees.get(key, ())),
            )
        )
    return tuple(fragments)
