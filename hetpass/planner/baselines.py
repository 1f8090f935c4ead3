"""Other ways to plan, on the same facts and before the same judge. No JAX.

    even          one stage per group (while there are layers), layers by count
    single_group  the fastest group alone, planned as well as we can
    megatron      stages of equal size and equal layer counts over all devices, in the order of the
                  cluster; tensor parallel inside a host, data parallel across (Narayanan et al.,
                  SC 2021)
    alpa          all devices and links are taken for the average one, or for the slowest, and
                  the plan that is best then is priced truthfully (Zheng et al., OSDI 2022)
    harp          the groups in a fixed order, in-flight counts by H-1F1B's thresholds (EuroSys
                  2026)

Each searches the number of microbatches, the mesh and the recomputation for its own optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hetpass.cost.analytic import Submesh
from hetpass.cost.submeshes import submeshes
from hetpass.cost.tables import cost_tables
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.facts import Amount, LayerFacts, ProgramFacts, Seconds
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.planner.as_plan import as_plan
from hetpass.planner.evaluate import Evaluation, evaluate, objective_s
from hetpass.planner.inter_op import InterOpOptions, inter_op
from hetpass.planner.objective import ONE_F_ONE_B
from hetpass.planner.schedule_choice import uncounted
from hetpass.planner.search import SearchOptions, microbatch_numbers, search

_JUDGED = 4
_TOLERANCE = 1e-3
_ALIKE = "average"


@dataclass(frozen=True)
class Baseline:
    """A baseline's best plan.

    Attributes:
      name: one of `BASELINES`.
      evaluation: of its plan by our judge; None where it found none that fits.
    """

    name: str
    evaluation: Evaluation | None

    @property
    def step_s(self) -> float:
        """Simulated; infinite where nothing fits."""
        return self.evaluation.step_s if self.evaluation is not None else math.inf


def baseline(
    name: str, facts: ProgramFacts, cluster: Cluster, options: SearchOptions = SearchOptions()
) -> Baseline:
    """The plan of the baseline called `name`, judged.

    Args:
      options: the numbers of microbatches, recomputation and assumptions; the rest is the
        baseline's own.
    """
    plans, schedule = BASELINES[name](facts, cluster, options)
    assumed = options.tables.assumed
    ranked = sorted(
        ((objective_s(plan, facts, cluster, assumed), i) for i, plan in enumerate(plans)),
    )
    judged = [
        evaluate(plans[i], facts, cluster, assumed, schedule)
        for seconds, i in ranked[:_JUDGED]
        if math.isfinite(seconds)
    ]
    best = min(judged, key=lambda e: e.step_s, default=None)
    return Baseline(name, best if best is not None and math.isfinite(best.step_s) else None)


Planner = Callable[[ProgramFacts, Cluster, SearchOptions], tuple[Sequence[Plan], str]]
"""Plans to choose from, and the schedule they are judged under."""


def _single_group(
    facts: ProgramFacts, cluster: Cluster, options: SearchOptions
) -> tuple[Sequence[Plan], str]:
    plans = []
    for group in cluster.groups:
        try:
            plans.append(search(facts, Cluster((group,)), options).plan)
        except PlanError:
            continue
    return plans, options.schedule


def _harp(
    facts: ProgramFacts, cluster: Cluster, options: SearchOptions
) -> tuple[Sequence[Plan], str]:
    names = tuple(group.name for group in cluster.groups)
    try:
        found = search(facts, cluster, replace(options, order=names, schedule="h-1f1b"))
    except PlanError:
        return [], "h-1f1b"
    return [_unnoted(c.plan) for c in (found.best, *found.rejected)], "h-1f1b"


def _alpa(
    facts: ProgramFacts, cluster: Cluster, options: SearchOptions
) -> tuple[Sequence[Plan], str]:
    """The best plan for every number of microbatches, for all devices taken as the average one,
    and taken as the slowest: whichever is really better."""
    plans = []
    program = InterOpOptions(allowed=ONE_F_ONE_B, tolerance=_TOLERANCE)
    for believe, combine in ((averaged, _mean), (slowest, max)):
        believed, seen = believe(cluster), _seen(facts, cluster, combine)
        for m in microbatch_numbers(facts.batch_size, options.num_microbatches):
            tables = cost_tables(seen, believed, m, options.tables)
            found = inter_op(tables, program)
            if found is not None:
                plans.append(as_plan(tables, believed, found.best.picks, schedule="1f1b"))
    return plans, "1f1b"


def _seen(
    facts: ProgramFacts, cluster: Cluster, combine: Callable[[Sequence[float]], float]
) -> ProgramFacts:
    """The facts as who cannot tell kinds apart sees them: seconds of kinds and groups made one."""

    def seconds(layer: LayerFacts) -> dict[str, Seconds]:
        known = [
            layer.seconds.get(group.name) or layer.seconds.get(group.kind.name)
            for group in cluster.groups
        ]
        found = [k for k in known if k is not None]
        if not found:
            return {}
        parts = [
            Amount(
                combine([getattr(s, name).per_microbatch for s in found]),
                combine([getattr(s, name).per_example for s in found]),
            )
            for name in ("forward", "backward")
        ]
        return {_ALIKE: Seconds(*parts)}

    layers = tuple(replace(layer, seconds=seconds(layer)) for layer in facts.layers)
    return replace(facts, layers=layers)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def averaged(cluster: Cluster) -> Cluster:
    """The cluster as who cannot tell kinds apart sees it: every rate and link the mean."""
    total = cluster.num_devices

    def mean(values: Sequence[float]) -> float:
        groups = cluster.groups
        return sum(v * g.num_devices for v, g in zip(values, groups, strict=True)) / total

    return _alike(cluster, mean, _mean_link)


def slowest(cluster: Cluster) -> Cluster:
    """The cluster as if every device and link were as slow as the slowest one."""
    return _alike(cluster, min, _slowest_link)


def _alike(
    cluster: Cluster,
    of: Callable[[Sequence[float]], float],
    link_of: Callable[[Sequence[Link | None]], Link | None],
) -> Cluster:
    """The cluster with one kind of device and one kind of link.

    Memory is the smallest of all, so that the plan has a chance to fit. The groups keep their
    sizes, since a stage cannot lie across two of them.
    """
    groups = cluster.groups
    kinds = [group.kind for group in groups]
    common = [d for d in kinds[0].peak_flops if all(d in kind.peak_flops for kind in kinds)]
    kind = DeviceKind(
        _ALIKE,
        {dtype: of([kind.peak_flops[dtype] for kind in kinds]) for dtype in common},
        min(kind.memory_bytes for kind in kinds),
        of([kind.memory_bandwidth for kind in kinds]),
    )
    inside = link_of([g.intra_host for g in groups])
    across = link_of([g.inter_host for g in groups])
    pairs = [cluster.link(a.name, b.name) for i, a in enumerate(groups) for b in groups[i + 1 :]]
    same = tuple(
        DeviceGroup(g.name, kind, g.hosts, g.devices_per_host, inside, across) for g in groups
    )
    return Cluster(same, default_link=link_of(pairs))


def _mean_link(links: Sequence[Link | None]) -> Link | None:
    known = [link for link in links if link is not None]
    if not known:
        return None
    count = len(known)
    return Link(
        sum(link.latency_s for link in known) / count,
        sum(link.bandwidth for link in known) / count,
    )


def _slowest_link(links: Sequence[Link | None]) -> Link | None:
    known = [link for link in links if link is not None]
    if not known:
        return None
    return Link(max(link.latency_s for link in known), min(link.bandwidth for link in known))


def _unnoted(plan: Plan) -> Plan:
    """Without predictions, and without in-flight counts, which the baseline's schedule decides."""
    return replace(uncounted(plan), predictions={})


