"""segment: StepProgram -> Layered. Cut the microbatch region into layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetpass._jax import Atom, JaxprEqn, Var, scan_counts
from hetpass.analysis.duplicable import duplicable_equations
from hetpass.analysis.flops import aval_bytes, equation_flops, equation_matmul_flops
from hetpass.frontend.backward_marks import backward_marks, move_to_backward
from hetpass.frontend.backward_placement import Placed, place_backward
from hetpass.frontend.common_subexpressions import merge_common_subexpressions
from hetpass.frontend.dataflow import Dataflow, dataflow
from hetpass.frontend.forward_layers import ForwardLayers, forward_layers
from hetpass.frontend.gradients import gradient_homes
from hetpass.frontend.layer_kinds import layer_kinds
from hetpass.frontend.layer_names import layer_names, path_steps, scope
from hetpass.frontend.layer_scans import twin_scan
from hetpass.frontend.parameter_leaves import parameter_leaves
from hetpass.ir.program import Layered, LayerSpan, StepProgram


def segment(program: StepProgram, *, max_layers: int = 256) -> Layered:
    """Cut a step's microbatch region into layers, the units that the planner moves.

    Common subexpressions are merged first, so `Layered.program` is a new StepProgram. The same
    program gives the same layers, in any process.

    Results of duplicable equations (`analysis.duplicable`: masks, rotary tables, keys; cheap and
    made of whole values only) do not count where they cross a cut: partition may compute them
    again wherever they are read.

    Args:
      program: what split made.
      max_layers: the most layers; equal neighbours are merged beyond it, lightest first. A scan
        over layers keeps one layer per iteration if that many fit, and is one layer if not.
    """
    if max_layers < 1:
        raise ValueError(f"max_layers is {max_layers}; a program has at least one layer")
    program = merge_common_subexpressions(program, backward_marks(program))
    flow = dataflow(program.region)
    duplicable = duplicable_equations(program)
    backward = move_to_backward(flow, backward_marks(program), duplicable)
    forward = forward_layers(program, flow, backward, duplicable, max_layers)
    placed = _all_spans(program, flow, forward, backward, duplicable)
    spans = tuple(placed[n] for n in range(len(flow.eqns)))
    flops = _flops(flow, spans, backward, forward.num_layers)
    return Layered(
        program=program,
        num_layers=forward.num_layers,
        spans=spans,
        backward=backward,
        layer_kinds=layer_kinds(program, flow, spans, backward, duplicable, forward.num_layers),
        forward_flops=flops[0],
        backward_flops=flops[1],
        cut_bytes=_cut_bytes(flow, spans, backward, duplicable, forward.num_layers),
        names=_names(program, flow, spans, backward, forward.num_layers),
        boundaries=forward.boundaries,
    )


def _all_spans(
    program: StepProgram,
    flow: Dataflow,
    forward: ForwardLayers,
    backward: Sequence[bool],
    duplicable: Sequence[bool],
) -> Mapping[int, LayerSpan]:
    twins = {}
    for number, late in enumerate(backward):
        if late:
            twin = twin_scan(flow, number, forward.over_layers)
            if twin is not None:
                twins[number] = forward.spans[twin]
    inputs = parameter_leaves(program)
    homes = gradient_homes(program, flow, backward, duplicable)
    for spans in ({**forward.spans, **twins}, dict(forward.spans)):
        placed = Placed(forward.num_layers, spans, backward, duplicable, inputs, homes)
        result = place_backward(flow, placed)
        if result is not None:
            return {**spans, **result}
    raise AssertionError("without scans over layers every backward equation fits on layer 0")


def _flops(
    flow: Dataflow, spans: Sequence[LayerSpan], backward: Sequence[bool], num_layers: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    totals = [0.0] * num_layers, [0.0] * num_layers
    for eqn, span, late in zip(flow.eqns, spans, backward, strict=True):
        share = equation_flops(eqn) / (span.last - span.first + 1)
        for layer in range(span.first, span.last + 1):
            totals[late][layer] += share
    return tuple(totals[0]), tuple(totals[1])


def _cut_bytes(
    flow: Dataflow,
    spans: Sequence[LayerSpan],
    backward: Sequence[bool],
    duplicable: Sequence[bool],
    num_layers: int,
) -> tuple[float, ...]:
    """Bytes of forward values between their producer and their last (highest) reader."""
    change = [0.0] * (num_layers + 1)
    for number, eqn in enumerate(flow.eqns):
        if backward[number] or duplicable[number]:
            continue
        span = spans[number]
        for var in eqn.outvars:
            readers = flow.readers.get(var, ())
            first = span.last
            last = max((spans[r].first for r in readers), default=first)
            if last > first:
                change[first] += aval_bytes(var.aval)
                change[last] -= aval_bytes(var.aval)
        for carried in range(span.first, span.last):
            size = _carried_bytes(eqn)
            change[carried] += size
            change[carried + 1] -= size
    total, result = 0.0, []
    for step in change[: num_layers - 1]:
        total += step
        result.append(total)
    return tuple(result)


def _carried_bytes(eqn: JaxprEqn) -> float:
    """What one iteration of a scan over layers hands to the next."""
    num_consts, num_carry = scan_counts(eqn)
    return sum(aval_bytes(a.aval) for a in eqn.invars[num_consts : num_consts + num_carry])


def _names(
    program: StepProgram,
    flow: Dataflow,
    spans: Sequence[LayerSpan],
    backward: Sequence[bool],
    num_layers: int,
) -> tuple[str, ...]:
    """A layer is known by its forward products and lookups, or else by all its equations."""
    known: list[list[JaxprEqn]] = [[] for _ in range(num_layers)]
    others: list[list[JaxprEqn]] = [[] for _ in range(num_layers)]
    for eqn, span, late in zip(flow.eqns, spans, backward, strict=True):
        heavy = eqn.primitive.name == "gather" or equation_matmul_flops(eqn) > 0
        for layer in range(span.first, span.last + 1):
            (known if heavy and not late else others)[layer].append(eqn)
    path_of = {
        var: path_steps(leaf.path)
        for var, leaf in zip(program.traced.jaxpr.invars, program.traced.inputs, strict=True)
    }
    parameters = {
        var: path_of[leaves[0]]
        for var, leaves in parameter_leaves(program).items()
        if len(leaves) == 1
    }
    by = [k or o for k, o in zip(known, others, strict=True)]
    return tuple(
        layer_names(
            [[scope(e) for e in eqns] for eqns in by],
            [
                [parameters[a] for e in eqns for a in e.invars if _is_in(a, parameters)]
                for eqns in by
            ],
        )
    )


def _is_in(atom: Atom, parameters: Mapping[Var, object]) -> bool:
    return isinstance(atom, Var) and atom in parameters
