"""summarize: Layered -> ProgramFacts. All that the planner knows of a program, as numbers.

Amounts are told at two sizes of the microbatch, and so hold for every number of microbatches; facts
are made once for a program, whatever the cluster. Bytes are exact: what a stage of any range of
layers holds from forward to backward, what crosses each cut in both directions, parameters, state
and accumulators. FLOPs are counted on the jaxpr; the traffic of what is left after fusion, and what
tensor parallelism has to sum, are models (`fused_traffic`; Megatron-LM, Shoeybi et al. 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetpass._jax import DropVar, Jaxpr, JaxprEqn, Var, scan_counts
from hetpass.analysis.fingerprint import fingerprint
from hetpass.analysis.flops import aval_bytes, flops_by_format
from hetpass.analysis.fused_traffic import Moved, fused_traffic, nested_traffic
from hetpass.analysis.layer_reads import LayerReads, Touch, layer_reads
from hetpass.analysis.state_homes import Shares, state_bytes
from hetpass.analysis.tensor_parallel import most_tensor_parallel, reduced_bytes
from hetpass.analysis.two_sizes import AtSize, fitted, two_sizes
from hetpass.ir.facts import Amount, LayerFacts, ProgramFacts, SharedBytes
from hetpass.ir.kinds import Batched, Partial
from hetpass.ir.program import (
    Accumulated,
    Joined,
    Layered,
    SliceInput,
    WholeInput,
)


def summarize(layered: Layered, remade: Sequence[bool] = ()) -> ProgramFacts:
    """The facts of a program, layer by layer.

    Args:
      remade: per region equation, whether stages make its result again where they read it, instead
        of keeping or sending it.
    """
    one, other = two_sizes(layered.program)
    reads = layer_reads(layered, remade)
    tables = [_measured(layered, reads, at) for at in (one, other) if at is not None]
    first, second = tables[0], tables[-1]

    def amounts(name: str, layer: int) -> Amount:
        return fitted(one, other, first.of(name)[layer], second.of(name)[layer])

    formats = sorted(name for name in first.by_layer if " flops " in name)
    once = _once(layered, reads)
    parallel = most_tensor_parallel(layered, reads)
    names: dict[int, str] = {}
    layers = []
    for k in range(layered.num_layers):
        flops: dict[str, dict[str, Amount]] = {"forward": {}, "backward": {}}
        for name in formats:
            direction, _, dtype = name.split(" ")
            if first.of(name)[k]:
                flops[direction][dtype] = amounts(name, k)
        layers.append(
            LayerFacts(
                kind=names.setdefault(layered.layer_kinds[k], layered.names[k] or f"layer {k}"),
                forward_flops=flops["forward"],
                backward_flops=flops["backward"],
                forward_traffic_bytes=amounts("forward traffic", k),
                backward_traffic_bytes=amounts("backward traffic", k),
                parameter_bytes=once.parameters[k],
                state_bytes=once.state[k],
                gradient_bytes=once.gradients[k],
                batch_bytes=once.batch[k],
                activation_bytes=amounts("activations", k),
                workspace_bytes=amounts("workspace", k),
                boundary_bytes=amounts("boundary", k),
                gradient_boundary_bytes=amounts("gradient boundary", k),
                reduced_bytes=amounts("reduced", k),
                most_tensor_parallel=parallel[k],
            )
        )
    shared = [
        SharedBytes(*pair, fitted(one, other, size, second.shared.get(pair, 0.0)))
        for pair, size in first.shared.items()
    ]
    shared += [SharedBytes(*pair, held_bytes=size) for pair, size in once.shared.items()]
    return ProgramFacts(
        tuple(layers), layered.program.traced.batch_size or 1, fingerprint(layered), tuple(shared)
    )


# ---------------------------------------------------------------------------------------------
# What depends on the microbatch


@dataclass
class _Measured:
    """Numbers by name and layer, at one size.

    Attributes:
      shared: activations that two layers both count, by the pair.
    """

    num_layers: int
    by_layer: dict[str, list[float]] = field(default_factory=dict)
    shared: dict[tuple[int, int], float] = field(default_factory=dict)

    def of(self, name: str) -> list[float]:
        return self.by_layer.setdefault(name, [0.0] * self.num_layers)


def _measured(layered: Layered, reads: LayerReads, at: AtSize) -> _Measured:
    found = _Measured(layered.num_layers)
    _count_work(layered, at, found)
    _count_residuals(reads, at, found)
    _count_crossings(layered, reads, at, found)
    found.by_layer["reduced"] = reduced_bytes(layered, at)
    return found


def _count_work(layered: Layered, at: AtSize, found: _Measured) -> None:
    """FLOPs, traffic and workspace of every layer's forward and backward part."""
    region = layered.program.region
    parameters = {
        var
        for var, source in zip(region.invars, layered.program.region_inputs, strict=True)
        if isinstance(source, WholeInput)
    }
    parts: dict[tuple[int, str], list[int]] = {}
    for k, span in enumerate(layered.spans):
        direction = "backward" if layered.backward[k] else "forward"
        share = 1 / (span.last - span.first + 1)
        for dtype, count in flops_by_format(at.eqns[k]).items():
            totals = found.of(f"{direction} flops {dtype}")
            for layer in range(span.first, span.last + 1):
                totals[layer] += share * count
        if span.first == span.last:
            parts.setdefault((span.first, direction), []).append(k)
            continue
        skipped = [
            i for i, a in enumerate(region.eqns[k].invars) if isinstance(a, Var) and a in parameters
        ]
        moved = nested_traffic(at.eqns[k], skipped)
        for layer in range(span.first, span.last + 1):
            found.of(f"{direction} traffic")[layer] += share * moved.traffic_bytes
            _raise_to(found.of("workspace"), layer, moved.peak_bytes)
    home = {v: key for key, members in parts.items() for k in members for v in _results(region, k)}
    outside: dict[tuple[int, str], set[Var]] = {key: set() for key in parts}
    members_of = {k: key for key, members in parts.items() for k in members}
    for k, eqn in enumerate(region.eqns):
        for a in eqn.invars:
            if isinstance(a, Var) and a in home and home[a] != members_of.get(k):
                outside[home[a]].add(a)
    for v in region.outvars:
        if isinstance(v, Var) and v in home:
            outside[home[v]].add(v)
    twins = {id(region.eqns[k]): at.eqns[k] for k in range(len(region.eqns))}

    def nested(eqn: JaxprEqn, skipped: Iterable[int]) -> Moved:
        return nested_traffic(twins[id(eqn)], list(skipped))

    for (layer, direction), members in parts.items():
        moved = fused_traffic(
            [region.eqns[k] for k in members],
            outside[layer, direction],
            parameters,
            at.bytes.__getitem__,
            nested,
        )
        found.of(f"{direction} traffic")[layer] += moved.traffic_bytes
        _raise_to(found.of("workspace"), layer, moved.peak_bytes)


