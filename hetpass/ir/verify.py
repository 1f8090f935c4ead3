"""`verify(value)`: does a program-level value keep the rules that ir/program.py states?

Run between passes. A breach is a VerificationError, a fault of hetpass: a user's mistake is
refused earlier, by name. What is checked per type stands at each function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from hetpass._jax import (
    DropVar,
    Jaxpr,
    JaxprEqn,
    ShapedArray,
    Var,
    jaxpr_fault,
    make_jaxpr_value,
    scan_counts,
)
from hetpass.errors import VerificationError
from hetpass.ir.kinds import Batched, Partial, Position, Whole, Zero
from hetpass.ir.program import (
    Accumulated,
    Layered,
    LayerSpan,
    OffsetInput,
    RegionInput,
    RegionOutput,
    SliceInput,
    Staged,
    StepProgram,
    Traced,
)
from hetpass.ir.text import aval_text
from hetpass.ir.verify_staged import verify_staged


def verify(value: Traced | StepProgram | Layered | Staged) -> None:
    """Raises VerificationError if the value breaks a rule of its type."""
    if isinstance(value, Traced):
        _traced(value)
    elif isinstance(value, StepProgram):
        _step_program(value)
    elif isinstance(value, Layered):
        _layered(value)
    else:
        fault = verify_staged(value)
        if fault:
            _fail(value, fault)


def _fail(value: object, fault: str) -> NoReturn:
    raise VerificationError(f"{type(value).__name__}: {fault}")


def _equal_lengths(value: object, **parts: Sequence[Any]) -> None:
    lengths = {name: len(part) for name, part in parts.items()}
    if len(set(lengths.values())) > 1:
        _fail(value, "lengths differ: " + ", ".join(f"{k} {n}" for k, n in lengths.items()))


def _well_typed(value: object, what: str, jaxpr: Jaxpr) -> None:
    fault = jaxpr_fault(jaxpr)
    if fault:
        _fail(value, f"{what}: {fault}")


def same_array(first: ShapedArray, second: ShapedArray) -> bool:
    """Equal shape and dtype; weak types do not matter here."""
    return first.shape == second.shape and first.dtype == second.dtype


def wide_enough(accumulator: np.dtype[Any], own: np.dtype[Any]) -> bool:
    """Whether values of dtype `own` may be accumulated so: same class, and floats in 4 bytes."""
    floating = not np.issubdtype(own, np.integer) and own != np.bool_
    least = max(own.itemsize, 4) if floating else own.itemsize
    return accumulator.itemsize >= least


# -- Traced -----------------------------------------------------------------------------------


def _traced(value: Traced) -> None:
    """Parallel tuples; types of the jaxpr and its probes; the batch where it is said to be."""
    jaxpr = value.jaxpr
    _equal_lengths(value, inputs=value.inputs, invars=jaxpr.invars)
    _equal_lengths(value, out_paths=value.out_paths, outvars=jaxpr.outvars)
    _equal_lengths(value, recomputed=value.recomputed, equations=jaxpr.eqns)
    # Keyword arguments have no position either, but stand before the constants.
    captured = value.inputs[len(value.inputs) - len(value.constants) :]
    if len(captured) < len(value.constants) or any(leaf.argnum is not None for leaf in captured):
        _fail(value, f"the last inputs are not the {len(value.constants)} captured constants")
    _well_typed(value, "jaxpr", jaxpr)
    for leaf, var in zip(value.inputs, jaxpr.invars, strict=True):
        if not same_array(leaf.aval, var.aval):
            _fail(value, f"{leaf.path} is {aval_text(leaf.aval)}, read as {aval_text(var.aval)}")
        if leaf.batch_dim is None:
            continue
        shape = leaf.aval.shape
        if not 0 <= leaf.batch_dim < len(shape) or shape[leaf.batch_dim] != value.batch_size:
            _fail(value, f"{leaf.path} has no {value.batch_size} examples at {leaf.batch_dim}")
    for number, probe in enumerate(value.probes, start=2):
        _equal_lengths(value, equations=jaxpr.eqns, equations_of_probe=probe.eqns)
        _well_typed(value, f"probe at {number} x B", probe)


# -- StepProgram ------------------------------------------------------------------------------


def _step_program(value: StepProgram) -> None:
    """Parallel tuples; kinds of all region variables; region inputs and outputs that agree with
    the full-batch variables they stand for; every full-batch variable bound once, before use."""
    region = value.region
    _equal_lengths(value, region_inputs=value.region_inputs, invars=region.invars)
    _equal_lengths(value, region_outputs=value.region_outputs, outvars=region.outvars)
    _equal_lengths(value, origin=value.origin, equations=region.eqns)
    _equal_lengths(value, outvars=value.outvars, out_paths=value.traced.out_paths)
    _well_typed(value, "region", region)
    if not all(0 <= index < len(value.traced.jaxpr.eqns) for index in value.origin):
        _fail(value, "origin names an equation that the traced step does not have")
    batch = value.traced.batch_size
    if value.num_microbatches < 1 or (batch is not None and batch % value.num_microbatches):
        _fail(value, f"{value.num_microbatches} microbatches of a batch of {batch}")
    for var in _bound(region.eqns, region.invars):
        if var not in value.kinds:
            _fail(value, f"no kind for a region variable of {aval_text(var.aval)}")
    results = set(_bound(region.eqns))
    if not all(isinstance(var, Var) and var in results for var in region.outvars):
        _fail(value, "a region output is not the result of a region equation")
    _full_batch_flow(value)
    for var, source in zip(region.invars, value.region_inputs, strict=True):
        _region_input(value, var, source)
    for var, output in zip(region.outvars, value.region_outputs, strict=True):
        _region_output(value, var, output)


def _bound(eqns: Iterable[JaxprEqn], first: Iterable[Var] = ()) -> list[Var]:
    made = [var for eqn in eqns for var in eqn.outvars if not isinstance(var, DropVar)]
    return [*first, *made]


def _full_batch_flow(value: StepProgram) -> None:
    """Prologue, then the region's results, then the epilogue, as two jaxprs of what is known."""
    known = list(value.traced.jaxpr.invars)
    _well_typed(value, "prologue", make_jaxpr_value(known, (), value.prologue))
    known = _bound(value.prologue, known)
    read = {s.var for s in value.region_inputs if not isinstance(s, OffsetInput)}
    if not read <= set(known):
        _fail(value, "the region reads a full-batch variable that the prologue does not make")
    known += [output.target for output in value.region_outputs]
    if len(set(known)) != len(known):
        _fail(value, "a full-batch variable is bound twice")
    _well_typed(value, "epilogue", make_jaxpr_value(known, value.outvars, value.epilogue))


