"""Which region equations run in the backward task.

Dataflow cannot tell: the seed of a backward pass is a constant. The name stack can: everything that
transposition made stands under `transpose(`. Names decide for quality only; what depends on a
backward equation is backward too, whatever its name.

The linearized forward pass computes values that only the backward pass reads. Where that holds
fewer bytes between the two, such (cheap) equations are moved to the backward task: a minimum cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetpass._jax import JaxprEqn, name_stack
from hetpass.analysis.flops import DATA_MOVEMENT, ELEMENTWISE, REDUCTIONS, aval_bytes
from hetpass.frontend.dataflow import Dataflow, closed_forward, dataflow
from hetpass.ir.program import StepProgram


def backward_marks(program: StepProgram) -> tuple[bool, ...]:
    """One flag per region equation: made by transposition or recomputed, or depends on such."""
    recomputed = program.traced.recomputed
    seeds = [
        recomputed[source] or "transpose(" in name_stack(eqn)
        for eqn, source in zip(program.region.eqns, program.origin, strict=True)
    ]
    return tuple(closed_forward(dataflow(program.region), seeds))


def move_to_backward(
    flow: Dataflow, backward: Sequence[bool], duplicable: Sequence[bool]
) -> tuple[bool, ...]:
    """`backward` with those equations added whose move leaves fewer bytes to hold.

    Moved are only cheap equations that no forward equation needs, directly or not; nothing is
    computed twice. Of all ways to hold the fewest bytes, the one that moves the fewest equations.
    """
    movable = _movable(flow, backward)
    if not any(movable):
        return tuple(backward)
    network = _Network()
    for number in np.flatnonzero(movable).tolist():
        eqn = flow.eqns[number]
        for var in eqn.outvars:
            readers = flow.readers.get(var, ())
            if readers:
                held = 0.0 if duplicable[number] else aval_bytes(var.aval)
                value = network.node(var)
                network.edge(network.node(number), value, held)
                _read(network, value, readers, movable, backward)
                for reader in readers:
                    if movable[reader]:  # a forward reader needs a forward producer
                        network.edge(network.node(reader), network.node(number), np.inf)
        for var in eqn.invars:
            source = flow.producer.get(var) if not hasattr(var, "val") else None
            if source is None or movable[source] or backward[source] or var in network.nodes:
                continue  # inputs are delivered where they are needed
            value = network.node(var)
            held = 0.0 if duplicable[source] else aval_bytes(var.aval)
            network.edge(network.SOURCE, value, held)
            _read(network, value, flow.readers[var], movable, backward)
    late = network.sink_side()
    return tuple(
        bool(b or (movable[i] and network.node(i) in late)) for i, b in enumerate(backward)
    )


def _read(
    network: _Network,
    value: int,
    readers: Sequence[int],
    movable: Sequence[bool],
    backward: Sequence[bool],
) -> None:
    for reader in readers:
        if movable[reader]:
            network.edge(value, network.node(reader), np.inf)
        elif backward[reader]:
            network.edge(value, network.SINK, np.inf)


def _movable(flow: Dataflow, backward: Sequence[bool]) -> list[bool]:
    flags = [False] * len(flow.eqns)
    for number in reversed(range(len(flow.eqns))):
        eqn, readers = flow.eqns[number], flow.successors[number]
        flags[number] = (
            not backward[number]
            and bool(readers)
            and _is_cheap(eqn)
            and not any(v in flow.outvars for v in eqn.outvars)
            and all(backward[r] or flags[r] for r in readers)
        )
    return flags


def _is_cheap(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if eqn.effects or name == "hetpass_stage_boundary":
        return False
    return name in ELEMENTWISE or name in DATA_MOVEMENT or name in REDUCTIONS


class _Network:
    """A flow network under construction; local to `move_to_backward`."""

    SOURCE, SINK = 0, 1

    def __init__(self) -> None:
        self.nodes: dict[object, int] = {}
        self.edges: dict[tuple[int, int], float] = {}

    def node(self, key: object) -> int:
        return self.nodes.setdefault(key, len(self.nodes) + 2)

    def edge(self, start: int, end: int, capacity: float) -> None:
        self.edges[start, end] = self.edges.get((start, end), 0.0) + capacity

    def sink_side(self) -> set[int]:
        """The smallest sink side of a minimum cut: the nodes that still reach the sink."""
        # scipy.sparse takes a third of a second to import, which reading a plan need not pay.
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        size = len(self.nodes) + 2
        finite = [c for c in self.edges.values() if np.isfinite(c)]
        unlimited = 2**30
        unit = max(1.0, sum(finite) / 2**29)  # maximum_flow wants 32-bit integers
        rows, columns = (np.array(x) for x in zip(*self.edges, strict=True))
        capacity = np.array(
            [unlimited if c == np.inf else int(np.ceil(c / unit)) for c in self.edges.values()],
            dtype=np.int32,
        )
        graph = csr_matrix((capacity, (rows, columns)), shape=(size, size))
        flow = maximum_flow(graph, self.SOURCE, self.SINK).flow
        residual = (graph - flow).tocsr()
        residual.data = (residual.data > 0).astype(np.int32)
        residual.eliminate_zeros()
        reaching = breadth_first_order(
            residual.T.tocsr(), self.SINK, directed=True, return_predecessors=False
        )
        return set(reaching.tolist())