def _results(region: Jaxpr, number: int) -> list[Var]:
    return [v for v in region.eqns[number].outvars if not isinstance(v, DropVar)]


def _raise_to(values: list[float], layer: int, value: float) -> None:
    values[layer] = max(values[layer], value)


def _count_residuals(reads: LayerReads, at: AtSize, found: _Measured) -> None:
    """What backward parts read of forward values: held by every stage with a layer that does."""
    activations = found.of("activations")
    for var, made in reads.made.items():
        if made.backward:
            continue
        whole, sliced = _layers([t for t in reads.read.get(var, []) if t.backward])
        _add(at.bytes[var], whole, sliced, activations, found.shared)


def _layers(touches: Iterable[Touch]) -> tuple[set[int], set[int]]:
    """The layers that read the whole value, and those that read a slice of their own."""
    whole: set[int] = set()
    sliced: set[int] = set()
    for touch in touches:
        span = range(touch.layers.first, touch.layers.last + 1)
        (sliced if touch.sliced else whole).update(span)
    return whole, sliced - whole


def _add(
    size: float,
    whole: Iterable[int],
    sliced: set[int],
    totals: list[float],
    shared: dict[tuple[int, int], float],
) -> None:
    """Every layer counts the value; of a value that several count, neighbours share it."""
    ordered = sorted(whole)
    for layer in ordered:
        totals[layer] += size
    for pair in zip(ordered, ordered[1:], strict=False):
        shared[pair] = shared.get(pair, 0.0) + size
    for layer in sliced:
        totals[layer] += size / len(sliced)