def _region_input(value: StepProgram, var: Var, source: RegionInput) -> None:
    kind = value.kinds[var]
    if isinstance(source, OffsetInput):
        if var.aval.shape != () or var.aval.dtype != np.int32:
            _fail(value, f"the offset is read as {aval_text(var.aval)}, not i32[]")
    elif isinstance(source, SliceInput):
        if kind != source.kind:
            _fail(value, f"a slice that is {source.kind} is read as {kind}")
        _parts(value, var.aval, source.var.aval, source.kind)
    elif not isinstance(kind, (Whole, Zero)) or not same_array(var.aval, source.var.aval):
        _fail(
            value,
            f"a whole {aval_text(source.var.aval)} is read as {kind} {aval_text(var.aval)}",
        )


def _parts(value: StepProgram, part: ShapedArray, full: ShapedArray, kind: Batched) -> None:
    """`part` is one of the M parts of `full`."""
    expected = list(part.shape)
    if 0 <= kind.dim < len(expected):
        expected[kind.dim] *= value.num_microbatches
    if tuple(expected) != full.shape or part.dtype != full.dtype:
        _fail(
            value,
            f"{value.num_microbatches} times {aval_text(part)} along {kind} is not "
            f"{aval_text(full)}",
        )


def _region_output(value: StepProgram, var: Var, output: RegionOutput) -> None:
    kind, target = value.kinds[var], output.target.aval
    if isinstance(output, Accumulated):
        equal = isinstance(kind, (Whole, Zero)) and output.op in ("same", "total")
        if not (value.num_microbatches == 1 or equal or kind in (Partial(output.op), Zero())):
            _fail(value, f"a result that is {kind} is combined by {output.op}")
        if not same_array(var.aval, target):
            _fail(value, f"{aval_text(var.aval)} adds up to {aval_text(target)}")
        if output.op != "same" and not wide_enough(
            np.dtype(output.dtype), np.dtype(var.aval.dtype)
        ):
            _fail(value, f"{aval_text(var.aval)} is accumulated in {output.dtype}")
    else:
        if not isinstance(kind, (Batched, Position)) and value.num_microbatches > 1:
            _fail(value, f"a result that is {kind} is joined")
        _parts(value, var.aval, target, output.kind)


