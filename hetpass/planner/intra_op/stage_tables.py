"""The inter-op program's tables from solved layers: the best sharding of every range. No JAX.

Every layer kind is solved once per submesh shape, way to recompute and price of memory, and chained
over all ranges. What the analytic model guesses (`hetpass.cost.tables`) is replaced; the links
between groups are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetpass.cost.analytic import Assumptions
from hetpass.cost.layouts import ways
from hetpass.cost.logical_meshes import LinkedMesh, logical_meshes
from hetpass.cost.operations import Efficiency
from hetpass.cost.submeshes import submesh_sizes
from hetpass.cost.tables import CostTables, StageTable, canonical, group_rooms, link_tables
from hetpass.ir.cluster import Cluster
from hetpass.ir.devices import DeviceGroup, DeviceKind
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.operation_graph import Assignment, OperationGraph
from hetpass.planner.intra_op.boundary import (
    BoundaryTable,
    boundary_table,
    left_values,
    right_values,
)
from hetpass.planner.intra_op.chain import Chain, RangeSums, States, arrivals, chained
from hetpass.planner.intra_op.evaluate import measured
from hetpass.planner.intra_op.linear_program import Effort
from hetpass.planner.intra_op.pbqp import Floats
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.range_assignments import range_assignments
from hetpass.planner.intra_op.setting import Setting
from hetpass.planner.intra_op.shared_parameters import agreed


@dataclass(frozen=True)
class LayerGraphs:
    """A program for one number of microbatches.

    Attributes:
      graphs: one per layer kind.
      kinds: of every layer, in order.
    """

    graphs: tuple[OperationGraph, ...]
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class IntraOpOptions:
    """What is tabulated.

    Attributes:
      assumed: shares of peak figures.
      efficiency: of operations, where it is known better.
      recompute: the ways to recompute that stages may use.
      prices: of memory, as shares: at 1, saving all of a layer's memory is worth all of its time.
        Each gives tables of its own; 0 is the fastest whatever memory it takes.
      in_flight: microbatches whose residuals the price is for.
      sizes: numbers of devices; None: those that the analytic tables have.
      effort: of the solver.
    """

    assumed: Assumptions = field(default_factory=Assumptions)
    efficiency: Efficiency | None = None
    recompute: tuple[str, ...] = ("none", "full")
    prices: tuple[float, ...] = (0.0, 1.0)
    in_flight: int = 4
    sizes: tuple[int, ...] | None = None
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True, eq=False)
class SolvedTables:
    """Costs for the inter-op program, and the assignments behind them.

    Attributes:
      costs: as `planner.search` takes them.
      chains: per stage table.
    """

    costs: CostTables
    chains: tuple[Chain, ...]

    def assignments(self, table: int, first: int, end: int) -> tuple[Assignment, ...]:
        """How the layers first … end - 1 run in a stage of a table, as a plan has them."""
        return range_assignments(self.chains[table], first, end)


def intra_op_tables(
    layers: LayerGraphs,
    facts: ProgramFacts,
    cluster: Cluster,
    num_microbatches: int,
    options: IntraOpOptions = IntraOpOptions(),
    progress: Callable[[int, int], None] | None = None,
) -> SolvedTables:
    """Costs of every range of layers on every submesh, by solved assignments.

    Args:
      layers: the program, cut into this number of microbatches.
      facts: for what crosses between stages.
      progress: told how many meshes of the groups are solved, and of how many.
    """
    cluster = canonical(cluster)
    solver = _Solver(layers, num_microbatches, options)
    stages: list[StageTable] = []
    chains: list[Chain] = []
    places = [
        (index, group, mesh)
        for index, group in enumerate(cluster.groups)
        for devices in options.sizes or submesh_sizes(group)
        if devices <= group.num_devices
        for mesh in logical_meshes(group, devices)
    ]
    for done, (index, group, mesh) in enumerate(places, 1):
        for recompute in options.recompute:
            for table, chain in solver.tables(index, group, mesh, recompute):
                stages.append(table)
                chains.append(chain)
        if progress is not None:
            progress(done, len(places))
    examples = facts.batch_size // num_microbatches
    forward, backward, latency = link_tables(facts, cluster, examples)
    costs = CostTables(
        num_layers=len(layers.kinds),
        num_microbatches=num_microbatches,
        groups=group_rooms(cluster, options.assumed),
        stages=tuple(stages),
        link_forward_s=forward,
        link_backward_s=backward,
        link_latency_s=latency,
    )
    return SolvedTables(costs, tuple(chains))


class _Solver:
    """Solves each layer kind once per device kind, mesh, way to recompute and price."""

    def __init__(self, layers: LayerGraphs, num_microbatches: int, options: IntraOpOptions) -> None:
        self.layers, self.count, self.options = layers, num_microbatches, options
        self.chains: dict[tuple[DeviceKind, LinkedMesh, str], list[Chain]] = {}
        self.sums: dict[Chain, _Sums] = {}

    def tables(
        self, index: int, group: DeviceGroup, mesh: LinkedMesh, recompute: str
    ) -> list[tuple[StageTable, Chain]]:
        """One table per price of memory, those that are worth it."""
        key = group.kind, mesh, recompute
        if key not in self.chains:
            self.chains[key] = self.solved(group.kind, mesh, recompute)
        found = []
        for chain in self.chains[key]:
            if chain not in self.sums:
                self.sums[chain] = _summed(chain, recompute)
            found.append((self.table(index, mesh, recompute, self.sums[chain]), chain))
        return found

    def solved(self, kind: DeviceKind, mesh: LinkedMesh, recompute: str) -> list[Chain]:
        setting = Setting(
            mesh,
            kind,
            self.count,
            min(self.options.in_flight, self.count),
            recompute == "full",
            alone=False,
            assumed=self.options.assumed,
            efficiency=self.options.efficiency,
        )
        made = [program(graph, setting) for graph in self.layers.graphs]
        rate = 0.0  # seconds of a step per byte, of the fastest answers
        chains: list[Chain] = []
        prices = sorted(self.options.prices)
        for price in prices if mesh.devices > 1 else prices[:1]:
            own = agreed(made, price * rate, self.options.effort)
            tables = [boundary_table(m, price * rate, self.options.effort) for m in own]
            known = [table for table in tables if table is not None]
            if len(known) < len(tables):  # a number format that the kind lacks
                return []
            if not chains:
                rate = _rate(known)
            chain = chained(known, self.layers.kinds, self.options.effort)
            if not chains or not np.array_equal(chain.costs, chains[-1].costs):
                chains.append(chain)
        return chains

    def table(self, index: int, mesh: LinkedMesh, recompute: str, sums: _Sums) -> StageTable:
        launch = self.options.assumed.launch_s
        return StageTable(
            group=index,
            devices=mesh.devices,
            mesh=mesh.axes,
            recompute=recompute,
            forward_s=sums.forward_s + launch,
            backward_s=sums.backward_s + launch,
            once_s=sums.once_s,
            fixed_bytes=sums.fixed_bytes,
            activation_bytes=sums.activation_bytes,
        )


def _rate(tables: Sequence[BoundaryTable]) -> float:
    seconds = memory = 0.0
    for table in tables:
        left, right = np.unravel_index(int(table.costs.argmin()), table.costs.shape)
        choices = table.choices(int(left), int(right))
        seconds += table.made.seconds.cost(choices)
        memory += table.made.memory.cost(choices)
    return seconds / memory if memory else 0.0


@dataclass(frozen=True, eq=False)
class _Sums:
    """Per range [first, end], as a stage table has them."""

    forward_s: Floats
    backward_s: Floats
    once_s: Floats
    fixed_bytes: Floats
    activation_bytes: Floats


def _summed(chain: Chain, recompute: str) -> _Sums:
    made = [table.made for table in chain.tables]

    def measure(kind: int, left: int, right: int) -> Floats:
        own = made[kind]
        choices = chain.tables[kind].choices(left, right)
        priced = measured(own.flow, own.setting, own.assignment(choices))
        return np.array(
            [
                priced.forward_s,
                priced.backward_s,
                priced.once_s,
                priced.state_bytes,
                priced.residual_bytes,
                priced.gathered_bytes,
            ]
        )

    found = chain.added(measure, 6)
    forward, backward, once, state, residual, _ = np.moveaxis(found.sums, 2, 0)
    left, right = _at_ends(chain, found)
    fixed = state + found.largest[:, :, 5] + left.held_bytes + right.held_bytes
    if recompute == "full":
        fixed, held = fixed + residual, left.read_bytes
    else:
        held = residual
    return _Sums(forward + left.arrival_s, backward + right.arrival_s, once, fixed, held)


@dataclass(frozen=True, eq=False)
class _AtEnd:
    """Per range [first, end], of what crosses at one of its ends.

    Attributes:
      arrival_s: until what comes from other stages lies as it is wanted, per microbatch.
      held_bytes: on each device, of all that crosses.
      read_bytes: of what comes.
    """

    arrival_s: Floats
    held_bytes: Floats
    read_bytes: Floats


def _at_ends(chain: Chain, found: RangeSums) -> tuple[_AtEnd, _AtEnd]:
    kinds = np.array(chain.kinds)
    count = len(kinds)
    firsts = np.broadcast_to(kinds[:, None], (count, count + 1))
    lasts = np.broadcast_to(kinds[np.arange(count + 1) - 1], (count, count + 1))
    return (
        _at_end([_crossing(t, 0) for t in chain.tables], firsts, found.left),
        _at_end([_crossing(t, 1) for t in chain.tables], lasts, found.right),
    )


def _at_end(known: Sequence[Floats], kinds: States, states: States) -> _AtEnd:
    total = np.full((*states.shape, 3), np.inf)
    for kind, values in enumerate(known):
        at = (kinds == kind) & (states >= 0)
        total[at] = values[states[at]]
    return _AtEnd(*np.moveaxis(total, 2, 0))


def _crossing(table: BoundaryTable, side: int) -> Floats:
    """[state, (arrival in seconds per microbatch, bytes held, bytes read)]."""
    graph, setting = table.made.graph, table.made.setting
    states = (table.left, table.right)[side]
    rows = np.zeros((len(states), 3))
    rows[:, 0] = arrivals(table, side) / setting.num_microbatches
    for position, v in enumerate((left_values, right_values)[side](graph)):
        value = graph.values[v]
        parts = np.array([ways(state[position], setting.mesh.axes) for state in states])
        rows[:, 1] += value.size_bytes / parts
        if value.role in ("activation", "cotangent"):
            rows[:, 2] += value.size_bytes / parts
    return rows