def _count_crossings(layered: Layered, reads: LayerReads, at: AtSize, found: _Measured) -> None:
    """What crosses the cut behind each layer, forward and backward."""
    kinds = layered.program.kinds
    forward = [0.0] * (layered.num_layers + 1)
    backward = [0.0] * (layered.num_layers + 1)

    def cross(changes: list[float], low: int, high: int, size: float) -> None:
        if low < high:
            changes[low] += size
            changes[high] -= size

    for var, made in reads.made.items():
        if made.sliced or (made.backward and isinstance(kinds.get(var), Partial)):
            continue  # slices stay; shares of a gradient are summed once per step
        home = made.layers.first if made.backward else made.layers.last
        ends = [t.layers.first for t in reads.read.get(var, [])]
        lasts = [t.layers.last for t in reads.read.get(var, []) if not t.sliced]
        if not made.backward:
            cross(forward, home, max([*ends, *lasts], default=home), at.bytes[var])
        cross(backward, min(ends, default=home), home, at.bytes[var])
    for k, span in enumerate(layered.spans):
        if span.first < span.last:
            changes = backward if layered.backward[k] else forward
            cross(changes, span.first, span.last, _carried(layered, k, at))
    for name, changes in (("boundary", forward), ("gradient boundary", backward)):
        total, values = 0.0, found.of(name)
        for k in range(layered.num_layers - 1):
            total += changes[k]
            values[k] = total


def _carried(layered: Layered, number: int, at: AtSize) -> float:
    """What one iteration of a scan over layers hands to the next; sums do not travel."""
    eqn, kinds = layered.program.region.eqns[number], layered.program.kinds
    _, carry = scan_counts(eqn)
    return sum(at.bytes[v] for v in eqn.outvars[:carry] if isinstance(kinds.get(v), Batched))


# ---------------------------------------------------------------------------------------------
# What there is once per step


@dataclass(frozen=True)
class _Once:
    """Bytes per layer, whatever the microbatch.

    Attributes:
      shared: parameters and accumulators that two layers both count, by the pair.
    """

    parameters: Sequence[float]
    state: Sequence[float]
    gradients: Sequence[float]
    batch: Sequence[float]
    shared: Mapping[tuple[int, int], float]


def _once(layered: Layered, reads: LayerReads) -> _Once:
    program, count = layered.program, layered.num_layers
    parameters, gradients, batch = [0.0] * count, [0.0] * count, [0.0] * count
    shared: dict[tuple[int, int], float] = {}
    read: dict[Var, Shares] = {}
    made: dict[Var, Shares] = {}
    for var, source in zip(program.region.invars, program.region_inputs, strict=True):
        whole, sliced = _layers(reads.read.get(var, []))
        if not isinstance(source, (WholeInput, SliceInput)) or not (whole or sliced):
            continue
        size = aval_bytes(source.var.aval)
        if isinstance(source, WholeInput):
            _add(size, whole, sliced, parameters, shared)
        else:
            _add(size, whole, sliced, batch, {})
        read.setdefault(source.var, _shares(whole, sliced))
    maker = {v: k for k, eqn in enumerate(program.region.eqns) for v in eqn.outvars}
    for var, output in zip(program.region.outvars, program.region_outputs, strict=True):
        if not isinstance(var, Var):
            continue
        whole, sliced = _layers(_summands(layered, reads, maker, var))
        if isinstance(output, Joined):
            _add(aval_bytes(output.target.aval), whole, sliced, batch, {})
        else:
            _add(_accumulator_bytes(output), whole, sliced, gradients, shared)
        made[output.target] = _shares(whole, sliced)
    state = state_bytes(program, read, made, count)
    return _Once(parameters, state, gradients, batch, shared)


def _shares(whole: Iterable[int], sliced: Iterable[int]) -> Shares:
    """A value that several layers read whole belongs to the first of them."""
    slices = sorted(sliced)
    if slices:
        return dict.fromkeys(slices, 1 / len(slices))
    return {min(whole): 1.0}


def _accumulator_bytes(output: Accumulated) -> float:
    target = output.target.aval
    try:
        item_bytes = np.dtype(output.dtype).itemsize
    except TypeError:  # an extended dtype: PRNG keys
        return aval_bytes(target)
    return float(getattr(target, "size", 0)) * item_bytes


def _summands(
    layered: Layered, reads: LayerReads, maker: Mapping[Var, int], var: Var
) -> list[Touch]:
    """Where the summands of a result are made: each of their stages sums its own."""
    region, kinds = layered.program.region, layered.program.kinds
    found: list[Touch] = []
    pending = [var]
    while pending:
        value = pending.pop()
        eqn = region.eqns[maker[value]]
        parts = [a for a in eqn.invars if isinstance(a, Var) and a in maker]
        is_sum = eqn.primitive.name in ("add_any", "add") and all(
            isinstance(kinds.get(a), Partial) for a in parts
        )
        if parts and (is_sum or value in reads.roots):
            pending += parts
        else:
            span = layered.spans[maker[value]]
            found.append(reads.made.get(value, Touch(span, layered.backward[maker[value]])))
    return found