# -- Layered ----------------------------------------------------------------------------------


def _layered(value: Layered) -> None:
    """The program's rules; one span per equation and one entry per layer; and the order:

    forward reads forward of its own or earlier layers; backward reads any forward, and backward
    of its own or later layers. A scan over several layers hands its stacked operands over
    iteration by iteration; everything else it reads must be there when it starts.
    """
    _step_program(value.program)
    eqns = value.program.region.eqns
    _equal_lengths(value, equations=eqns, spans=value.spans, backward=value.backward)
    per_layer = {
        "layer_kinds": value.layer_kinds,
        "forward_flops": value.forward_flops,
        "backward_flops": value.backward_flops,
        "names": value.names,
    }
    for name, entries in per_layer.items():
        if len(entries) != value.num_layers:
            _fail(value, f"{value.num_layers} layers, {len(entries)} {name}")
    if len(value.cut_bytes) != max(0, value.num_layers - 1):
        _fail(value, f"{value.num_layers} layers, {len(value.cut_bytes)} cut_bytes")
    marks = value.boundaries
    if list(marks) != sorted(set(marks)) or not all(0 < k < value.num_layers for k in marks):
        _fail(value, f"boundaries {marks} are no cuts of {value.num_layers} layers")
    made: dict[Var, int] = {}
    for index, (eqn, span) in enumerate(zip(eqns, value.spans, strict=True)):
        _span(value, eqn, span)
        for position, var in enumerate(eqn.invars):
            if isinstance(var, Var) and var in made:
                _order(value, index, position, made[var])
        made.update({var: index for var in eqn.outvars})


def _span(value: Layered, eqn: JaxprEqn, span: LayerSpan) -> None:
    if not 0 <= span.first <= span.last < value.num_layers:
        _fail(value, f"{eqn.primitive.name} is in layers {span} of {value.num_layers}")
    layers = span.last - span.first + 1
    if layers > 1 and (eqn.primitive.name != "scan" or eqn.params["length"] != layers):
        _fail(value, f"{eqn.primitive.name} spans {layers} layers; only scans of that length may")


def _order(value: Layered, reader: int, position: int, maker: int) -> None:
    eqn = value.program.region.eqns[reader]
    late, early = value.spans[reader], value.spans[maker]
    if value.backward[maker] and not value.backward[reader]:
        _fail(value, f"the forward equation {eqn.primitive.name} reads a backward value")
    if value.backward[reader] and not value.backward[maker]:
        return
    at_once = late.first < late.last and position < sum(scan_counts(eqn))
    if value.backward[reader]:
        legal = early.first >= (late.last if at_once else late.first) and early.last >= late.last
    else:
        legal = early.last <= (late.first if at_once else late.last) and early.first <= late.first
    if not legal:
        direction = "backward" if value.backward[reader] else "forward"
        _fail(
            value,
            f"the {direction} equation {eqn.primitive.name} of {late} reads a value of {early}",
        )
