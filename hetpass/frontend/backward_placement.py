"""Place backward equations on layers by a linear program.

    minimize    bytes × distance that values travel
    subject to  layer(reader) <= layer(producer)      for every backward value
                0 <= layer(e) <= L - 1

A backward value travels from its producer down to its lowest reader. A forward value is held in the
layers from its producer to its last forward reader and travels to the readers outside of these; a
whole input (a parameter) likewise, at a higher price, since a copy of it would have to be kept.
Every constraint is a bound on a difference of two variables, so the matrix is totally unimodular
and the vertices that the simplex method finds are integral (Hoffman and Kruskal, 1956).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetpass._jax import Literal, Var
from hetpass.analysis.flops import aval_bytes
from hetpass.frontend.dataflow import Dataflow
from hetpass.ir.program import LayerSpan

PARAMETER_PRICE = 4.0
"""Per layer that a parameter is read away from where the forward pass has it, in units of the
largest value of the program: a copy costs more than any move."""

DUPLICABLE_PRICE = 1e-5
"""Per layer, in the same units: what may be made anywhere is made next to its reader."""

GRADIENT_PRICE = 4.0
"""Per byte and layer that a gradient is made away from its parameter, where it is summed."""

SMALLEST_PRICE = 1e-4
"""Of the largest, up to which smaller ones are raised: the solver's tolerance is 1e-7."""

TIE_PRICE = 1e-6
"""Of the largest, per layer below the last: among equals an equation runs as early as it may."""

Interval = tuple[int, int]


@dataclass(frozen=True)
class Placed:
    """What is placed already.

    Attributes:
      num_layers: L.
      spans: forward equations, and backward scans over layers, by number.
      backward: one per equation.
      duplicable: one per equation: its values cost nothing to move.
      inputs: the inputs that cost to read elsewhere -> the parameters that they are made from.
      homes: backward equation -> (the forward equations that read the parameter whose gradient it
        makes, bytes at stake).
    """

    num_layers: int
    spans: Mapping[int, LayerSpan]
    backward: Sequence[bool]
    duplicable: Sequence[bool]
    inputs: Mapping[Var, tuple[Var, ...]]
    homes: Mapping[int, tuple[tuple[int, ...], float]]


def place_backward(flow: Dataflow, placed: Placed) -> dict[int, LayerSpan] | None:
    """A layer for every backward equation that has none yet.

    Returns:
      The spans, or None if the backward scans over layers cannot be where they are.
    """
    free = [n for n, b in enumerate(placed.backward) if b and n not in placed.spans]
    bounds = _bounds(flow, placed, free)
    if bounds is None:
        return None
    program = _LinearProgram()
    largest = max((aval_bytes(v.aval) for v in flow.readers), default=0.0) or 1.0

    def price(var: Var) -> float:
        return max(aval_bytes(var.aval) / largest, SMALLEST_PRICE)

    for n in free:
        program.variable(n, *bounds[n])
    for n in free:
        for reader in flow.successors[n]:
            program.at_most(_reader(reader, placed), n)
    for var, readers in flow.readers.items():
        late = [r for r in readers if placed.backward[r]]
        if late:
            _price_value(flow, placed, program, var, late, price(var))
    for parameter, (held, late) in _parameter_reads(flow, placed).items():
        _price_distance(program, placed, held, late, PARAMETER_PRICE * (1.0 + price(parameter)))
    for number, (home, size) in placed.homes.items():
        spans = [placed.spans[n] for n in home]
        held = min(s.first for s in spans), max(s.last for s in spans)
        at_home = GRADIENT_PRICE * max(size / largest, SMALLEST_PRICE)
        _price_distance(program, placed, held, [number], at_home)
    layers = program.solve(placed.num_layers)
    return {n: LayerSpan(layers[n], layers[n]) for n in free}


def _reader(number: int, placed: Placed) -> int | float:
    """As reader of a backward value: a variable (int) or a fixed layer (float)."""
    return float(placed.spans[number].last) if number in placed.spans else number


def _producer(number: int, placed: Placed) -> int | float:
    return float(placed.spans[number].first) if number in placed.spans else number


def _bounds(
    flow: Dataflow, placed: Placed, free: Sequence[int]
) -> dict[int, tuple[int, int]] | None:
    """The layers each backward equation can be on, given those that are fixed."""
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for n in reversed(range(len(flow.eqns))):
        if not placed.backward[n]:
            continue
        least = max((low[r] for r in flow.successors[n]), default=0)
        if n in placed.spans:
            if placed.spans[n].first < least:
                return None
            least = placed.spans[n].last
        low[n] = least
    for n in range(len(flow.eqns)):
        if not placed.backward[n]:
            continue
        made = [high[o] for o in flow.operands[n] if placed.backward[o]]
        most = min(made, default=placed.num_layers - 1)
        if n in placed.spans:
            if placed.spans[n].last > most:
                return None
            most = placed.spans[n].first
        high[n] = most
    if any(low[n] > high[n] for n in free):
        return None
    return {n: (low[n], high[n]) for n in free}


def _price_value(
    flow: Dataflow,
    placed: Placed,
    program: _LinearProgram,
    var: Var,
    late: Sequence[int],
    price: float,
) -> None:
    number = flow.producer.get(var)
    if number is None:
        return  # a slice of the batch is free; parameters are priced on their own
    if placed.backward[number]:
        price = DUPLICABLE_PRICE if placed.duplicable[number] else price
        program.travel(_producer(number, placed), [_reader(r, placed) for r in late], price)
    elif not placed.duplicable[number]:
        _price_distance(program, placed, _held(flow, placed, var, number), late, price)


