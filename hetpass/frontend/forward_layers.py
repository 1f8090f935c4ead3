"""Layers of the forward equations: chains cut into pieces, pieces laid along one layer axis.

A chain that stands in a row adds its pieces as new layers. A chain beside earlier ones runs along
their layers: each piece goes where the parameters that it shares with them are, or, if it shares
none (a teacher), as far along as the piece is in its own chain, by time. Light equations that need
only inputs (masks, labels as one-hot vectors) go to their first reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from hetpass._jax import JaxprEqn, Literal, Var
from hetpass.analysis.flops import (
    equation_bytes,
    equation_flops,
    equation_matmul_flops,
)
from hetpass.frontend.dataflow import Dataflow, only_from
from hetpass.frontend.forward_chains import Chain, forward_chains, whole_roots
from hetpass.frontend.layer_cuts import Piece, Weights, cut_chain
from hetpass.frontend.layer_merging import LayerWeight, merge_layers
from hetpass.frontend.layer_scans import is_scan_over_layers, scan_operands
from hetpass.frontend.recomputed_blocks import recomputed_blocks
from hetpass.frontend.varying import Varying, varying_values
from hetpass.ir.program import LayerSpan, StepProgram, WholeInput

REFERENCE_FLOPS_PER_S = 1e14
REFERENCE_BYTES_PER_S = 1e12
"""A device of about this balance tells heavy from light; the real ones enter with the costs."""

MIN_HEAVY = 1 / 100
"""Of the mean time of heavy equations, below which one is light after all."""

MARKER = "hetpass_stage_boundary"


@dataclass(frozen=True)
class ForwardLayers:
    """Where the forward equations are.

    Attributes:
      num_layers: L, at least 1.
      spans: forward equation -> its layers.
      over_layers: the scans over layers, in program order.
      boundaries: the user's cuts: `k` for one before layer k.
    """

    num_layers: int
    spans: Mapping[int, LayerSpan]
    over_layers: tuple[int, ...]
    boundaries: tuple[int, ...]


def forward_layers(
    program: StepProgram,
    flow: Dataflow,
    backward: Sequence[bool],
    duplicable: Sequence[bool],
    max_layers: int,
) -> ForwardLayers:
    """Cut the forward equations of the region into at most `max_layers` layers."""
    batch = varying_values(program)
    weights, time_s = _weigh(flow, batch, backward, duplicable, max_layers)
    anchors = sorted({*time_s, *weights.marks})
    fixed = set(anchors)
    free = only_from(flow, lambda n: not backward[n] and n not in fixed)
    leaf = _leaves(flow, backward, free, fixed)
    placed = [n for n in range(len(flow.eqns)) if not (backward[n] or free[n] or leaf[n])]
    roots = _roots(program, flow, batch)
    recomputed = [program.traced.recomputed[source] for source in program.origin]
    inside = recomputed_blocks(flow, backward, recomputed, free)
    axis = _Axis(flow, time_s, replace(weights, inside=inside), roots)
    for chain in forward_chains(flow, placed, anchors, [time_s.get(a, 0.0) for a in anchors]):
        axis.add(chain)
    number_of = merge_layers(axis.layers, max_layers)
    spans = {n: LayerSpan(number_of[s.first], number_of[s.last]) for n, s in axis.spans.items()}
    num_layers = max(number_of, default=0) + 1
    _place_leaves(flow, leaf, free, spans)
    _place_free(flow, free, backward, spans, num_layers)
    cuts = {number_of[k] for k, layer in enumerate(axis.layers) if layer.forced}
    return ForwardLayers(num_layers, spans, tuple(sorted(weights.alone)), tuple(sorted(cuts - {0})))


def _leaves(
    flow: Dataflow, backward: Sequence[bool], free: Sequence[bool], fixed: Set[int]
) -> list[bool]:
    """Light equations that no forward result needs: residuals and metrics, right at their operands.

    After common subexpressions are merged, a residual of an equation may stand far behind it.
    """
    leaf = [False] * len(flow.eqns)
    for n in reversed(range(len(flow.eqns))):
        if not (backward[n] or free[n] or n in fixed):
            leaf[n] = all(backward[r] or leaf[r] for r in flow.successors[n])
    return leaf


def _weigh(
    flow: Dataflow,
    batch: Varying,
    backward: Sequence[bool],
    duplicable: Sequence[bool],
    max_layers: int,
) -> tuple[Weights, dict[int, float]]:
    forward = [n for n in range(len(flow.eqns)) if not backward[n]]
    matmul_flops = sum(equation_matmul_flops(flow.eqns[n]) for n in forward)
    time_s, lookups = {}, set()
    for n in forward:
        lookup = _is_lookup(flow.eqns[n], batch)
        if lookup or _may_be_heavy(flow.eqns[n], batch):
            flops, moved = equation_flops(flow.eqns[n]), equation_bytes(flow.eqns[n])
            time_s[n] = max(flops / REFERENCE_FLOPS_PER_S, moved / REFERENCE_BYTES_PER_S)
            lookups |= {n} if lookup else set()
    trips = sum(flow.eqns[n].params.get("length", 1) for n in time_s)
    least = MIN_HEAVY * sum(time_s.values()) / max(trips, 1)
    time_s = {n: t for n, t in time_s.items() if t >= least or n in lookups}
    alone: set[int] = set()
    room = max_layers
    for n in time_s:
        length = flow.eqns[n].params.get("length", 0)
        if length <= room and is_scan_over_layers(flow.eqns[n], batch, matmul_flops):
            alone.add(n)
            room -= length
    marks = {n for n in forward if flow.eqns[n].primitive.name == MARKER}
    weights = Weights(time_s, lookups, alone, marks, lambda n: not duplicable[n], ())
    return weights, time_s


def _may_be_heavy(eqn: JaxprEqn, batch: Varying) -> bool:
    if not any(batch.may_vary(v) for v in eqn.outvars):
        return False
    return eqn.primitive.name in ("scan", "while", "fft") or equation_matmul_flops(eqn) > 0


def _is_lookup(eqn: JaxprEqn, batch: Varying) -> bool:
    """Rows of a whole table at indices from the batch."""
    if eqn.primitive.name != "gather":
        return False
    table, indices = eqn.invars
    return (
        not batch.varies(table)
        and batch.may_vary(indices)
        and math.prod(eqn.params["slice_sizes"]) > 1
    )


def _roots(program: StepProgram, flow: Dataflow, batch: Varying) -> list[frozenset[object]]:
    """Per equation the parameters that it reads, directly or cast, transposed and the like."""
    inputs = {
        var
        for var, source in zip(program.region.invars, program.region_inputs, strict=True)
        if isinstance(source, WholeInput) and var.aval.shape
    }
    whole = only_from(flow, lambda n: not any(batch.varies(v) for v in flow.eqns[n].outvars))
    return whole_roots(flow, whole, inputs)


def _place_leaves(
    flow: Dataflow, leaf: Sequence[bool], free: Sequence[bool], spans: dict[int, LayerSpan]
) -> None:
    """With their neighbours in the program, as long as all operands are there anyway."""
    neighbour = 0
    for n, operands in enumerate(flow.operands):
        if not leaf[n]:
            neighbour = spans[n].last if n in spans else neighbour
            continue
        made = [o for o in operands if not free[o]]
        least = max(spans[o].last for o in made)
        most = min(_last_read(flow, o, n, spans) for o in made)
        layer = max(least, min(most, neighbour))
        spans[n] = LayerSpan(layer, layer)


def _last_read(flow: Dataflow, made: int, by: int, spans: Mapping[int, LayerSpan]) -> int:
    """The last layer that already has the values that equation `by` reads of equation `made`."""
    reach = []
    for var in flow.eqns[made].outvars:
        readers = flow.readers.get(var, ())
        if by in readers:
            reach.append(max([spans[made].last, *(spans[r].first for r in readers if r in spans)]))
    return min(reach)


def _place_free(
    flow: Dataflow,
    free: Sequence[bool],
    backward: Sequence[bool],
    spans: dict[int, LayerSpan],
    num_layers: int,
) -> None:
    """Equations that need only inputs: the layer of the first reader, the last one if none."""
    for number in reversed(range(len(flow.eqns))):
        if free[number]:
            readers = [spans[r].first for r in flow.successors[number] if not backward[r]]
            layer = min(readers, default=num_layers - 1)
            spans[number] = LayerSpan(layer, layer)


@dataclass
class _Axis:
    """The layers laid so far; local to `forward_layers`."""

    flow: Dataflow
    time_s: Mapping[int, float]
    weights: Weights
    roots: Sequence[frozenset[object]]
    layers: list[LayerWeight] = field(default_factory=list)
    spans: dict[int, LayerSpan] = field(default_factory=dict)
    parameter_layer: dict[object, int] = field(default_factory=dict)

    def add(self, chain: Chain) -> None:
        pieces = cut_chain(self.flow, chain.equations, self.weights)
        targets = self._targets(chain, pieces) if chain.beside and self.layers else None
        if targets is None or not self._lay_beside(pieces, targets):
            self._append(pieces)

    # -- in a row ------------------------------------------------------------------------------

    def _append(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            loop = next((n for n in piece.heavy if n in self.weights.alone), None)
            length = 1 if loop is None else self.flow.eqns[loop].params["length"]
            first = len(self.layers)
            lookup = any(n in self.weights.lookups for n in piece.heavy)
            for i in range(length):
                forced = piece.forced and i == 0
                self.layers.append(LayerWeight(0.0, forced, i > 0, lookup))
            span = LayerSpan(first, first + length - 1)
            self._assign(piece, span, loop)

    def _assign(self, piece: Piece, span: LayerSpan, loop: int | None) -> None:
        layer = span.first
        for number in piece.equations:
            if number == loop:
                self.spans[number] = span
                layer = span.last
            else:
                at = max([layer, *(self.spans[o].last for o in self._placed(number))])
                self.spans[number] = LayerSpan(at, at)
            if number in self.time_s:
                self._weigh(number)

    def _placed(self, number: int) -> list[int]:
        return [o for o in self.flow.operands[number] if o in self.spans]

    def _weigh(self, number: int) -> None:
        span = self.spans[number]
        share = self.time_s[number] / (span.last - span.first + 1)
        for layer in range(span.first, span.last + 1):
            self.layers[layer] = self.layers[layer].plus(share)
        for parameter in self.roots[number]:
            self.parameter_layer.setdefault(parameter, span.first)

    # -- beside --------------------------------------------------------------------------------

    def _targets(self, chain: Chain, pieces: Sequence[Piece]) -> list[int] | None:
        """A layer per piece, or None if the chain had better have layers of its own."""
        first = 0 if chain.after is None else self.spans[chain.after].last
        heavy = [n for piece in pieces for n in piece.heavy]
        known = sum(self.time_s[n] for n in heavy if self._known(n) is not None)
        if 2 * known >= sum(self.time_s[n] for n in heavy if self.roots[n]):
            targets, layer = [], first
            for piece in pieces:
                at = [(self.time_s[n], -n, self._known(n)) for n in piece.heavy]
                known_at = [k for _, _, k in sorted(at, reverse=True) if k is not None]
                layer = max(layer, known_at[0] if known_at else layer)
                targets.append(layer)
            return targets
        own = sum(self.time_s[n] for n in heavy)
        along = [layer.time_s for layer in self.layers[first:]]
        if own > 2 * sum(along):
            return None
        return _proportional(
            [sum(self.time_s[n] for n in piece.heavy) / own for piece in pieces], along, first
        )

    def _known(self, number: int) -> int | None:
        layers = [self.parameter_layer[p] for p in self.roots[number] if p in self.parameter_layer]
        return max(layers, default=None)

    def _lay_beside(self, pieces: Sequence[Piece], targets: Sequence[int]) -> bool:
        """Assign pieces to existing layers; False, and nothing done, if a scan finds no place."""
        loops: list[tuple[int | None, LayerSpan]] = []
        reach = 0
        taken: set[int] = set()
        for piece, target in zip(pieces, targets, strict=True):
            loop = next((n for n in piece.heavy if n in self.weights.alone), None)
            reach = max(reach, target)
            span = LayerSpan(reach, reach)
            if loop is not None:
                twin = self._like(loop, reach, taken)
                if twin is None:
                    return False
                taken.add(twin)
                span = self.spans[twin]
            loops.append((loop, span))
            reach = span.last
        before = dict(self.spans), list(self.layers), dict(self.parameter_layer)
        for piece, (loop, span) in zip(pieces, loops, strict=True):
            self._assign(piece, span, loop)
            if loop is not None and any(
                self.spans[o].last > span.first for o in self._placed(loop)
            ):
                self.spans, self.layers, self.parameter_layer = before
                return False
            if piece.forced:
                self.layers[span.first] = self.layers[span.first].force()
        return True

    def _like(self, loop: int, reach: int, taken: set[int]) -> int | None:
        """A scan over layers already laid, as long as `loop`, at or after layer `reach`."""
        stacked = {a for a in scan_operands(self.flow.eqns[loop])[2] if not isinstance(a, Literal)}
        length = self.flow.eqns[loop].params["length"]
        others = [
            n
            for n in sorted(self.weights.alone)
            if n in self.spans and n not in taken and self.flow.eqns[n].params["length"] == length
        ]
        sharing = [
            n
            for n in others
            if any(a in stacked for a in scan_operands(self.flow.eqns[n])[2] if isinstance(a, Var))
        ]
        later = [n for n in others if self.spans[n].first >= reach]
        return next(iter(sharing), next(iter(later), None))


def _proportional(shares: Sequence[float], along: Sequence[float], first: int) -> list[int]:
    """The layer that is as far along as the middle of each piece."""
    total = sum(along) or 1.0
    targets, done = [], 0.0
    for share in shares:
        middle, passed = done + share / 2, 0.0
        layer = 0
        while layer < len(along) - 1 and passed + along[layer] / total < middle:
            passed += along[layer] / total
            layer += 1
        targets.append(first + layer)
        done += share
    return targets
