"""hetpass from scratch, in about three hundred lines.

A train step written for one device is traced, cut into microbatches and stages, planned for two
unlike devices, and run as a pipeline under 1F1B; the result equals `jax.jit` of the step. Read it
from top to bottom: each section is one pass, small enough to hold in the head. What hetpass does
beyond it is said at the end of each section.

    python docs/tour.py
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# ---------------------------------------------------------------------------------------------
# 0. A step that knows nothing of pipelines.

B, WIDTH, LAYERS = 8, 16, 6


def train_step(params, batch):
    """Plain JAX: a mean over the batch, gradients, one step of SGD."""

    def loss_fn(params):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], loss


def example():
    """Parameters and a batch."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    params = [0.4 * jax.random.normal(k, (WIDTH, WIDTH)) for k in keys[:LAYERS]]
    x, y = (jax.random.normal(k, (B, WIDTH)) for k in keys[LAYERS:])
    return params, {"x": x, "y": y}


# ---------------------------------------------------------------------------------------------
# 1. trace: the step as a flat list of equations, calls inlined.
#    (hetpass traces at B, 2B and 3B, so that no shape is ever taken for a batch by chance.)


@dataclass(frozen=True)
class Equation:
    """`outputs = primitive(inputs)`; an input is a variable's number or a constant."""

    primitive: object
    inputs: tuple
    outputs: tuple
    params: dict


@dataclass(frozen=True)
class Program:
    """A straight line of equations over numbered variables."""

    equations: tuple
    inputs: tuple
    outputs: tuple
    shapes: dict


def trace(step, *args):
    """The program of a step for these arguments."""
    closed = jax.make_jaxpr(step)(*args)
    numbers, equations, shapes = {}, [], {}

    def number(atom):
        if isinstance(atom, core.Literal):
            return ("constant", atom.val)
        shapes.setdefault(numbers.setdefault(atom, len(numbers)), atom.aval.shape)
        return numbers[atom]

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if inner is None:
                inputs = tuple(map(number, eqn.invars))
                outputs = tuple(map(number, eqn.outvars))
                equations.append(Equation(eqn.primitive, inputs, outputs, eqn.params))
                continue
            opened = getattr(inner, "jaxpr", inner)
            for outside, inside in zip(eqn.invars, opened.invars, strict=True):
                numbers[inside] = number(outside)
            walk(opened)
            for outside, inside in zip(eqn.outvars, opened.outvars, strict=True):
                numbers[outside] = number(inside)

    inputs = tuple(map(number, closed.jaxpr.invars))
    walk(closed.jaxpr)
    outputs = tuple(map(number, closed.jaxpr.outvars))
    return Program(tuple(equations), inputs, outputs, shapes)


def is_constant(atom):
    """Whether an atom is a literal."""
    return isinstance(atom, tuple)


# ---------------------------------------------------------------------------------------------
# 2. split: how does every value relate to the batch?
#    whole: the same for all examples. batched: one row per example. partial: a sum over some
#    examples; sums of parts are what the whole batch gives. Rules say what an equation makes of
#    its operands; what no rule covers is refused. (hetpass has rules for every primitive of JAX,
#    dimensions other than the first, max, min, random bits, scans, and exact ways out.)

EXAMPLE_WISE = {
    "tanh", "sub", "add", "mul", "neg", "square", "integer_pow", "div", "add_any", "pow",
    "convert_element_type", "one_minus_square", "copy",
}  # fmt: skip
LINEAR = {"neg", "add", "sub", "add_any", "transpose", "convert_element_type", "copy"}


class Refused(Exception):
    """The step has no equal in microbatches that the rules can prove."""


def kind_of(eqn, kinds, shapes):
    """The kind of what an equation makes."""
    name = eqn.primitive.name
    found = [("whole" if is_constant(a) else kinds[a]) for a in eqn.inputs]
    out_shape = shapes[eqn.outputs[0]]
    if set(found) <= {"whole"}:
        # A value made for every example from nothing that differs between them, as ones to start
        # the backward pass: each microbatch makes its own rows.
        makes_rows = name == "broadcast_in_dim" and out_shape[:1] == (B,)
        return "batched" if makes_rows else "whole"
    if "partial" in found:
        scales = name in ("mul", "div") and found.count("partial") == 1 and "batched" not in found
        if (name in LINEAR and set(found) == {"partial"}) or (scales and found[0] == "partial"):
            return "partial"
        return "late"  # needs the whole sum: after all microbatches
    if "late" in found:
        return "late"
    if name in EXAMPLE_WISE:
        return "batched"
    if name == "reduce_sum":
        return "partial" if 0 in eqn.params["axes"] else "batched"
    if name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        contracts = [k == "batched" and 0 in d for k, d in zip(found, (left, right), strict=True)]
        if all(contracts):
            return "partial"
        if not any(contracts) and found == ["batched", "whole"]:
            return "batched"
    raise Refused(f"{name} of {found}")