def _held(flow: Dataflow, placed: Placed, var: Var, number: int) -> Interval:
    span = placed.spans[number]
    readers = [r for r in flow.readers.get(var, ()) if not placed.backward[r]]
    return span.first, max([span.last, *(placed.spans[r].last for r in readers)])


def _price_distance(
    program: _LinearProgram,
    placed: Placed,
    held: Interval,
    late: Iterable[int],
    price: float,
) -> None:
    variables = [n for n in late if n not in placed.spans]
    if variables:
        program.above(variables, held[1], price)
        program.below(variables, held[0], price)


def _parameter_reads(flow: Dataflow, placed: Placed) -> dict[Var, tuple[Interval, list[int]]]:
    """Parameter -> (layers that hold it in the forward pass, its backward readers).

    A duplicable equation is cloned where it is read: its reader reads the parameters behind it.
    """
    roots: list[dict[Var, None]] = []
    readers: dict[Var, list[int]] = {}
    for n, eqn in enumerate(flow.eqns):
        read = [a for a in eqn.invars if not isinstance(a, Literal) and a in placed.inputs]
        own: dict[Var, None] = {p: None for a in read for p in placed.inputs[a]}
        for operand in flow.operands[n]:
            if placed.duplicable[operand]:
                own.update(roots[operand])
        roots.append(own)
        if not placed.duplicable[n]:
            for parameter in own:
                readers.setdefault(parameter, []).append(n)
    reads = {}
    for parameter, numbers in readers.items():
        early = [placed.spans[n] for n in numbers if not placed.backward[n]]
        late = [n for n in numbers if placed.backward[n]]
        if early and late:
            held = min(s.first for s in early), max(s.last for s in early)
            reads[parameter] = held, late
    return reads


@dataclass
class _LinearProgram:
    """Variables are equation numbers; a float stands for a fixed layer. Local to this module."""

    columns: dict[int, int] = field(default_factory=dict)
    bounds: list[tuple[float, float]] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    rows: list[tuple[int, int, float]] = field(default_factory=list)  # a - b <= bound

    def variable(self, number: int, low: int, high: int) -> None:
        self.columns[number] = self._column(low, high, 0.0)

    def _column(self, low: float, high: float, cost: float) -> int:
        self.bounds.append((low, high))
        self.costs.append(cost)
        return len(self.bounds) - 1

    def _range(self, end: int | float) -> tuple[float, float]:
        return (end, end) if isinstance(end, float) else self.bounds[self.columns[end]]

    def at_most(self, reader: int | float, producer: int | float) -> None:
        """reader <= producer."""
        if isinstance(reader, float) or isinstance(producer, float):
            return  # in the bounds
        if self._range(reader)[1] > self._range(producer)[0]:
            self.rows.append((self.columns[reader], self.columns[producer], 0.0))

    def travel(self, producer: int | float, readers: Sequence[int | float], price: float) -> None:
        """price × (producer − lowest reader)."""
        if not isinstance(producer, float):
            self.costs[self.columns[producer]] += price
        top = min(self._range(r)[1] for r in readers)  # the lowest reader is no higher
        open_ends = [
            self.columns[r] for r in readers if not isinstance(r, float) and self._range(r)[0] < top
        ]
        if len(open_ends) == 1 and self.bounds[open_ends[0]][1] == top:
            self.costs[open_ends[0]] -= price
        elif open_ends:
            low = min(self.bounds[column][0] for column in open_ends)
            lowest = self._column(low, top, -price)
            self.rows += [(lowest, column, 0.0) for column in open_ends]

    def above(self, numbers: Sequence[int], layer: int, price: float) -> None:
        """price × how far the highest of `numbers` is above `layer`."""
        outside = [n for n in numbers if self._range(n)[1] > layer]
        if outside:
            high = max(self._range(n)[1] for n in outside) - layer
            excess = self._column(0.0, high, price)
            for n in outside:
                self.rows.append((self.columns[n], excess, float(layer)))

    def below(self, numbers: Sequence[int], layer: int, price: float) -> None:
        """price × how far the lowest of `numbers` is below `layer`."""
        outside = [n for n in numbers if self._range(n)[0] < layer]
        if outside:
            low = min(self._range(n)[0] for n in outside)
            floor = self._column(low, float(layer), -price)
            for n in outside:
                self.rows.append((floor, self.columns[n], 0.0))

    def solve(self, num_layers: int) -> dict[int, int]:
        if num_layers == 1 or not self.columns:
            return dict.fromkeys(self.columns, 0)
        # scipy.optimize takes a third of a second to import, which reading a plan need not pay.
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix

        cost = np.array(self.costs)
        cost[list(self.columns.values())] -= TIE_PRICE
        matrix, bound = None, None
        if self.rows:
            left, right, limit = (np.array(x) for x in zip(*self.rows, strict=True))
            row = np.arange(len(self.rows))
            ones = np.ones(len(self.rows))
            matrix = coo_matrix(
                (
                    np.concatenate([ones, -ones]),
                    (np.concatenate([row, row]), np.concatenate([left, right])),
                ),
                shape=(len(self.rows), len(self.bounds)),
            ).tocsr()
            bound = limit
        result = linprog(
            cost, A_ub=matrix, b_ub=bound, bounds=np.array(self.bounds), method="highs-ds"
        )
        if result.x is None:
            raise AssertionError(f"a feasible and bounded program was not solved: {result.message}")
        return {n: round(float(result.x[c])) for n, c in self.columns.items()}
