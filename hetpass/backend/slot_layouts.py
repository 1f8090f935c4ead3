"""How the slots of assigned stages lie: what fragments write and read there says it.

A microbatch's value lies as its layer keeps it, an accumulator as the assignment has it, a
parameter as it rests. What the update combines with a parameter element by element (its optimizer
state, the new value, a cast) lies like it. All else is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetpass._jax import Jaxpr, JaxprEqn, Literal, Var, open_jaxpr, scan_counts
from hetpass.analysis.element_groups import ElementGroups, moved
from hetpass.analysis.layer_operations import LOOP_IN, LOOP_OUT
from hetpass.backend.stage_choices import LayerChoices, StageChoices
from hetpass.ir.kinds import Partial
from hetpass.ir.operation_graph import Layout
from hetpass.ir.program import (
    Accumulate,
    Fragment,
    FromSlot,
    Read,
    ReadOffset,
    Staged,
)

MICROBATCH_ROLES = ("forward", "backward", "weight")


@dataclass(frozen=True)
class Place:
    """A value of a layer, or all layers' rows of one, stacked."""

    layer: LayerChoices
    number: int
    stacked: bool

    def stack(self, layout: Layout | None) -> Layout | None:
        if layout is None or not self.stacked:
            return layout
        return Layout(((), *layout.dims), layout.partial)


def read_place(choices: StageChoices, eqn: JaxprEqn, position: int) -> Place | None:
    """The value that an equation of a fragment reads."""
    at = choices.of_equation(eqn)
    if at is not None:
        number = at.operand(position)
        return None if number is None else Place(at.layer, number, False)
    at = choices.of_loop(eqn, LOOP_IN, position)
    if at is not None and at.draft.operands:
        return Place(at.layer, at.draft.operands[0], False)
    if eqn.primitive.name == "scan":
        var = open_jaxpr(eqn.params["jaxpr"])[0].invars[position]
        inner = choices.inner(eqn, var)
        if inner is not None:
            return Place(*inner, position >= sum(scan_counts(eqn)))
    atom = eqn.invars[position]
    known = choices.inner(eqn, atom) if isinstance(atom, Var) else None
    return None if known is None else Place(*known, False)


def made_place(choices: StageChoices, eqn: JaxprEqn, position: int) -> Place | None:
    """The value that an equation of a fragment makes."""
    at = choices.of_equation(eqn)
    if at is not None:
        number = at.result(position)
        return None if number is None else Place(at.layer, number, False)
    at = choices.of_loop(eqn, LOOP_OUT, position)
    if at is not None and at.draft.results:
        return Place(at.layer, at.draft.results[0], False)
    if eqn.primitive.name == "scan":
        atom = open_jaxpr(eqn.params["jaxpr"])[0].outvars[position]
        inner = choices.inner(eqn, atom) if isinstance(atom, Var) else None
        if inner is not None:
            return Place(*inner, position >= scan_counts(eqn)[1])
    return None


def read_places(choices: StageChoices, jaxpr: Jaxpr) -> dict[Var, Place]:
    """Per input of a fragment, the first value that it is read as."""
    inputs, found = set(jaxpr.invars), dict[Var, Place]()
    for eqn in jaxpr.eqns:
        for position, atom in enumerate(eqn.invars):
            if isinstance(atom, Var) and atom in inputs and atom not in found:
                place = read_place(choices, eqn, position)
                if place is not None:
                    found[atom] = place
    return found


