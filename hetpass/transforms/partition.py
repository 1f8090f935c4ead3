"""Layered, Plan -> Staged: fragments, slots and transfers.

In order, each step a file of this room:

    tag_operations   which operation of its layer each equation is, for stages with assignments
    split_scans      scans over layers end at stage boundaries
    defer_partials   shares of gradients do not cross stages with a microbatch
    recompute        backward parts that run their forward part again, where the plan says so
    defer_scan_weights, split_weights
                     what only weight gradients need, where the schedule has tasks for it
    recipes          what is cheaper to make again than to send or keep
    localize         the equations of every forward, backward and weight fragment
    placement        stages for inputs, prologue and epilogue
    split_conds      one `cond` per stage; then placement once more if branches were opened
    phases           prologue and epilogue code by stage and phase
    assemble         slots, transfers, fragments; lifetimes says what each may free
    pack_transfers   small values to one stage travel together

Nothing is decided here that a plan could decide: layers become stages as the plan says, the rest
follows from sizes by fixed rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hetpass._jax import DropVar, JaxprEqn, Literal, Var
from hetpass.analysis.operation_graph import GraphSource
from hetpass.analysis.region_recipes import region_recipes
from hetpass.errors import PlanError
from hetpass.ir.plan import Plan
from hetpass.ir.program import (
    FromInput,
    FromLiteral,
    FromSlot,
    Layered,
    OffsetInput,
    Result,
    Staged,
    StepProgram,
)
from hetpass.ir.quantities import counted
from hetpass.schedules.make import WEIGHT_SCHEDULES
from hetpass.transforms.assemble import (
    Assembly,
    Code,
    fill_once,
    fill_region,
    finish_fragments,
)
from hetpass.transforms.dead_code import live_equations
from hetpass.transforms.defer_partials import defer_partials
from hetpass.transforms.defer_scan_weights import defer_scan_weights
from hetpass.transforms.lifetimes import last_uses
from hetpass.transforms.localize import Localized, Place, localize
from hetpass.transforms.pack_transfers import pack_transfers
from hetpass.transforms.pairing import pair_leaves
from hetpass.transforms.phases import Demand, Node, phases
from hetpass.transforms.placement import Placement, Votes, place
from hetpass.transforms.recipes import once_recipes
from hetpass.transforms.recompute import recompute
from hetpass.transforms.sizes import aval_bytes
from hetpass.transforms.split_conds import split_conds
from hetpass.transforms.split_scans import split_scans
from hetpass.transforms.split_weights import split_weights
from hetpass.transforms.tag_operations import tag_operations

_MAX_COND_NESTING = 8


def partition(
    layered: Layered, plan: Plan, *, homes: Mapping[int, int] = MappingProxyType({})
) -> Staged:
    """Cuts a layered step into the fragments and transfers of a pipeline.

    Args:
      layered: the step with its layers.
      plan: one pipeline; its stages are contiguous ranges of layers, in order, one replica each.
      homes: flat input -> stage, for inputs that already live somewhere.

    The plan's schedule says whether weight gradients are fragments of their own, and its stages
    which of them recompute their forward values.

    Raises:
      PlanError: the plan does not cover the layers in order, is for another number of
        microbatches, or has several pipelines or replicas.
    """
    stages = plan.pipelines[0].stages
    return partition_layers(
        layered,
        _stages(layered, plan),
        len(stages),
        homes,
        recomputed=[i for i, stage in enumerate(stages) if stage.recompute == "full"],
        weights_apart=plan.schedule in WEIGHT_SCHEDULES,
        tagged=any(a is not None for stage in stages for a in stage.assignments),
    )


def partition_layers(
    layered: Layered,
    stage_of_layer: Sequence[int],
    num_stages: int,
    homes: Mapping[int, int] = MappingProxyType({}),
    *,
    recomputed: Collection[int] = (),
    weights_apart: bool = False,
    tagged: bool = False,
) -> Staged:
    """The same, for layers given to stages directly; a stage may have none.

    Args:
      stage_of_layer: per layer, not decreasing.
      num_stages: S.
      homes: as in `partition`.
      recomputed: the stages whose backward part runs their forward part again.
      weights_apart: weight gradients are fragments of their own.
      tagged: equations say which operation of their layer they are, for assignments.
    """
    source = layered
    if tagged:
        source = tag_operations(layered, GraphSource.of(layered).equations)
    cut = defer_partials(split_scans(source, stage_of_layer), stage_of_layer)
    cut = recompute(cut, stage_of_layer, recomputed)
    if weights_apart:
        cut = defer_scan_weights(cut)
    placed = _place_once(cut, _Stages(stage_of_layer, weights_apart), homes)
    pairs = pair_leaves(
        cut.program.traced.inputs,
        cut.program.traced.out_paths,
        [v.aval for v in cut.program.outvars],
    )
    return pack_transfers(_assemble(layered, placed, pairs, num_stages))


# ---------------------------------------------------------------------------------------------
# Stages


def _stages(layered: Layered, plan: Plan) -> tuple[int, ...]:
    """The stage of every layer."""
    if len(plan.pipelines) != 1 or any(len(s.replicas) != 1 for s in plan.pipelines[0].stages):
        raise PlanError(
            "HP-PLAN-SHAPE",
            "only plans with one pipeline and one replica per stage can be run",
            details=[
                f"pipelines: {len(plan.pipelines)}",
                *(
                    f"pipeline {p}, stage {s}: {counted(len(stage.replicas), 'replica')}"
                    for p, pipeline in enumerate(plan.pipelines)
                    for s, stage in enumerate(pipeline.stages)
                    if len(stage.replicas) != 1
                ),
            ],
            ways_out=["merge the pipelines, or give every stage a single submesh"],
        )
    pipeline = plan.pipelines[0]
    if pipeline.num_microbatches != layered.program.num_microbatches:
        raise PlanError(
            "HP-PLAN-MICROBATCHES",
            "the plan and the program have different numbers of microbatches",
            details=[
                f"plan: {pipeline.num_microbatches}",
                f"program: {layered.program.num_microbatches}",
            ],
            ways_out=["split the step with the plan's number of microbatches"],
        )
    stages: list[int] = []
    for index, stage in enumerate(pipeline.stages):
        if stage.first_layer != len(stages) or stage.last_layer < stage.first_layer:
            raise _bad_layers(
                layered,
                f"stage {index} holds layers {stage.first_layer} to {stage.last_layer}, but "
                f"layer {len(stages)} is next",
            )
        stages += [index] * (stage.last_layer - stage.first_layer + 1)
    if len(stages) != layered.num_layers:
        raise _bad_layers(layered, f"the stages hold {counted(len(stages), 'layer')}")
    return tuple(stages)


def _bad_layers(layered: Layered, detail: str) -> PlanError:
    return PlanError(
        "HP-PLAN-LAYERS",
        "the plan's stages do not cover the program's layers in order",
        details=[detail, f"the program has layers 0 to {layered.num_layers - 1}"],
        ways_out=["give every layer to exactly one stage, in order, from layer 0"],
    )


# ---------------------------------------------------------------------------------------------
# Where everything runs


@dataclass(frozen=True)
class _Stages:
    """The stage of every layer, and whether weight gradients are fragments of their own."""

    of_layer: Sequence[int]
    weights_apart: bool


@dataclass(frozen=True)
class _Placed:
    """A program whose equations all have their stage.

    Attributes:
      cut: the layered program, scans and conds split, dead epilogue equations gone.
      localized: the microbatch fragments' code.
      placement: stages of the rest.
    """

    cut: Layered
    localized: Localized
    placement: Placement


def _place_once(cut: Layered, stages: _Stages, homes: Mapping[int, int]) -> _Placed:
    """Finds stages for what runs once per step, splitting every `cond` on the way."""
    for _ in range(_MAX_COND_NESTING):
        cut = _drop_dead(cut)
        localized = _localize(cut, stages)
        placement = _placement(cut.program, localized, homes)
        program = cut.program
        split = split_conds(program.epilogue, placement)
        ahead = split_conds(program.prologue, placement)
        program = replace(program, epilogue=split.eqns, prologue=ahead.eqns)
        cut = replace(cut, program=program)
        if not (split.changed or ahead.changed):
            break
    return _Placed(cut, localized, placement)


def _drop_dead(cut: Layered) -> Layered:
    """Without the epilogue equations and the region outputs that no result needs."""
    program = cut.program
    live = live_equations(program.epilogue, program.outvars)
    epilogue = tuple(e for e, alive in zip(program.epilogue, live, strict=True) if alive)
    read = {v for e in epilogue for v in e.invars if isinstance(v, Var)}
    read.update(v for v in program.outvars if isinstance(v, Var))
    rows = [
        (var, output)
        for var, output in zip(program.region.outvars, program.region_outputs, strict=True)
        if output.target in read
    ]
    region = program.region.replace(outvars=[var for var, _ in rows])
    outputs = tuple(output for _, output in rows)
    return replace(
        cut,
        program=replace(program, epilogue=epilogue, region=region, region_outputs=outputs),
    )


def _localize(cut: Layered, stages: _Stages) -> Localized:
    region = cut.program.region
    homes: Sequence[Place] = [
        (stages.of_layer[span.first], "backward" if backward else "forward")
        for span, backward in zip(cut.spans, cut.backward, strict=True)
    ]
    if stages.weights_apart:
        homes = split_weights(region.eqns, homes, cut.spans, cut.program.kinds, region.outvars)
    free = region_recipes(region.eqns, region.invars)
    localized = localize(region.eqns, homes, free, region.outvars)
    _check_order(localized)
    return localized


def _check_order(localized: Localized) -> None:
    """Every import is made before it is read: the layers' promise, on stages.

    Raises:
      ValueError: the layers break it.
    """
    for (stage, role), code in localized.code.items():
        for var in code.imports:
            home, made = localized.home[var]
            fine = made == "forward" and (role != "forward" or home < stage)
            fine = fine or (made == role == "backward" and home > stage)
            if not fine and not (made == "backward" and role == "weight" and home >= stage):
                raise ValueError(
                    f"the {role} part of stage {stage} reads {var.aval.str_short()} from the "
                    f"{made} part of stage {home}, which runs later"
                )


def _placement(program: StepProgram, localized: Localized, homes: Mapping[int, int]) -> Placement:
    sources = dict(zip(program.region.invars, program.region_inputs, strict=True))
    reads: dict[Var, Votes] = {}
    for (stage, _), code in localized.code.items():
        for var in code.inputs:
            source = sources[var]
            if not isinstance(source, OffsetInput):
                reads.setdefault(source.var, {})[stage] = aval_bytes(source.var.aval)
    results = {
        output.target: localized.home[var][0]
        for var, output in zip(program.region.outvars, program.region_outputs, strict=True)
    }
    inputs = program.traced.jaxpr.invars
    fixed = {**results, **{inputs[i]: stage for i, stage in homes.items()}}
    return place(inputs, program.prologue, program.epilogue, reads, fixed)


# ---------------------------------------------------------------------------------------------
# Assembly


def _assemble(
    layered: Layered, placed: _Placed, pairs: tuple[tuple[int, int], ...], num_stages: int
) -> Staged:
    program = placed.cut.program
    inputs = {v: i for i, v in enumerate(program.traced.jaxpr.invars)}
    owner = _owners(program, placed.placement, pairs)
    out_stages = _output_stages(program, placed.placement, owner, pairs)
    demands = _demands(program, placed.localized, out_stages)
    phased = phases(_nodes(program, placed.placement), demands)
    results = {output.target: k for k, output in enumerate(program.region_outputs)}
    code = Code(placed.cut, placed.localized, phased, inputs, owner, results)
    assembly = Assembly(code)
    fill_region(assembly)
    fill_once(assembly, demands)
    leaves = _results(assembly, out_stages)
    frees = last_uses(assembly.slots, assembly.drafts, _kept(assembly, leaves))
    return Staged(
        layered=layered,
        num_stages=num_stages,
        num_microbatches=program.num_microbatches,
        slots=tuple(assembly.slots),
        fragments=finish_fragments(assembly.drafts, frees),
        transfers=tuple(assembly.transfers),
        kinds=program.kinds,
        feeds=tuple(assembly.feeds),
        results=leaves,
        pairs=pairs,
    )


def _owners(
    program: StepProgram, placement: Placement, pairs: Iterable[tuple[int, int]]
) -> list[int]:
    """The stage of every input leaf; one that nothing reads lives where its successor is made."""
    read = {
        v
        for eqn in (*program.prologue, *program.epilogue)
        for v in eqn.invars
        if isinstance(v, Var)
    }
    read.update(s.var for s in program.region_inputs if not isinstance(s, OffsetInput))
    owner = [placement.stage.get(v, 0) for v in program.traced.jaxpr.invars]
    for i, j in pairs:
        out = program.outvars[j]
        if program.traced.jaxpr.invars[i] not in read and isinstance(out, Var):
            owner[i] = placement.stage.get(out, 0)
    return owner


def _output_stages(
    program: StepProgram,
    placement: Placement,
    owner: Sequence[int],
    pairs: Iterable[tuple[int, int]],
) -> dict[int, int]:
    """The stage of every output leaf that is computed: where its input lives, or it is made."""
    known = set(program.traced.jaxpr.invars)
    stages = {
        j: placement.stage.get(out, 0)
        for j, out in enumerate(program.outvars)
        if isinstance(out, Var) and out not in known
    }
    stages.update((j, owner[i]) for i, j in pairs if j in stages)
    return stages


def _demands(
    program: StepProgram, localized: Localized, out_stages: dict[int, int]
) -> tuple[Demand, ...]:
    sources = dict(zip(program.region.invars, program.region_inputs, strict=True))
    found: dict[Demand, None] = {}
    for (stage, _), code in localized.code.items():
        for var in code.inputs:
            source = sources[var]
            if not isinstance(source, OffsetInput):
                found[Demand(source.var, stage, True)] = None
    for j, stage in out_stages.items():
        out = program.outvars[j]
        if isinstance(out, Var):
            found[Demand(out, stage, False)] = None
    return tuple(found)


def _nodes(program: StepProgram, placement: Placement) -> list[Node]:
    """Prologue equations, region results, epilogue equations, as nodes."""
    eqns = (*program.prologue, *program.epilogue)
    free = once_recipes(eqns)
    num_prologue = len(program.prologue)
    nodes = [
        _node(eqn, "prologue" if i < num_prologue else "epilogue", free[i], placement)
        for i, eqn in enumerate(eqns)
    ]
    results = [
        Node(None, (), (output.target,), "epilogue", placement.stage[output.target], False)
        for output in program.region_outputs
    ]
    return [*nodes[:num_prologue], *results, *nodes[num_prologue:]]


def _node(eqn: JaxprEqn, role: str, free: bool, placement: Placement) -> Node:
    operands = tuple(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    results = tuple(v for v in eqn.outvars if not isinstance(v, DropVar))
    near = max(results or operands, key=lambda v: aval_bytes(v.aval), default=None)
    home = 0 if near is None else placement.stage.get(near, 0)
    return Node(
        eqn, operands, results, "prologue" if role == "prologue" else "epilogue", home, free
    )


def _results(assembly: Assembly, out_stages: dict[int, int]) -> tuple[Result, ...]:
    """Where each output leaf is found; two leaves never share a slot."""
    program = assembly.code.layered.program
    taken: set[int] = set()
    results: list[Result] = []
    for j, out in enumerate(program.outvars):
        if isinstance(out, Literal):
            results.append(FromLiteral(out.val, out.aval))
        elif out in assembly.code.inputs:
            results.append(FromInput(assembly.code.inputs[out]))
        else:
            slot = assembly.whole_slot(out, out_stages[j])
            if slot in taken:
                source = assembly.code.phased.source(out, out_stages[j]).stage
                name = program.traced.out_paths[j]
                slot = assembly.extra_slot(out, source, name)
                if source != out_stages[j]:
                    slot = assembly.copy_to(out_stages[j], slot, name)
            taken.add(slot)
            results.append(FromSlot(slot))
    return tuple(results)


def _kept(assembly: Assembly, results: Sequence[Result]) -> set[int]:
    """Slots that no fragment may free: results, and inputs that the caller keeps or gets back."""
    leaves = assembly.code.layered.program.traced.inputs
    returned = {r.input for r in results if isinstance(r, FromInput)}
    kept = {r.slot for r in results if isinstance(r, FromSlot)}
    kept.update(
        feed.slot
        for feed in assembly.feeds
        if not leaves[feed.input].donated or feed.input in returned
    )
    return kept
