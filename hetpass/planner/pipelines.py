"""The price of a plan of several parallel pipelines, with the sum of their gradients. No JAX.

Every pipeline takes microbatches of its own and may cut the layers as it likes; its stages are rows
of one group (`cost.layer_costs`), or several such rows that share every microbatch. A pipeline's
transfers are streams between hosts, which share what a host's network attains.

When all pipelines are done, the gradient of a layer is summed over all that hold it: inside each
host first, then in a ring over hosts (Patarasuk and Yuan 2009). The devices of a row have rings
side by side, each for its share of the layer; the rows of a host that hold the same layer share
theirs. Rings of layers with the same holders are one. A row does one ring after another; the rings
of a host's rows together get no more than the host attains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hetpass.cost.layer_costs import LayerCosts, RowCosts
from hetpass.cost.network import Network
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster, DeviceGroup
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.ir.quantities import counted, spelled
from hetpass.ir.schedule import Schedule
from hetpass.planner.judge import FAMILY
from hetpass.schedules.costs import LinkCost, PipelineCosts, StageCost
from hetpass.schedules.make import make_schedule, policy
from hetpass.simulator import makespan_s

Host = tuple[str, int]
"""A group and one of its hosts."""


@dataclass(frozen=True)
class PipelinePrice:
    """One pipeline.

    Attributes:
      compute_s: until its last backward task, simulated.
      in_flight: microbatches per stage.
      stage_s: forward and backward of a microbatch, per stage.
      held_bytes: on each device of a stage.
    """

    compute_s: float
    in_flight: tuple[int, ...]
    stage_s: tuple[float, ...]
    held_bytes: tuple[float, ...]


@dataclass(frozen=True)
class PlanPrice:
    """A plan.

    Attributes:
      step_s: all of it; infinite if the plan cannot run.
      compute_s: the slowest pipeline.
      sync_s: summing gradients.
      update_s: the optimizer, on the slowest stage.
      peak_bytes: on the fullest device, with what the runtime holds.
      pipelines: in the order of the plan.
      violations: sentences; none if the plan can run.
    """

    step_s: float
    compute_s: float
    sync_s: float
    update_s: float
    peak_bytes: float
    pipelines: tuple[PipelinePrice, ...]
    violations: tuple[str, ...]


@dataclass(frozen=True)
class Market:
    """What prices depend on beside the plan.

    Attributes:
      costs: of layers.
      network: of messages.
      cluster: whose groups the plan names.
      batch_size: examples in a step.
      overlaps: whether stages compute while they send and receive.
      sync_overhead_s: of summing gradients over hosts, beyond the rings: flattening them, and
        waiting for each other.
    """

    costs: LayerCosts
    network: Network
    cluster: Cluster
    batch_size: int
    overlaps: bool = False
    sync_overhead_s: float = 0.0


class _Held(NamedTuple):
    """A layer on a host: rows that hold it, and the fewest devices of one of them."""

    copies: int
    ways: int


_Holders = tuple[tuple[Host, _Held], ...]


class _Ring(NamedTuple):
    """Seconds of a ring on a row that holds its layers, and of its bytes at a host's full rate."""

    row_s: float
    host_s: float


def price(plan: Plan, market: Market) -> PlanPrice:
    """Seconds of a step and bytes of its devices.

    Raises:
      PlanError: the plan is of another cluster, or of other layers.
    """
    return Pricer(market).price(plan)