@dataclass
class _Layouts:
    """Layouts of slots as they are found.

    Attributes:
      rest: slot -> how the state lies that it is part of, where the slot itself is in use.
      totals: accumulator -> how its sum is needed, once per step; and any other slot -> how what
        the prologue or epilogue writes there comes out.
    """

    staged: Staged
    known: dict[int, Layout] = field(default_factory=dict)
    rest: dict[int, Layout] = field(default_factory=dict)
    totals: dict[int, Layout] = field(default_factory=dict)

    def microbatches(self, fragment: Fragment, choices: StageChoices) -> None:
        jaxpr = fragment.jaxpr
        reads = read_places(choices, jaxpr)
        for var, source in zip(jaxpr.invars, fragment.inputs, strict=True):
            if isinstance(source, ReadOffset) or var not in reads:
                continue
            place = reads[var]
            kept = place.stack(place.layer.kept(place.number))
            at_rest = place.stack(place.layer.at_rest(place.number))
            slot = self.staged.slots[source.slot]
            if isinstance(source, Read) and slot.scope == "step" and at_rest is not None:
                self.rest.setdefault(source.slot, at_rest)
                if not place.layer.is_gathered_once(place.number):
                    kept = at_rest
            if kept is not None and not isinstance(slot.kind, Partial):
                self.known.setdefault(source.slot, Layout(kept.dims))
        makers = {v: (e, k) for e in jaxpr.eqns for k, v in enumerate(e.outvars)}
        for atom, output in zip(jaxpr.outvars, fragment.outputs, strict=True):
            if isinstance(atom, Literal) or atom not in makers:
                continue
            made = made_place(choices, *makers[atom])
            if made is None:
                continue
            layout = made.layer.kept(made.number)
            if isinstance(output, Accumulate):
                layout = made.layer.assignment.accumulators.get(made.number, layout)
            layout = made.stack(layout)
            if layout is not None:
                keeps = isinstance(output, Accumulate)
                self.known[output.slot] = layout if keeps else Layout(layout.dims)


def slot_layouts(
    staged: Staged, choices: Mapping[int, StageChoices], axes: Mapping[int, Mapping[str, int]]
) -> tuple[tuple[Layout | None, ...], dict[int, Layout]]:
    """One per slot, None on stages without assignments; and `_Layouts.totals`.

    Args:
      choices: by stage. axes: by stage, sizes of the mesh axes.
    """
    found = _Layouts(staged)
    for fragment in staged.fragments:
        if fragment.role in MICROBATCH_ROLES and fragment.stage in choices:
            found.microbatches(fragment, choices[fragment.stage])
    _follow_state(staged, found, axes)
    feeds = {feed.input: feed.slot for feed in staged.feeds}
    for source, target in staged.pairs:
        result = staged.results[target]
        if isinstance(result, FromSlot) and feeds.get(source) in found.known:
            before, after = staged.slots[feeds[source]], staged.slots[result.slot]
            if before.stage == after.stage and not before.stacked:
                found.known[after.index] = found.known[before.index]
    layouts = tuple(
        found.known.get(slot.index, Layout(((),) * len(slot.aval.shape)))
        if slot.stage in choices
        else None
        for slot in staged.slots
    )
    return layouts, found.totals


def _follow_state(staged: Staged, found: _Layouts, axes: Mapping[int, Mapping[str, int]]) -> None:
    """What the prologue and epilogue combine element by element lies alike."""
    groups = ElementGroups(with_parts=True)
    names: dict[int, Var] = {}  # slot -> a variable that stands for it
    for fragment in staged.fragments:
        if fragment.role in MICROBATCH_ROLES:
            continue
        for eqn in fragment.jaxpr.eqns:
            groups.visit(eqn)
        ends = [
            *zip(fragment.jaxpr.invars, fragment.inputs, strict=True),
            *zip(fragment.jaxpr.outvars, fragment.outputs, strict=True),
        ]
        for atom, end in ends:
            if isinstance(atom, Var) and not isinstance(end, ReadOffset):
                slot = staged.slots[end.slot]
                if tuple(atom.aval.shape) == tuple(slot.aval.shape):
                    groups.join(names.setdefault(slot.index, atom), atom)
    for transfer in staged.transfers:
        if transfer.source in names and transfer.target in names:
            groups.join(names[transfer.source], names[transfer.target])
    seeds: dict[tuple[int, Var], tuple[Var, Layout]] = {}
    fed = {feed.slot for feed in staged.feeds}
    for index, layout in sorted(found.rest.items(), key=lambda item: (item[0] not in fed, item[0])):
        if index in names:  # the leaf itself decides, before what is made of it
            var = names[index]
            seeds.setdefault((staged.slots[index].stage, groups.root(var)), (var, layout))
    for index, var in names.items():
        slot = staged.slots[index]
        seed = seeds.get((slot.stage, groups.root(var)))
        if seed is None:
            continue
        dims = moved(seed[1].dims, groups.dims_of(seed[0]), groups.dims_of(var), axes[slot.stage])
        if dims is not None:
            found.totals[index] = Layout(dims)
            if not isinstance(slot.kind, Partial):
                found.known.setdefault(index, Layout(dims))
