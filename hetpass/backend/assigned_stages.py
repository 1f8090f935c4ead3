"""What a plan's assignments make of a staged program: choices by stage, layouts by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetpass._jax import Var, make_jaxpr_value, make_var
from hetpass.analysis.operation_graph import GraphSource, LayerGraph, layer_graphs
from hetpass.backend.crossing_sums import crossing_sums
from hetpass.backend.slot_layouts import MICROBATCH_ROLES, read_place, slot_layouts
from hetpass.backend.stage_choices import StageChoices
from hetpass.errors import PlanError
from hetpass.ir.kinds import Whole
from hetpass.ir.operation_graph import Assignment, Layout
from hetpass.ir.plan import Plan
from hetpass.ir.program import Fragment, Layered, Read, Slot, Staged, Write
from hetpass.ir.quantities import counted


@dataclass(frozen=True)
class AssignedStages:
    """The stages of a plan that run by assignments.

    Attributes:
      staged: with a slot of its own for every parameter that is gathered once per step.
      choices: by stage.
      assignments: by stage, one that says which mesh and links are meant.
      layouts: per slot; None on other stages.
      totals: accumulator -> how its sum is needed, once per step; and any other slot -> how what
        the prologue or epilogue writes there comes out.
    """

    staged: Staged
    choices: Mapping[int, StageChoices]
    assignments: Mapping[int, Assignment]
    layouts: tuple[Layout | None, ...]
    totals: Mapping[int, Layout] = field(default_factory=dict)


def assigned_stages(staged: Staged, plan: Plan) -> AssignedStages:
    """Reads the plan's assignments; sums that cross between unlike data axes are stored whole.

    Raises:
      PlanError: HP-PLAN-ASSIGNMENT for one that is made for another program.
    """
    staged = crossing_sums(staged, plan)
    stages = plan.pipelines[0].stages
    chosen = {k: s for k, s in enumerate(stages) if any(a is not None for a in s.assignments)}
    if not chosen:
        return AssignedStages(staged, {}, {}, (None,) * len(staged.slots))
    layered = staged.layered
    graphs = layer_graphs(GraphSource.of(layered))
    choices: dict[int, StageChoices] = {}
    assignments: dict[int, Assignment] = {}
    for number, stage in chosen.items():
        for layer, assignment in enumerate(stage.assignments, stage.first_layer):
            if assignment is not None:
                _check_size(layer, graphs[layered.layer_kinds[layer]], assignment)
                assignments.setdefault(number, assignment)
        _check_scans(layered, number, stage.assignments, stage.first_layer)
        choices[number] = StageChoices.of(
            stage.first_layer, stage.assignments, graphs, layered.layer_kinds
        )
    staged = _gather_once(staged, choices)
    axes = {number: dict(assignment.mesh) for number, assignment in assignments.items()}
    return AssignedStages(staged, choices, assignments, *slot_layouts(staged, choices, axes))


def _check_size(layer: int, graph: LayerGraph, assignment: Assignment) -> None:
    operations = graph.graph.operations
    fits = len(operations) == len(assignment.operations) and all(
        len(c.results) == len(o.results) and len(c.factors) == (len(o.rule.sizes) if o.rule else 0)
        for o, c in zip(operations, assignment.operations, strict=True)
    )
    if not fits:
        raise PlanError(
            "HP-PLAN-ASSIGNMENT",
            "an assignment does not fit the operations of its layer",
            where=f"layer {layer}",
            details=(
                f"the layer has {counted(len(operations), 'operation')}, "
                f"the assignment {len(assignment.operations)}",
            ),
            ways_out=("plan again for this program", "leave the assignment out"),
        )


def _check_scans(
    layered: Layered, stage: int, assignments: Sequence[Assignment | None], first_layer: int
) -> None:
    """The layers of one scan on a stage run one program, so equal ones have one assignment.

    A layer of another kind holds more than its iteration of the scan (the head beside the last
    block): of its assignment the rest counts, and the scan runs by that of the first layer.
    """
    last = first_layer + len(assignments) - 1
    for span in layered.spans:
        low, high = max(span.first, first_layer), min(span.last, last)
        mine: dict[int, Assignment | None] = {}
        for layer in range(low, high + 1) if span.first < span.last else ():
            assignment = assignments[layer - first_layer]
            if mine.setdefault(layered.layer_kinds[layer], assignment) != assignment:
                raise PlanError(
                    "HP-PLAN-ASSIGNMENT",
                    f"layers {low} to {high} are one scan, and have different assignments",
                    where=f"stage {stage}",
                    ways_out=("give them one assignment", "cut the stage between them"),
                )


_Copies = dict[tuple[int, Layout], int]
"""(slot, layout) -> the slot of its copy in that layout."""


def _gather_once(staged: Staged, choices: Mapping[int, StageChoices]) -> Staged:
    """Parameters that are gathered once per step get a slot for the copy in use, written by one
    more prologue fragment per stage."""
    written = {o.slot for f in staged.fragments for o in f.outputs}
    slots = list(staged.slots)
    copies: _Copies = {}
    fragments = []
    for fragment in staged.fragments:
        if fragment.role in MICROBATCH_ROLES and fragment.stage in choices:
            given = {
                var: source.slot
                for var, source in zip(fragment.jaxpr.invars, fragment.inputs, strict=True)
                if isinstance(source, Read)
                and source.slot not in written
                and slots[source.slot].scope == "step"
            }
            fragment = _reading_copies(fragment, choices[fragment.stage], given, copies, slots)
        fragments.append(fragment)
    if not copies:
        return staged
    phase = 1 + max((f.phase for f in staged.fragments if f.role == "prologue"), default=0)
    stages = sorted({slots[index].stage for index in copies.values()})
    added = [_gathering(stage, phase, copies, slots) for stage in stages]
    return replace(staged, slots=tuple(slots), fragments=(*added, *fragments))


def _reading_copies(
    fragment: Fragment,
    choices: StageChoices,
    given: Mapping[Var, int],
    copies: _Copies,
    slots: list[Slot],
) -> Fragment:
    """The fragment, in which every layer reads its own copy of a parameter, if it has one.

    Args:
      given: inputs that may be parameters -> their slots.
      copies, slots: of all fragments, added to.
    """
    jaxpr = fragment.jaxpr
    added: dict[int, Var] = {}  # copy -> the input that it is read as
    eqns = []
    for eqn in jaxpr.eqns:
        invars = list(eqn.invars)
        for position, atom in enumerate(eqn.invars):
            if not isinstance(atom, Var) or atom not in given:
                continue
            place = read_place(choices, eqn, position)
            if place is None:
                continue
            kept, resting = (
                place.stack(layout)
                for layout in (place.layer.kept(place.number), place.layer.at_rest(place.number))
            )
            if place.layer.is_gathered_once(place.number) and kept is not None and kept != resting:
                slot = slots[given[atom]]
                if (slot.index, kept) not in copies:
                    copies[slot.index, kept] = len(slots)
                    slots.append(_copy_of(slot, len(slots)))
                copy = copies[slot.index, kept]
                invars[position] = added.setdefault(copy, make_var(atom.aval))
        eqns.append(eqn.replace(invars=invars) if added else eqn)
    if not added:
        return fragment
    read = {a for e in eqns for a in e.invars if isinstance(a, Var)} | {*jaxpr.outvars}
    left = [
        (v, source)
        for v, source in zip(jaxpr.invars, fragment.inputs, strict=True)
        if v in read or v not in given
    ]
    return replace(
        fragment,
        jaxpr=make_jaxpr_value(
            [*(v for v, _ in left), *added.values()], jaxpr.outvars, eqns, jaxpr.constvars
        ),
        inputs=(*(source for _, source in left), *(Read(copy) for copy in added)),
    )


def _copy_of(slot: Slot, index: int) -> Slot:
    return Slot(index, slot.stage, slot.aval, "step", Whole(), False, f"{slot.name} in use")


def _gathering(stage: int, phase: int, copies: _Copies, slots: list[Slot]) -> Fragment:
    pairs = [(a, b) for (a, _), b in copies.items() if slots[a].stage == stage]
    invars: list[Var] = [make_var(slots[a].aval) for a, _ in pairs]
    return Fragment(
        stage=stage,
        role="prologue",
        phase=phase,
        jaxpr=make_jaxpr_value(invars, invars, []),
        inputs=tuple(Read(a) for a, _ in pairs),
        outputs=tuple(Write(b) for _, b in pairs),
        frees=(),
    )