@dataclass(frozen=True)
class Split:
    """The region runs once per microbatch, the epilogue once per step."""

    program: Program
    kinds: dict
    region: tuple
    epilogue: tuple


def split(program, batch_inputs):
    """Sorts the equations by the kinds of what they make."""
    kinds = {v: "batched" if v in batch_inputs else "whole" for v in program.inputs}
    region, epilogue = [], []
    for eqn in program.equations:
        kind = kind_of(eqn, kinds, program.shapes)
        for output in eqn.outputs:
            kinds[output] = kind
        (epilogue if kind == "late" else region).append(eqn)
    return Split(program, kinds, tuple(region), tuple(epilogue))


def for_microbatch(eqn, kinds, b):
    """The same equation for b examples: shapes that follow the batch shrink, constants do not."""
    if eqn.primitive.name == "broadcast_in_dim" and kinds[eqn.outputs[0]] == "batched":
        return replace(eqn, params={**eqn.params, "shape": (b, *eqn.params["shape"][1:])})
    return eqn


# ---------------------------------------------------------------------------------------------
# 3. segment: layers in the order of the forward pass. Here a layer ends at each matrix product
#    of the forward pass. Backward equations go to the layer whose parameter or residual they
#    read; the lowest one, since gradients flow down. (hetpass cuts where few bytes cross, and
#    places backward equations by a linear program.)


def segment(found, param_inputs):
    """The layer of every region equation, and whether it is backward."""
    layer_of = {v: i for i, v in enumerate(param_inputs)}
    layers, backward, seen_loss = [], [], False
    for eqn in found.region:
        variables = [a for a in eqn.inputs if not is_constant(a)]
        known = [layer_of[v] for v in variables if v in layer_of]
        pick = min if seen_loss else max
        layer = pick(known, default=LAYERS - 1 if seen_loss else 0)
        layers.append(layer)
        backward.append(seen_loss)
        layer_of.update(dict.fromkeys(eqn.outputs, layer))
        # The loss is the first sum over the examples: what follows it is the backward pass.
        seen_loss = seen_loss or found.kinds[eqn.outputs[0]] == "partial"
    return layers, backward


# ---------------------------------------------------------------------------------------------
# 4. plan: which layers on which device? The slowest stage decides: minimize its seconds.
#    (hetpass chooses submeshes, sharding, order of groups, microbatches, recomputation, memory
#    and the schedule together, and simulates the best few.)


def plan(num_layers, speeds):
    """The first layer of each stage, for devices of these speeds: a dynamic program."""
    best = {(0, 0): (0.0, ())}
    for device, speed in enumerate(speeds):
        for end in range(num_layers + 1):
            ways = [
                (max(slowest, (end - first) / speed), (*cuts, first))
                for first in range(end + 1)
                for slowest, cuts in [best.get((device, first), (float("inf"), ()))]
            ]
            best[device + 1, end] = min(ways)
    return best[len(speeds), num_layers][1]


# ---------------------------------------------------------------------------------------------
# 5. partition and compile: one function per stage and direction, on one device.


@dataclass(frozen=True)
class Fragment:
    """Equations of one stage and direction, what they read from outside, and all they make."""

    reads: tuple
    makes: tuple
    run: object


def run_equations(equations, reads, makes, *values):
    """Evaluates equations on values: the whole interpreter."""
    known = dict(zip(reads, values, strict=True))
    for eqn in equations:
        operands = [a[1] if is_constant(a) else known[a] for a in eqn.inputs]
        result = eqn.primitive.bind(*operands, **eqn.params)
        results = result if eqn.primitive.multiple_results else [result]
        known.update(zip(eqn.outputs, results, strict=True))
    return [known[v] for v in makes]


def fragment(equations, wanted):
    """A compiled function of some equations that returns those of its values that are wanted."""
    made = {v for eqn in equations for v in eqn.outputs}
    reads = {a for eqn in equations for a in eqn.inputs if not is_constant(a)} - made
    reads, makes = tuple(sorted(reads)), tuple(sorted(made & wanted))
    return Fragment(reads, makes, jax.jit(partial(run_equations, equations, reads, makes)))