def _even(
    facts: ProgramFacts, cluster: Cluster, options: SearchOptions
) -> tuple[Sequence[Plan], str]:
    groups = [(group, group.num_devices) for group in cluster.groups]
    parts = [(g, tuple(range(n))) for g, n in groups[: facts.num_layers]]
    return list(_equal_layers(facts, parts, options)), "1f1b"


def _megatron(
    facts: ProgramFacts, cluster: Cluster, options: SearchOptions
) -> tuple[Sequence[Plan], str]:
    common = math.gcd(*(group.num_devices for group in cluster.groups))
    plans: list[Plan] = []
    for size in range(1, common + 1):
        if any(not _whole(group, size) for group in cluster.groups):
            continue
        parts = [
            (group, tuple(range(first, first + size)))
            for group in cluster.groups
            for first in range(0, group.num_devices, size)
        ]
        if len(parts) <= facts.num_layers:
            plans += _equal_layers(facts, parts, options)
    return plans, "1f1b"


def _whole(group: DeviceGroup, size: int) -> bool:
    """Whether parts of `size` devices cover the group without lying across hosts in pieces."""
    per_host = group.devices_per_host
    return group.num_devices % size == 0 and (per_host % size == 0 or size % per_host == 0)


def _equal_layers(
    facts: ProgramFacts,
    parts: Sequence[tuple[DeviceGroup, tuple[int, ...]]],
    options: SearchOptions,
) -> Iterator[Plan]:
    """A stage on each part with as many layers as every other, for all M, meshes, recomputation."""
    count = len(parts)
    cuts = [facts.num_layers * i // count for i in range(count + 1)]
    most_model = max(layer.most_tensor_parallel for layer in facts.layers)
    most_model = min(most_model, options.tables.most_model)
    if any(first == end for first, end in zip(cuts, cuts[1:], strict=False)):
        return
    for m in microbatch_numbers(facts.batch_size, options.num_microbatches):
        examples = facts.batch_size // m
        widths = sorted(
            {x.model for g, d in parts for x in submeshes(g, len(d), examples, most_model)}
        )
        for width in widths:
            arranged = [_arranged(g, d, examples, width) for g, d in parts]
            for recompute in options.tables.recompute:
                stages = tuple(
                    StagePlan(
                        cuts[i],
                        cuts[i + 1] - 1,
                        (Replica(g.name, d[: x.devices], x.axes),),
                        recompute=recompute,
                    )
                    for i, ((g, d), x) in enumerate(zip(parts, arranged, strict=True))
                )
                yield Plan((Pipeline(stages, m),))


def _arranged(group: DeviceGroup, devices: tuple[int, ...], examples: int, width: int) -> Submesh:
    """Tensor parallelism of `width` where the host allows; rows that divide the examples."""
    model = max(w for w in range(1, width + 1) if group.devices_per_host % w == 0)
    model = min(model, len(devices))
    rows = max(r for r in range(1, len(devices) // model + 1) if examples % r == 0)
    return Submesh(rows, model)


BASELINES: Mapping[str, Planner] = MappingProxyType(
    {
        "even": _even,
        "single_group": _single_group,
        "megatron": _megatron,
        "alpa": _alpa,
        "harp": _harp,
    }
)
"""By name."""
