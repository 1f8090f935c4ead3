"""What another cluster would give: groups and links added, removed, replaced. No JAX.

    changes = [
        AddGroup(DeviceGroup("new", find_kind("H100-80"), 1, 8, inside)),
        RemoveGroup("old"),
        SetLink("fast", "new", Link(50e-6, 12.5e9)),
    ]
    prices = Prices({"H100-80": 2.5, "V100-16": 0.8}, tokens_per_example=1024)
    print(what_if(facts, cluster, changes, prices=prices))

Both clusters are planned anew; nothing is carried over from one to the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetpass.errors import ClusterError, PlanError
from hetpass.ir.cluster import Cluster
from hetpass.ir.devices import READER, DeviceGroup, Link
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import spelled
from hetpass.ir.records import nearest, shown
from hetpass.planner.evaluate import Evaluation, evaluate
from hetpass.planner.search import SearchOptions, search

_HOUR_S = 3600.0
_MILLION = 1e6


@dataclass(frozen=True)
class AddGroup:
    """One more group, and its links to groups that are there.

    Attributes:
      links: by group name; the cluster's default link for the others.
    """

    group: DeviceGroup
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class RemoveGroup:
    """A group goes, and its links with it."""

    name: str


@dataclass(frozen=True)
class ReplaceGroup:
    """Another group in the place of one, with its links; it may be called otherwise."""

    name: str
    group: DeviceGroup


@dataclass(frozen=True)
class SetLink:
    """Another link between two groups."""

    first: str
    second: str
    link: Link


Change = AddGroup | RemoveGroup | ReplaceGroup | SetLink


@dataclass(frozen=True)
class Prices:
    """What devices cost, and what an example is worth counting as.

    Attributes:
      per_device_hour: by group name, or else by device kind, in any currency.
      tokens_per_example: for figures per token; None: figures are per example.
    """

    per_device_hour: Mapping[str, float] = field(default_factory=dict, hash=False)
    tokens_per_example: int | None = None

    def __post_init__(self) -> None:
        for name, price in self.per_device_hour.items():
            if not (math.isfinite(READER.number(price)) and price >= 0):
                READER.refuse(
                    "VALUE", f"a price of zero or more is needed, not {shown(price)}", name
                )

    def per_hour(self, cluster: Cluster) -> float | None:
        """Of the whole cluster, idle devices too; None where a price is not known."""
        total = 0.0
        for group in cluster.groups:
            own = self.per_device_hour.get(group.name)
            price = self.per_device_hour.get(group.kind.name) if own is None else own
            if price is None:
                return None
            total += price * group.num_devices
        return total


@dataclass(frozen=True)
class Outcome:
    """A cluster, planned.

    Attributes:
      cluster: what was planned for.
      evaluation: of the plan; None where nothing fits.
      refusal: why nothing fits; None where something does.
      units_per_step: tokens, or examples, in a step; `unit` says which.
      price_per_hour: of the cluster; None where it is not known.
    """

    cluster: Cluster
    evaluation: Evaluation | None
    refusal: PlanError | None
    units_per_step: float
    unit: str
    price_per_hour: float | None

    @property
    def plan(self) -> Plan | None:
        return self.evaluation.plan if self.evaluation is not None else None

    @property
    def step_s(self) -> float:
        """Infinite where nothing fits."""
        return self.evaluation.step_s if self.evaluation is not None else math.inf

    @property
    def units_per_s(self) -> float:
        """Tokens, or examples, per second."""
        return self.units_per_step / self.step_s

    @property
    def fullest_bytes(self) -> tuple[float, float]:
        """Held and allowed, on a device of the fullest stage; zeros without a plan."""
        if self.evaluation is None:
            return 0.0, 0.0
        rows = [(s.fixed_bytes + s.activation_bytes, s.limit_bytes) for s in self.evaluation.stages]
        return max(rows, key=lambda row: row[0] / row[1])

    @property
    def idle_devices(self) -> int:
        used = sum(s.devices for s in self.evaluation.stages) if self.evaluation is not None else 0
        return self.cluster.num_devices - used

    @property
    def price_per_million(self) -> float | None:
        """Of a million tokens, or examples."""
        if self.price_per_hour is None or self.evaluation is None:
            return None
        return self.price_per_hour / _HOUR_S / self.units_per_s * _MILLION


@dataclass(frozen=True)
class WhatIf:
    """Before and after."""

    before: Outcome
    after: Outcome

    @property
    def speedup(self) -> float:
        """How many times as fast; NaN where nothing fits either way."""
        return self.before.step_s / self.after.step_s

    def __str__(self) -> str:
        pairs = [(name, *(of(o) for o in (self.before, self.after))) for name, of in _ROWS]
        rows = [("", "before", "after"), *(row for row in pairs if any(row[1:]))]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if math.isfinite(self.before.step_s) and math.isfinite(self.after.step_s):
            lines.append(f"{self.speedup:.3g} times as fast")
        for outcome in (self.before, self.after):
            if outcome.refusal is not None:
                lines.append(str(outcome.refusal))
        return "\n".join(lines)


def what_if(
    facts: ProgramFacts,
    cluster: Cluster,
    changes: Sequence[Change],
    options: SearchOptions = SearchOptions(),
    prices: Prices = Prices(),
) -> WhatIf:
    """The program planned for the cluster as it is, and as it would be.

    Raises:
      ClusterError: the changes ask for groups that are not there, or leave something without a
        link.
    """
    return WhatIf(
        outcome(facts, cluster, options, prices),
        outcome(facts, changed(cluster, changes), options, prices),
    )


def outcome(
    facts: ProgramFacts,
    cluster: Cluster,
    options: SearchOptions = SearchOptions(),
    prices: Prices = Prices(),
) -> Outcome:
    """One cluster, planned and priced; a refusal where nothing fits."""
    tokens = prices.tokens_per_example
    evaluation, refusal = None, None
    try:
        found = search(facts, cluster, options)
        evaluation = evaluate(found.plan, facts, cluster, options.tables.assumed)
    except PlanError as error:
        refusal = error
    return Outcome(
        cluster,
        evaluation,
        refusal,
        float(facts.batch_size * (tokens or 1)),
        "examples" if tokens is None else "tokens",
        prices.per_hour(cluster),
    )


def changed(cluster: Cluster, changes: Sequence[Change]) -> Cluster:
    """The cluster after the changes, one after another.

    Raises:
      ClusterError: as `what_if`.
    """
    for change in changes:
        cluster = _after(cluster, change)
    return cluster


def _after(cluster: Cluster, change: Change) -> Cluster:
    groups, links = list(cluster.groups), dict(cluster.links)
    if isinstance(change, AddGroup):
        own = {(name, change.group.name): link for name, link in change.links.items()}
        return Cluster((*groups, change.group), {**links, **own}, cluster.default_link)
    if isinstance(change, SetLink):
        first, second = cluster.group(change.first).name, cluster.group(change.second).name
        links.pop((second, first), None)
        return replace(cluster, links={**links, (first, second): change.link})
    place = groups.index(cluster.group(change.name))
    if isinstance(change, ReplaceGroup):
        names = {change.name: change.group.name}
        renamed = {(names.get(a, a), names.get(b, b)): link for (a, b), link in links.items()}
        groups[place] = change.group
        return Cluster(tuple(groups), renamed, cluster.default_link)
    del groups[place]
    if not groups:
        raise ClusterError(
            "HP-CLUSTER-EMPTY",
            f"{change.name!r} is the last group of the cluster",
            ways_out=nearest(change.name, ()) or ["replace it, or add another one first"],
        )
    kept = {pair: link for pair, link in links.items() if change.name not in pair}
    return Cluster(tuple(groups), kept, cluster.default_link)


def _memory(outcome: Outcome) -> str:
    held, limit = outcome.fullest_bytes
    return f"{spelled(held, 'bytes')} of {spelled(limit, 'bytes')}" if limit else ""


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _fits(outcome: Outcome, text: str) -> str:
    return text if outcome.evaluation is not None else "nothing fits"


_ROWS = (
    ("devices", lambda o: str(o.cluster.num_devices)),
    ("idle devices", lambda o: str(o.idle_devices) if o.idle_devices else ""),
    ("step", lambda o: _fits(o, spelled(o.step_s, "time"))),
    ("per second", lambda o: _fits(o, f"{o.units_per_s:.4g} {o.unit}")),
    ("fullest device", _memory),
    ("price per hour", lambda o: _money(o.price_per_hour)),
    ("price per million", lambda o: _money(o.price_per_million)),
)