class Pricer:
    """Prices plans, and remembers what their parts came to."""

    def __init__(self, market: Market) -> None:
        self.market = market
        self.groups = {group.name: group for group in market.cluster.groups}
        self._rows: dict[tuple[str, int, float], RowCosts | None] = {}
        self._played: dict[tuple[PipelineCosts, tuple[int, ...], int], float] = {}
        self._schedules: dict[tuple[tuple[int, ...], int], Schedule] = {}

    def price(self, plan: Plan) -> PlanPrice:
        """As the function `price`."""
        plan.check(self.market.cluster, self.market.costs.num_layers)
        if self.market.batch_size % plan.num_microbatches:
            raise PlanError(
                "HP-PLAN-MICROBATCHES",
                f"a batch of {self.market.batch_size} cannot be cut into {plan.num_microbatches} "
                "equal microbatches",
                ways_out=["let the pipelines' microbatches add up to a divisor of the batch"],
            )
        return _Pricing(plan, self).result()

    def row(self, group: str, ways: int, examples: float) -> RowCosts | None:
        """Costs of layers on a row of a group."""
        key = group, ways, examples
        if key not in self._rows:
            self._rows[key] = self.market.costs.row(self.groups[group], ways, examples)
        return self._rows[key]

    def played_s(
        self, costs: PipelineCosts, in_flight: tuple[int, ...], microbatches: int
    ) -> float:
        """Seconds of a pipeline under 1F1B."""
        key = costs, in_flight, microbatches
        if key not in self._played:
            self._played[key] = makespan_s(self._schedule(in_flight, microbatches), costs)
        return self._played[key]

    def _schedule(self, in_flight: tuple[int, ...], microbatches: int) -> Schedule:
        key = in_flight, microbatches
        if key not in self._schedules:
            self._schedules[key] = make_schedule(
                "1f1b",
                num_stages=len(in_flight),
                num_microbatches=microbatches,
                in_flight=in_flight,
            )
        return self._schedules[key]


