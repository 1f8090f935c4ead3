"""Which backward equation makes the gradient of which parameter.

A step does not say; two signs do. The epilogue brings a gradient together with its parameter in an
elementwise equation (the update). And a product's weight gradient reads what the product itself
read: `x @ w` forward, `x.T @ g` backward, with as many elements as `w`; the same for convolutions
and for lookups, whose gradient is scattered to the same indices. Used for quality only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hetpass._jax import Atom, Literal, Var
from hetpass.analysis.flops import aval_bytes
from hetpass.frontend.dataflow import Dataflow
from hetpass.frontend.parameter_leaves import parameter_leaves
from hetpass.ir.program import StepProgram

_SUMS = ("dot_general", "conv_general_dilated", "scatter-add", "scatter_add")


def gradient_homes(
    program: StepProgram, flow: Dataflow, backward: Sequence[bool], duplicable: Sequence[bool]
) -> Mapping[int, tuple[tuple[int, ...], float]]:
    """Backward equation -> (forward readers of its parameter, bytes at stake).

    At stake are the gradient, or what it is made of if that is more: a convolution's weights are
    small beside its activations, yet its gradient belongs to the accumulator on its layer.
    """
    parameters = parameter_leaves(program)
    readers = _forward_readers(flow, parameters, backward, duplicable)
    homes: dict[int, tuple[tuple[int, ...], float]] = {}
    for number, late in enumerate(backward):
        if late and flow.eqns[number].primitive.name in _SUMS:
            home = _co_readers(flow, number, readers, backward)
            if home:
                homes[number] = home, _stake(flow, number)
    for var, leaf in _updated(program, parameters).items():
        number = flow.producer.get(var, -1)
        home = tuple(
            sorted(
                {
                    n
                    for p, made_of in parameters.items()
                    if leaf in made_of
                    for n in readers.get(p, ())
                }
            )
        )
        if number >= 0 and backward[number] and home and number not in homes:
            homes[number] = home, _stake(flow, number)
    return homes


def _stake(flow: Dataflow, number: int) -> float:
    eqn = flow.eqns[number]
    return max(aval_bytes(a.aval) for a in (*eqn.invars, *eqn.outvars))


def _forward_readers(
    flow: Dataflow,
    parameters: Mapping[Var, tuple[Var, ...]],
    backward: Sequence[bool],
    duplicable: Sequence[bool],
) -> dict[Var, list[int]]:
    """Parameter -> the forward equations that read it, directly or through duplicable ones."""
    roots: list[dict[Var, None]] = []
    readers: dict[Var, list[int]] = {}
    for number, eqn in enumerate(flow.eqns):
        own = {a: None for a in eqn.invars if isinstance(a, Var) and a in parameters}
        for operand in flow.operands[number]:
            if duplicable[operand]:
                own.update(roots[operand])
        roots.append(own)
        if not backward[number] and not duplicable[number]:
            for parameter in own:
                readers.setdefault(parameter, []).append(number)
    return readers


def _updated(program: StepProgram, parameters: Mapping[Var, tuple[Var, ...]]) -> dict[Var, Var]:
    """Region result -> the input leaf that the epilogue combines it with, as many elements each."""
    read = {leaf for leaves in parameters.values() for leaf in leaves}
    carried: dict[Var, Var] = {
        output.target: var
        for output, var in zip(program.region_outputs, program.region.outvars, strict=True)
        if isinstance(var, Var)
    }
    found: dict[Var, Var] = {}

    def is_like(atom: Atom, other: Var) -> bool:
        return not isinstance(atom, Literal) and atom.aval.size == other.aval.size

    for eqn in program.epilogue:
        for result in eqn.outvars:
            for atom in eqn.invars:
                if is_like(atom, result) and atom in carried:
                    carried.setdefault(result, carried[atom])
        if eqn.outvars and eqn.outvars[0] in carried:
            gradient = carried[eqn.outvars[0]]
            for atom in eqn.invars:
                if is_like(atom, eqn.outvars[0]) and atom in read:
                    found.setdefault(gradient, atom)
    return found


def _co_readers(
    flow: Dataflow, number: int, readers: Mapping[Var, Sequence[int]], backward: Sequence[bool]
) -> tuple[int, ...]:
    """Forward equations that read a value with this one, and a parameter of its result's size."""
    eqn = flow.eqns[number]
    size = math.prod(eqn.outvars[0].aval.shape)
    reads: dict[int, None] = {}
    for parameter, numbers in readers.items():
        if math.prod(parameter.aval.shape) == size:
            reads.update(dict.fromkeys(numbers))
    shared = (r for a in eqn.invars if isinstance(a, Var) for r in flow.readers[a])
    return tuple(sorted({r for r in shared if r in reads and not backward[r]}))
