"""Every rule of the verifier, each broken once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetpass._jax import DropVar, ShapedArray, make_jaxpr_value, make_var
from hetpass.errors import VerificationError
from hetpass.ir.kinds import Batched, Partial, Whole
from hetpass.ir.program import (
    Accumulate,
    Accumulated,
    Feed,
    FromInput,
    FromSlot,
    Joined,
    LayerSpan,
    OffsetInput,
    Read,
    ReadJoined,
    ReadOffset,
    ReadRow,
    SliceInput,
    Transfer,
    WholeInput,
    Write,
    WriteRow,
    WriteSplit,
)
from hetpass.ir.verify import verify, wide_enough


def breaks(value, message):
    with pytest.raises(VerificationError, match=message):
        verify(value)


def with_item(items, index, item):
    return (*items[:index], item, *items[index + 1 :])


def jaxpr(old, *, invars=None, outvars=None, eqns=None):
    return make_jaxpr_value(
        old.invars if invars is None else invars,
        old.outvars if outvars is None else outvars,
        old.eqns if eqns is None else eqns,
    )


def array(*shape, dtype=np.float32):
    return ShapedArray(shape, np.dtype(dtype))


def test_what_the_passes_make_is_right(values, scanned):
    for value in (values.traced, values.program, values.layered, values.staged, scanned):
        verify(value)


# -- Traced -----------------------------------------------------------------------------------


def test_traced(values):
    t = values.traced
    breaks(replace(t, inputs=t.inputs[1:]), "lengths differ: inputs")
    breaks(replace(t, out_paths=t.out_paths[1:]), "lengths differ: out_paths")
    breaks(replace(t, recomputed=()), "lengths differ: recomputed")
    breaks(replace(t, constants=(1,)), "not the 1 captured constants")
    breaks(replace(t, constants=(1,) * 99), "not the 99 captured constants")
    breaks(replace(t, batch_size=7), "has no 7 examples at 0")
    breaks(replace(t, probes=(jaxpr(t.jaxpr, eqns=t.jaxpr.eqns[1:]),)), "equations_of_probe")
    cut = jaxpr(t.jaxpr, eqns=[t.jaxpr.eqns[1], *t.jaxpr.eqns[1:]])
    breaks(replace(t, jaxpr=cut), "jaxpr: Variable")
    breaks(replace(t, probes=(cut,)), "probe at 2 x B: Variable")
    wrong = with_item(t.inputs, 0, replace(t.inputs[0], aval=array(3)))
    breaks(replace(t, inputs=wrong), r"is f32\[3\], read as")


# -- StepProgram ------------------------------------------------------------------------------


def test_program_lengths_and_types(values):
    p = values.program
    region = p.region
    breaks(replace(p, region_inputs=p.region_inputs[1:]), "lengths differ: region_inputs")
    breaks(replace(p, region_outputs=p.region_outputs[1:]), "lengths differ: region_outputs")
    breaks(replace(p, origin=p.origin[1:]), "lengths differ: origin")
    breaks(replace(p, origin=(10_000, *p.origin[1:])), "origin names")
    breaks(replace(p, outvars=p.outvars[1:]), "lengths differ: outvars")
    breaks(replace(p, num_microbatches=3), "3 microbatches of a batch of 8")
    undefined = jaxpr(region, eqns=[region.eqns[1], *region.eqns[1:]])
    breaks(replace(p, region=undefined), "region: Variable")
    twice = jaxpr(region, eqns=[region.eqns[0], *region.eqns[:-1]])
    breaks(replace(p, region=twice), "already bound")
    bad = region.eqns[0].replace(outvars=[make_var(array(5))])
    breaks(replace(p, region=jaxpr(region, eqns=[bad, *region.eqns[1:]])), "inconsistently typed")


def test_program_kinds(values):
    p = values.program
    for var in (p.region.invars[0], p.region.eqns[-1].outvars[0]):
        breaks(replace(p, kinds={v: k for v, k in p.kinds.items() if v != var}), "no kind")


def test_region_outputs_are_results(values):
    p = values.program
    through = jaxpr(p.region, outvars=[p.region.invars[0], *p.region.outvars[1:]])
    breaks(replace(p, region=through), "not the result of a region equation")


def test_full_batch_variables_are_bound_once_and_before(values):
    p = values.program
    target = p.region_outputs[0].target
    breaks(replace(p, prologue=p.prologue[1:]), "the prologue does not make|prologue: Variable")
    breaks(replace(p, prologue=(p.prologue[0], *p.prologue)), "prologue: Variable")
    breaks(replace(p, epilogue=p.epilogue[1:]), "epilogue: Variable")
    breaks(replace(p, epilogue=(*p.epilogue, p.epilogue[-1])), "epilogue: Variable")
    twice = with_item(p.region_outputs, 1, replace(p.region_outputs[1], target=target))
    breaks(replace(p, region_outputs=twice), "bound twice")
    late = with_item(p.region_inputs, 0, WholeInput(p.epilogue[0].outvars[0]))
    breaks(replace(p, region_inputs=late), "reads a full-batch variable")


def index_of(items, sort):
    return next(i for i, item in enumerate(items) if isinstance(item, sort))


def test_region_inputs_agree_with_the_full_batch(values):
    p = values.program
    whole, part = index_of(p.region_inputs, WholeInput), index_of(p.region_inputs, SliceInput)
    source = p.region_inputs[part]
    for index, replacement, message in (
        (part, WholeInput(source.var), "is read as batched"),
        (part, SliceInput(source.var, Batched(1)), "is read as batched"),
        (whole, SliceInput(p.region_inputs[whole].var, Batched(0)), "is read as whole"),
        (part, OffsetInput(), r"not i32\[\]"),
    ):
        inputs = with_item(p.region_inputs, index, replacement)
        breaks(replace(p, region_inputs=inputs), message)
    var = p.region.invars[part]
    breaks(
        replace(
            p,
            kinds={**p.kinds, var: Batched(1)},
            region_inputs=with_item(p.region_inputs, part, SliceInput(source.var, Batched(1))),
        ),
        "4 times",
    )


def test_region_outputs_agree_with_the_full_batch(values):
    p = values.program
    total, joined = index_of(p.region_outputs, Accumulated), index_of(p.region_outputs, Joined)
    accumulated = p.region_outputs[total]
    other = next(
        o for o in p.region_outputs if o.target.aval.shape != accumulated.target.aval.shape
    )
    for index, replacement, message in (
        (total, replace(accumulated, op="max"), r"partial\(sum\) is combined by max"),
        (total, replace(accumulated, dtype=np.float16), "accumulated in"),
        (total, replace(accumulated, target=make_var(other.target.aval)), "adds up to"),
        (total, Joined(accumulated.target, Batched(0)), r"partial\(sum\) is joined"),
        (joined, replace(p.region_outputs[joined], kind=Batched(1)), "4 times"),
    ):
        outputs = with_item(p.region_outputs, index, replacement)
        target = replacement.target
        # The epilogue must still find every target, or the flow is what breaks first.
        eqns = p.epilogue
        if target is not p.region_outputs[index].target:
            breaks_flow = replace(
                p, region_outputs=outputs, epilogue=(), outvars=(target,) * len(p.outvars)
            )
            breaks(breaks_flow, message)
        else:
            breaks(replace(p, region_outputs=outputs, epilogue=eqns), message)


def test_a_whole_result_is_the_same_or_a_total_but_not_a_sum(values):
    p = values.program
    index = index_of(p.region_outputs, Accumulated)
    kinds = {**p.kinds, p.region.outvars[index]: Whole()}
    breaks(replace(p, kinds=kinds), "whole is combined by sum")
    for op in ("same", "total"):
        result = replace(p.region_outputs[index], op=op)
        outputs = with_item(p.region_outputs, index, result)
        verify(replace(p, kinds=kinds, region_outputs=outputs))


@pytest.mark.parametrize(
    ("accumulator", "own", "wide"),
    [
        ("float32", "float32", True),
        ("float32", "float16", True),
        ("float16", "float16", False),
        ("float32", "float64", False),
        ("int32", "int32", True),
        ("bool", "bool", True),
        ("int8", "int32", False),
    ],
)
def test_accumulators_are_wide_enough(accumulator, own, wide):
    assert wide_enough(np.dtype(accumulator), np.dtype(own)) == wide


# -- Layered ----------------------------------------------------------------------------------


def test_layered_lengths(values):
    v = values.layered
    breaks(replace(v, spans=v.spans[1:]), "lengths differ: equations")
    breaks(replace(v, backward=v.backward[1:]), "lengths differ: equations")
    breaks(replace(v, layer_kinds=v.layer_kinds[1:]), "layer_kinds")
    breaks(replace(v, forward_flops=()), "forward_flops")
    breaks(replace(v, backward_flops=()), "backward_flops")
    breaks(replace(v, names=()), "names")
    breaks(replace(v, cut_bytes=(*v.cut_bytes, 0.0)), "cut_bytes")
    for marks in ((0,), (v.num_layers,), (2, 1), (1, 1)):
        breaks(replace(v, boundaries=marks), "boundaries")
    breaks(replace(v, program=replace(v.program, origin=())), "origin")


def test_layered_order(values):
    v = values.layered
    last = v.num_layers - 1
    outside = with_item(v.spans, 0, LayerSpan(last + 1, last + 1))
    breaks(replace(v, spans=outside), "is in layers")
    breaks(replace(v, spans=with_item(v.spans, 0, LayerSpan(0, last))), "only scans")
    # The first forward equation moved to the end: its reader comes too early.
    breaks(replace(v, spans=with_item(v.spans, 0, LayerSpan(last, last))), "the forward equation")
    final = max(i for i, b in enumerate(v.backward) if b)
    # The last backward equation belongs to an early layer; at the end it reads what comes later.
    breaks(replace(v, spans=with_item(v.spans, final, LayerSpan(last, last))), "the backward equ")
    breaks(replace(v, backward=with_item(v.backward, final, False)), "reads a backward value")


def test_scans_over_layers(scanned):
    spans = [span for span in scanned.spans if span.first < span.last]
    assert len(spans) == 2
    forward, backward = (i for i, s in enumerate(scanned.spans) if s.first < s.last)
    assert scanned.backward[backward]
    short = LayerSpan(scanned.spans[forward].first, scanned.spans[forward].last - 1)
    breaks(replace(scanned, spans=with_item(scanned.spans, forward, short)), "spans 3 layers")
    # What reads the scan's carry must wait for its last iteration.
    after = next(
        i
        for i, eqn in enumerate(scanned.program.region.eqns)
        if i != backward
        and not scanned.backward[i]
        and set(eqn.invars) & set(scanned.program.region.eqns[forward].outvars[:1])
    )
    early = with_item(scanned.spans, after, LayerSpan(1, 1))
    breaks(replace(scanned, spans=early), "reads a value of")


# -- Staged -----------------------------------------------------------------------------------


def find_slot(staged, **wanted):
    return next(
        s for s in staged.slots if all(getattr(s, key) == value for key, value in wanted.items())
    )


def with_slot(staged, number, **changes):
    slots = with_item(staged.slots, number, replace(staged.slots[number], **changes))
    return replace(staged, slots=slots)


def find_access(staged, sort, role=None):
    """(fragment's number, "inputs" or "outputs", position) of the first access of this sort."""
    return next(
        (n, side, i)
        for n, fragment in enumerate(staged.fragments)
        for side in ("inputs", "outputs")
        for i, access in enumerate(getattr(fragment, side))
        if type(access) is sort and role in (None, fragment.role)
    )


def with_access(staged, place, access):
    number, side, position = place
    fragment = staged.fragments[number]
    changed = replace(fragment, **{side: with_item(getattr(fragment, side), position, access)})
    return replace(staged, fragments=with_item(staged.fragments, number, changed))


def test_slots(values):
    s = values.staged
    breaks(with_slot(s, 0, index=1), "calls itself 1")
    breaks(with_slot(s, 0, stage=2), "is on no stage")
    stacked = find_slot(s, stacked=True)
    breaks(with_slot(s, stacked.index, scope="microbatch"), "lives for one microbatch")
    breaks(with_slot(s, stacked.index, kind=Whole()), "stacked and whole")


def test_fragments(values):
    s = values.staged
    first = s.fragments[0]
    breaks(replace(s, fragments=(first, *s.fragments)), "stands twice")
    breaks(
        replace(s, fragments=(replace(first, inputs=first.inputs[1:]), *s.fragments[1:])),
        "inputs for",
    )
    breaks(replace(s, fragments=(replace(first, outputs=()), *s.fragments[1:])), "outputs for")
    number = next(i for i, f in enumerate(s.fragments) if f.role == "forward")
    forward = s.fragments[number]
    broken = replace(forward, jaxpr=jaxpr(forward.jaxpr, eqns=forward.jaxpr.eqns[1:]))
    breaks(replace(s, fragments=with_item(s.fragments, number, broken)), "Variable")
    var = next(v for e in forward.jaxpr.eqns for v in e.outvars if not isinstance(v, DropVar))
    breaks(replace(s, kinds={v: k for v, k in s.kinds.items() if v != var}), "without a kind")


def test_accesses(values):
    s = values.staged
    forward_read = find_access(s, Read, "forward")
    index = s.fragments[forward_read[0]].inputs[forward_read[2]].slot
    breaks(with_access(s, forward_read, Read(len(s.slots))), "none such")
    breaks(with_access(s, forward_read, ReadOffset()), r"not i32\[\]")
    breaks(with_access(s, forward_read, ReadRow(index)), "not stacked")
    breaks(with_slot(s, index, stage=1 - s.slots[index].stage), "it is on stage")
    breaks(with_slot(s, index, aval=array(9)), r"it holds f32\[9\]")
    row = find_access(s, ReadRow)
    stacked = s.fragments[row[0]].inputs[row[2]].slot
    breaks(with_access(s, row, Read(stacked)), "it is stacked")
    breaks(with_access(s, row, ReadJoined(stacked)), "has no full batch")
    epilogue_read = find_access(s, Read, "epilogue")
    inside = find_slot(s, scope="microbatch", stage=s.fragments[epilogue_read[0]].stage)
    breaks(with_access(s, epilogue_read, Read(inside.index)), "this runs once")
    breaks(with_access(s, epilogue_read, ReadOffset()), "only microbatches have an offset")
    joined = find_access(s, ReadJoined, "epilogue")
    rows = s.fragments[joined[0]].inputs[joined[2]].slot
    breaks(with_access(s, joined, ReadRow(rows)), "only microbatches do that")
    accumulate = find_access(s, Accumulate)
    total = s.fragments[accumulate[0]].outputs[accumulate[2]].slot
    breaks(with_slot(s, total, kind=Whole()), "it is whole")
    breaks(with_access(s, accumulate, Write(total)), "runs M times cannot write it")
    write = find_access(s, Write, "forward")
    breaks(with_access(s, write, Accumulate(s.fragments[write[0]].outputs[write[2]].slot)), "it is")
    once = find_access(s, Write, "epilogue")
    own = s.fragments[once[0]].outputs[once[2]].slot
    breaks(with_access(s, once, WriteSplit(own)), "not stacked")
    write_row = find_access(s, WriteRow)
    breaks(
        with_access(s, write_row, WriteSplit(s.fragments[write_row[0]].outputs[write_row[2]].slot)),
        "has no full batch",
    )


def test_an_accumulator_is_read_in_the_epilogue_only(values):
    s = values.staged
    number, side, position = find_access(s, Read, "backward")
    fragment = s.fragments[number]
    total = next(
        slot for slot in s.slots if isinstance(slot.kind, Partial) and slot.stage == fragment.stage
    )
    breaks(with_access(s, (number, side, position), Read(total.index)), "not complete before")


def test_transfers(values):
    s = values.staged
    number = next(i for i, t in enumerate(s.transfers) if s.slots[t.source].scope == "microbatch")
    transfer = s.transfers[number]
    breaks(replace(s, transfers=(*s.transfers, Transfer(len(s.slots), 0))), "a transfer names slot")
    inside = replace(transfer, source=transfer.target)
    breaks(replace(s, transfers=with_item(s.transfers, number, inside)), "stays on stage")
    total = find_slot(s, kind=Partial())
    other = next(x for x in s.slots if x.stage != total.stage)
    breaks(
        replace(s, transfers=(*s.transfers, Transfer(total.index, other.index))),
        "sends an accumulator",
    )
    step = next(
        x for x in s.slots if x.scope == "step" and x.stage == s.slots[transfer.source].stage
    )
    changed = replace(transfer, source=step.index)
    breaks(
        replace(s, transfers=with_item(s.transfers, number, changed)),
        "changes the scope|sends an accumulator",
    )
    moved = next(t for t in s.transfers if s.slots[t.source].scope == "step")
    writers = [
        f for f in s.fragments for o in f.outputs if getattr(o, "slot", None) == moved.source
    ]
    assert writers
    breaks(with_slot(s, moved.target, aval=array(77)), r"f32\[77\]")


def test_feeds(values):
    s = values.staged
    feed = s.feeds[0]
    breaks(replace(s, feeds=(*s.feeds, Feed(len(s.layered.program.traced.inputs), 0))), "input")
    breaks(replace(s, feeds=(*s.feeds, Feed(0, len(s.slots)))), "a feed names slot")
    inside = find_slot(s, scope="microbatch")
    breaks(replace(s, feeds=(*s.feeds, Feed(0, inside.index))), "lives for one microbatch")
    other = next(
        i
        for i, leaf in enumerate(s.layered.program.traced.inputs)
        if leaf.aval.shape != s.layered.program.traced.inputs[feed.input].aval.shape
    )
    breaks(replace(s, feeds=with_item(s.feeds, 0, replace(feed, input=other))), "it needs")


def test_every_slot_is_defined_once_and_in_time(values):
    s = values.staged
    breaks(replace(s, feeds=(*s.feeds, s.feeds[0])), "defined twice: by a feed and a feed")
    breaks(replace(s, feeds=s.feeds[1:]), "it is never written")
    breaks(replace(s, transfers=s.transfers[1:]), "it is never written")
    number, _, position = find_access(s, WriteRow)
    slot = s.slots[s.fragments[number].outputs[position].slot]
    paths = [leaf.path for leaf in s.layered.program.traced.inputs]
    source = paths.index("batch['y']")
    breaks(replace(s, feeds=(*s.feeds, Feed(source, slot.index))), "is filled by")
    # A forward fragment that runs after what reads it.
    number = next(i for i, f in enumerate(s.fragments) if f.role == "prologue")
    late = replace(s.fragments[number], role="epilogue", phase=9)
    breaks(
        replace(s, fragments=with_item(s.fragments, number, late)), "written later, or at the same"
    )


def test_a_value_crosses_stages_in_the_direction_of_its_task(values):
    """A forward value sent from the last stage to the first cannot be read by its forward."""
    s = values.staged
    mirrored = replace(
        s,
        slots=tuple(replace(x, stage=1 - x.stage) for x in s.slots),
        fragments=tuple(replace(f, stage=1 - f.stage) for f in s.fragments),
    )
    breaks(mirrored, "written later, or at the same")


def test_sending_what_nobody_writes(values):
    s = values.staged
    spare = replace(
        s.slots[0], index=len(s.slots), stage=0, scope="microbatch", stacked=False, name="spare"
    )
    copy = replace(spare, index=len(s.slots) + 1, stage=1)
    ring = (Transfer(spare.index, copy.index), Transfer(copy.index, spare.index))
    more = replace(s, slots=(*s.slots, spare, copy))
    breaks(replace(more, transfers=(*s.transfers, ring[0])), "is sent and never written")
    breaks(replace(more, transfers=(*s.transfers, *ring)), "transferred to itself")


def test_frees(values):
    s = values.staged

    def freeing(number, *slots):
        fragment = replace(s.fragments[number], frees=slots)
        return replace(s, fragments=with_item(s.fragments, number, fragment))

    number = find_access(s, Read, "forward")[0]
    fragment = s.fragments[number]
    step_slot = next(
        i.slot for i in fragment.inputs if type(i) is Read and s.slots[i.slot].scope == "step"
    )
    elsewhere = next(x for x in s.slots if x.stage != fragment.stage)
    breaks(freeing(number, len(s.slots)), "none such")
    breaks(freeing(number, elsewhere.index), "of stage")
    breaks(freeing(number, step_slot), "read later|next microbatch needs")
    result = next(
        r.slot
        for r in s.results
        if isinstance(r, FromSlot) and s.slots[r.slot].stage == fragment.stage
    )
    breaks(freeing(number, result), "which is a result")
    written = next(
        (n, o.slot)
        for n, f in enumerate(s.fragments)
        if f.role == "forward"
        for o in f.outputs
        if type(o) is Write
        and any(
            getattr(i, "slot", None) == o.slot
            for g in s.fragments
            if g.role == "backward"
            for i in g.inputs
        )
    )
    breaks(freeing(*written), "which is read later")


def test_results(values):
    s = values.staged
    breaks(replace(s, results=s.results[1:]), "results for")
    breaks(replace(s, num_microbatches=2), "f32|numbers of microbatches differ")
    stacked = find_slot(s, stacked=True)
    total = find_slot(s, kind=Partial())
    # A result is never freed; that rule is not the one under test here.
    s = replace(s, fragments=tuple(replace(f, frees=()) for f in s.fragments))
    for slot in (stacked, total):
        breaks(
            replace(s, results=with_item(s.results, 0, FromSlot(slot.index))), "cannot be read from"
        )
    breaks(replace(s, results=with_item(s.results, 0, FromSlot(len(s.slots)))), "none such")
    breaks(replace(s, results=with_item(s.results, 0, FromInput(99))), "names input 99")
    float_input = next(
        i
        for i, leaf in enumerate(s.layered.program.traced.inputs)
        if leaf.aval.shape != s.layered.program.outvars[0].aval.shape
    )
    breaks(replace(s, results=with_item(s.results, 0, FromInput(float_input))), "the result")
    breaks(replace(s, pairs=((99, 0),)), "names no leaf")
    mismatch = next(
        (float_input, o)
        for o, var in enumerate(s.layered.program.outvars)
        if var.aval.shape != s.layered.program.traced.inputs[float_input].aval.shape
    )
    breaks(replace(s, pairs=(mismatch,)), "not of one shape")