def partition(found, layers, backward, cuts, b):
    """Fragments by (stage, "F" or "B"), and the one of the epilogue."""
    parts = defaultdict(list)
    for eqn, layer, back in zip(found.region, layers, backward, strict=True):
        stage = max(s for s, first in enumerate(cuts) if first <= layer)
        parts[stage, "B" if back else "F"].append(for_microbatch(eqn, found.kinds, b))
    everything = [*found.region, *found.epilogue]
    wanted = {a for eqn in everything for a in eqn.inputs if not is_constant(a)}
    wanted |= {v for v in found.program.outputs if not is_constant(v)}
    fragments = {key: fragment(equations, wanted) for key, equations in parts.items()}
    return fragments, fragment(list(found.epilogue), wanted)


# ---------------------------------------------------------------------------------------------
# 6. schedule: 1F1B. Stage s runs S - s forwards ahead, then one forward and one backward in turn.
#    (hetpass has nine schedules, and searches on a simulator for links and memory that differ.)


def one_f_one_b(num_stages, num_microbatches):
    """Tasks in an order that every stage may follow and no stage waits for in vain."""
    lanes = []
    for s in range(num_stages):
        ahead = min(num_stages - s, num_microbatches)
        lane = [("F", s, m) for m in range(ahead)]
        for m in range(num_microbatches):
            lane.append(("B", s, m))
            if ahead + m < num_microbatches:
                lane.append(("F", s, ahead + m))
        lanes.append(lane)
    order, done = [], set()
    while any(lanes):
        for lane in lanes:
            if not lane:
                continue
            kind, s, m = lane[0]
            needs = {("F", s - 1, m)} if kind == "F" else {("F", s, m), ("B", s + 1, m)}
            if {n for n in needs if 0 <= n[1] < num_stages} <= done:
                done.add(lane[0])
                order.append(lane.pop(0))
    return order


# ---------------------------------------------------------------------------------------------
# 7. run: dispatch the tasks; values move when a stage reads what another one made.


def run(found, fragments, epilogue, order, devices, values):
    """One step. `values` are the program's inputs in order."""
    program, kinds = found.program, found.kinds
    count = 1 + max(m for _, _, m in order)
    inputs = dict(zip(program.inputs, values, strict=True))
    known = {}  # (variable, microbatch or None): its value
    for v, value in inputs.items():
        rows = jnp.split(value, count) if kinds[v] == "batched" else None
        known.update({(v, m): rows[m] for m in range(count)} if rows else {(v, None): value})
    sums = {}
    for kind, stage, m in order:
        part = fragments[stage, kind]
        reads = [known[(v, m) if (v, m) in known else (v, None)] for v in part.reads]
        made = part.run(*jax.device_put(reads, devices[stage]))  # a transfer, where it has to move
        for v, value in zip(part.makes, made, strict=True):
            known[v, m] = value
            if kinds[v] == "partial":  # accumulate where it was made
                sums[v] = sums[v] + value if v in sums else value
            elif kinds[v] == "whole":
                known[v, None] = value
    whole = {v: value for (v, m), value in known.items() if m is None} | sums
    reads = jax.device_put([whole[v] for v in epilogue.reads], devices[0])
    whole.update(zip(epilogue.makes, epilogue.run(*reads), strict=True))
    return [whole[v] for v in program.outputs]


# ---------------------------------------------------------------------------------------------


def parallel_step(params, batch, speeds=(2.0, 1.0), num_microbatches=4):
    """The step as a pipeline; also the first layer of each stage, and the order of tasks."""
    program = trace(train_step, params, batch)
    found = split(program, set(program.inputs[len(params) :]))
    layers, backward = segment(found, program.inputs[: len(params)])
    cuts = plan(len(params), speeds)
    b = B // num_microbatches
    fragments, epilogue = partition(found, layers, backward, cuts, b)
    order = one_f_one_b(len(cuts), num_microbatches)
    values = jax.tree.leaves((params, batch))
    leaves = run(found, fragments, epilogue, order, jax.devices(), values)
    return jax.tree.unflatten(jax.tree.structure((params, 0.0)), leaves), cuts, order


def main():
    """Both ways, compared."""
    params, batch = example()
    (new, loss), cuts, order = parallel_step(params, batch)
    expected, expected_loss = jax.jit(train_step)(params, batch)
    print("stages begin at layers", cuts)  # 4 layers on the fast device, 2 on the slow one
    print("tasks", " ".join(f"{kind}{stage}.{m}" for kind, stage, m in order))
    worst = max(float(np.abs(a - e).max()) for a, e in zip(new, expected, strict=True))
    print(f"loss {float(loss):.6f}, expected {float(expected_loss):.6f}")
    print(f"parameters {worst:.1e} apart")


if __name__ == "__main__":
    main()