class _Pricing:
    """The state of one plan's pricing: pipelines that are alike are looked at once."""

    def __init__(self, plan: Plan, pricer: Pricer) -> None:
        self.plan, self.pricer, self.market = plan, pricer, pricer.market
        self.examples = self.market.batch_size // plan.num_microbatches
        self.groups = pricer.groups
        self.streams = self._streams()
        self.violations: list[str] = []

    def result(self) -> PlanPrice:
        known: dict[object, PipelinePrice] = {}
        prices = []
        for index, pipeline in enumerate(self.plan.pipelines):
            alike = self._signature(pipeline)
            if alike not in known:
                known[alike] = self._pipeline(index, pipeline)
            prices.append(known[alike])
        compute_s = max(p.compute_s for p in prices)
        sync_s, update_s = (0.0, 0.0) if self.violations else (self._sync_s(), self._update_s())
        step_s = math.inf if self.violations else compute_s + sync_s + update_s
        peak = max(
            held + self._reserved(replica)
            for p, pipeline in zip(prices, self.plan.pipelines, strict=True)
            for held, stage in zip(p.held_bytes, pipeline.stages, strict=True)
            for replica in stage.replicas
        )
        return PlanPrice(
            step_s, compute_s, sync_s, update_s, peak, tuple(prices), tuple(self.violations)
        )

    # -- pipelines ----------------------------------------------------------------------------

    def _pipeline(self, index: int, pipeline: Pipeline) -> PipelinePrice:
        stages: list[StageCost] = []
        held: list[tuple[float, float]] = []
        m = pipeline.num_microbatches
        for number, stage in enumerate(pipeline.stages):
            found = [self._stage(stage, replica) for replica in stage.replicas]
            if any(cost is None for cost in found):
                self.violations.append(
                    f"pipeline {index}: nobody knows how stage {number} runs with "
                    f"{counted(self.examples, 'example')}"
                )
                return PipelinePrice(math.inf, (), (), (0.0,) * len(pipeline.stages))
            costs = [cost for cost in found if cost is not None]
            stages.append(
                StageCost(
                    max(c.forward_s for c in costs),
                    max(c.backward_s for c in costs),
                    activation_bytes=max(c.activation_bytes for c in costs),
                    fixed_bytes=max(c.fixed_bytes for c in costs),
                )
            )
            held.append((stages[-1].fixed_bytes, stages[-1].activation_bytes))
        links = [self._link(a, b) for a, b in pairwise(pipeline.stages)]
        costs_of = PipelineCosts(tuple(stages), tuple(links))
        rooms = self._rooms(index, pipeline, held)
        played = {
            counts: self.pricer.played_s(costs_of, counts, m)
            for counts in self._in_flight(pipeline, rooms, costs_of)
        }
        counts = min(played, key=lambda counts: (played[counts], counts))
        used = tuple(f + n * a for (f, a), n in zip(held, counts, strict=True))
        seconds = tuple(s.forward_s + s.backward_s for s in stages)
        return PipelinePrice(played[counts], counts, seconds, used)

    def _rooms(
        self, index: int, pipeline: Pipeline, held: Sequence[tuple[float, float]]
    ) -> list[int]:
        """Per stage, the most microbatches in flight that fit, at least one."""
        rooms = []
        for number, (stage, (fixed, each)) in enumerate(zip(pipeline.stages, held, strict=True)):
            usable = min(self._usable(replica) for replica in stage.replicas)
            fitting = pipeline.num_microbatches
            if each:
                fitting = min(fitting, math.floor((usable - fixed) / each))
            if fitting < 1 or fixed > usable:
                self.violations.append(
                    f"pipeline {index}: stage {number} needs "
                    f"{spelled(fixed + each, 'bytes', 4)} on each device and has "
                    f"{spelled(usable, 'bytes', 4)}"
                )
            rooms.append(max(1, fitting))
        return rooms

    def _in_flight(
        self, pipeline: Pipeline, rooms: Sequence[int], costs: PipelineCosts
    ) -> set[tuple[int, ...]]:
        """What to choose from: the plan's own counts, else those of 1F1B, and, where transfers
        overlap with compute, of its relatives that hide them; all cut down to what fits."""
        m, depth = pipeline.num_microbatches, len(pipeline.stages)
        own = [stage.in_flight for stage in pipeline.stages]
        given = tuple(count for count in own if count is not None)
        names = FAMILY if self.market.overlaps else FAMILY[:1]
        wanted = [given]
        if len(given) < depth:
            wanted = [policy(name, costs=costs).counts(depth, m) for name in names]
        return {tuple(itertools.accumulate(map(min, counts, rooms), min)) for counts in wanted}

    def _stage(self, stage: StagePlan, replica: Replica) -> StageCost | None:
        row = self._row(replica, self._share(stage, replica))
        if row is None:
            return None
        layers = slice(stage.first_layer, stage.last_layer + 1)
        forward_s = float(row.forward_s[layers].sum())
        backward_s = float(row.backward_s[layers].sum())
        held_bytes = float(row.held_bytes[layers].sum())
        fixed_bytes = float(row.fixed_bytes[layers].sum())
        if stage.recompute == "full":  # one microbatch's activations at a time, else inputs
            backward_s += forward_s
            fixed_bytes += held_bytes
            before = stage.first_layer - 1
            held_bytes = float(row.output_bytes[before]) if stage.first_layer else 0.0
        return StageCost(
            forward_s, backward_s, activation_bytes=held_bytes, fixed_bytes=fixed_bytes
        )

    def _share(self, stage: StagePlan, replica: Replica) -> float:
        """Examples of a microbatch on one row."""
        return self.examples / sum(r.axis_size("data") for r in stage.replicas)

    def _row(self, replica: Replica, share: float) -> RowCosts | None:
        ways = len(replica.devices) // replica.axis_size("data")
        return self.pricer.row(replica.group, ways, share)

    def _usable(self, replica: Replica) -> float:
        return self.market.costs.usable_bytes(self.groups[replica.group])

    def _reserved(self, replica: Replica) -> float:
        """What the runtime holds on a device."""
        return self.groups[replica.group].kind.memory_bytes - self._usable(replica)

    # -- transfers ----------------------------------------------------------------------------

    def _hosts(self, replica: Replica) -> tuple[Host, ...]:
        per_host = self.groups[replica.group].devices_per_host
        return tuple(sorted({(replica.group, d // per_host) for d in replica.devices}))

    def _rows_on_a_host(self, replica: Replica) -> int:
        return max(1, replica.axis_size("data") // len(self._hosts(replica)))

    def _crosses(self, one: StagePlan, other: StagePlan) -> bool:
        """Whether a transfer leaves the host: all but stages on one and the same host."""
        hosts = {host for stage in (one, other) for r in stage.replicas for host in self._hosts(r)}
        return len(hosts) > 1

    def _streams(self) -> Mapping[Host, int]:
        """Per host, how many rows send to other hosts or receive from them."""
        counts: dict[Host, int] = {}
        for pipeline in self.plan.pipelines:
            stages = pipeline.stages
            for number, stage in enumerate(stages):
                neighbours = [stages[i] for i in (number - 1, number + 1) if 0 <= i < len(stages)]
                if any(self._crosses(stage, other) for other in neighbours):
                    for replica in stage.replicas:
                        for host in self._hosts(replica):
                            counts[host] = counts.get(host, 0) + self._rows_on_a_host(replica)
        return counts

    def _link(self, one: StagePlan, other: StagePlan) -> LinkCost:
        """The slowest of the streams that carry a microbatch from stage to stage.

        Both directions are alike: an activation, and its gradient. Where the stages have unlike
        numbers of rows, the rows with the larger share take it in several messages, one after the
        other.
        """
        slowest_s = 0.0
        for a in one.replicas:
            mine = self._share(one, a)
            row = self._row(a, mine)
            if row is None:
                continue
            sent = float(row.output_bytes[one.last_layer])
            for b in other.replicas:
                most = max(1.0, self._share(other, b) / mine)
                slowest_s = max(slowest_s, self._stream_s(a, b, sent * most))
        return LinkCost(slowest_s, slowest_s, overlaps=self.market.overlaps)

    def _stream_s(self, a: Replica, b: Replica, size_bytes: float) -> float:
        network = self.market.network
        hosts_a, hosts_b = self._hosts(a), self._hosts(b)
        ends = self.groups[a.group], self.groups[b.group]
        if hosts_a == hosts_b and len(hosts_a) == 1:
            return network.inside_s(ends[0], size_bytes)
        streams = max(self.streams.get(host, 1) for host in (*hosts_a, *hosts_b))
        return network.stream_s(*ends, size_bytes, streams)

    def _signature(self, pipeline: Pipeline) -> object:
        """What tells a pipeline's price: not which devices of a group, but how they lie."""
        parts: list[object] = [pipeline.num_microbatches]
        before: StagePlan | None = None
        for stage in pipeline.stages:
            rows = tuple((r.group, r.mesh, self._loads(r)) for r in stage.replicas)
            near = before is not None and not self._crosses(before, stage)
            parts.append(
                (stage.first_layer, stage.last_layer, stage.recompute, stage.in_flight, rows, near)
            )
            before = stage
        return tuple(parts)

    def _loads(self, replica: Replica) -> tuple[int, ...]:
        return tuple(self.streams.get(host, 0) for host in self._hosts(replica))

    # -- once per step ------------------------------------------------------------------------

    def _update_s(self) -> float:
        seconds = 0.0
        for stage, replica in self._placed():
            row = self._row(replica, self._share(stage, replica))
            if row is not None:
                layers = slice(stage.first_layer, stage.last_layer + 1)
                seconds = max(seconds, float(row.update_s[layers].sum()))
        return seconds

    def _placed(self) -> list[tuple[StagePlan, Replica]]:
        return [
            (stage, replica)
            for pipeline in self.plan.pipelines
            for stage in pipeline.stages
            for replica in stage.replicas
        ]

    def _sync_s(self) -> float:
        """The busiest row, or the busiest host."""
        rings, ring_of = self._rings()
        seconds = [self._ring(holders, size) for holders, size in rings]
        copies = [{host: held.copies for host, held in holders} for holders, _ in rings]
        rows = {
            (host, tuple(sorted(set(ring_of[stage.first_layer : stage.last_layer + 1]))))
            for stage, replica in self._placed()
            for host in self._hosts(replica)
        }
        longest_s = max(
            math.fsum(
                seconds[ring].row_s + self._gather_s(host, copies[ring][host], rings[ring][1])
                for ring in own
            )
            for host, own in sorted(rows)
        )
        host_s: dict[Host, float] = {}
        for (holders, _), ring in zip(rings, seconds, strict=True):
            for host, _ in holders:
                host_s[host] = host_s.get(host, 0.0) + ring.host_s
        crosses = any(ring.row_s > 0 for ring in seconds)
        overhead_s = self.market.sync_overhead_s if crosses else 0.0
        return max(longest_s, *host_s.values()) + overhead_s

    def _rings(self) -> tuple[list[tuple[_Holders, float]], list[int]]:
        """Sets of hosts with the bytes of the layers that they hold; per layer, which set."""
        places: dict[_Holders, int] = {}
        sizes: list[float] = []
        ring_of = []
        for key, size in self._holders():
            ring = places.setdefault(key, len(places))
            if ring == len(sizes):
                sizes.append(0.0)
            sizes[ring] += size
            ring_of.append(ring)
        return list(zip(places, sizes, strict=True)), ring_of

    def _holders(self) -> list[tuple[_Holders, float]]:
        """Per layer, the hosts that hold it, and the bytes of its whole gradient."""
        layers = self.market.costs.num_layers
        held_by: list[dict[Host, _Held]] = [{} for _ in range(layers)]
        size_bytes = [0.0] * layers
        for stage, replica in self._placed():
            row = self._row(replica, self._share(stage, replica))
            if row is None:
                continue
            ways = len(replica.devices) // replica.axis_size("data")
            hosts, rows = self._hosts(replica), self._rows_on_a_host(replica)
            for layer in range(stage.first_layer, stage.last_layer + 1):
                size = float(row.gradient_bytes[layer]) * ways
                size_bytes[layer] = max(size_bytes[layer], size)
                for host in hosts:
                    before = held_by[layer].get(host, _Held(0, ways))
                    held_by[layer][host] = _Held(before.copies + rows, min(before.ways, ways))
        keys = [tuple(sorted(held.items())) for held in held_by]
        return list(zip(keys, size_bytes, strict=True))

    def _ring(self, holders: _Holders, size_bytes: float) -> _Ring:
        count = len(holders)
        if count == 1 or size_bytes == 0:
            return _Ring(0.0, 0.0)
        names = [name for (name, _), _ in holders]
        pairs: list[tuple[DeviceGroup, DeviceGroup]] = [
            (self.groups[a], self.groups[b])
            for a in sorted(set(names))
            for b in sorted(set(names))
            if a < b or (a == b and names.count(a) > 1)
        ]
        ways = min(held.ways for _, held in holders)
        most = [min(a.devices_per_host, b.devices_per_host) for a, b in pairs]
        rate = self.market.network.ring_rate
        row = min(rate(a, b, size_bytes, ways) for a, b in pairs)
        host = min(rate(a, b, size_bytes, n) for (a, b), n in zip(pairs, most, strict=True))
        sent = 2 * (count - 1) / count * size_bytes
        return _Ring(sent / row, sent / host)

    def _gather_s(self, host: Host, copies: int, size_bytes: float) -> float:
        """Summing the copies inside a host, and handing the sum back."""
        if copies == 1 or size_bytes == 0:
            return 0.0
        rate = self.market.network.inside_rate(self.groups[host[0]], copies, size_bytes)
        return 2 * (copies - 1) / copies * size_bytes / rate
