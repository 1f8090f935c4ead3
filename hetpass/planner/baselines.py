"""Other ways to plan, on the same facts and before the same judge. No JAX.

    even          one stage per group (while there are layers), layers by count
    single_group  the fastest group alone, planned as well as we can
    megatron      stages of equal size and equal layer counts over all devices, in the order of the
                  cluster; tensor parallel inside a host, data parallel across (Narayanan et al.,
                  SC 2021)
    alpa          all devices and links are taken for the average one, and the plan that is best
                  then is priced truthfully (Zheng et al., OSDI 2022)
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
from hetpass.errors import PlanError
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.planner.evaluate import Evaluation, evaluate, objective_s
from hetpass.planner.schedule_choice import uncounted
from hetpass.planner.search import SearchOptions, microbatch_numbers, search

_JUDGED = 4


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
    plans = []
    for m in microbatch_numbers(facts.batch_size, options.num_microbatches):
        one = replace(options, order=names, schedule="h-1f1b", num_microbatches=(m,))
        try:
            plans.append(_unnoted(search(facts, cluster, one).plan))
        except PlanError:
            continue
    return plans, "h-1f1b"


def _alpa(
    facts: ProgramFacts, cluster: Cluster, options: SearchOptions
) -> tuple[Sequence[Plan], str]:
    average = averaged(cluster)
    plans = []
    for m in microbatch_numbers(facts.batch_size, options.num_microbatches):
        one = replace(options, schedule="1f1b", num_microbatches=(m,))
        try:
            found = search(facts, average, one)
        except PlanError:
            continue
        candidates = (found.best, *found.rejected)
        plans += [_unnoted(candidate.plan) for candidate in candidates[:1]]
    return plans, "1f1b"


def averaged(cluster: Cluster) -> Cluster:
    """The cluster as who cannot tell kinds apart sees it: every rate and link the mean.

    Memory is the smallest of all, so that the plan has a chance to fit. The groups keep their
    sizes, since a stage cannot lie across two of them.
    """
    groups, total = cluster.groups, cluster.num_devices

    def mean(of: Callable[[DeviceGroup], float]) -> float:
        return sum(of(group) * group.num_devices for group in groups) / total

    def rate(dtype: str) -> float:
        return mean(lambda group: group.kind.peak_flops[dtype])

    dtypes = groups[0].kind.peak_flops
    common = [d for d in dtypes if all(d in group.kind.peak_flops for group in groups)]
    kind = DeviceKind(
        "average",
        {dtype: rate(dtype) for dtype in common},
        min(group.kind.memory_bytes for group in groups),
        mean(lambda group: group.kind.memory_bandwidth),
    )
    inside = _mean_link([g.intra_host for g in groups])
    across = _mean_link([g.inter_host for g in groups])
    pairs = [cluster.link(a.name, b.name) for i, a in enumerate(groups) for b in groups[i + 1 :]]
    same = tuple(
        DeviceGroup(g.name, kind, g.hosts, g.devices_per_host, inside, across) for g in groups
    )
    return Cluster(same, default_link=_mean_link(pairs))


def _mean_link(links: Sequence[Link | None]) -> Link | None:
    known = [link for link in links if link is not None]
    if not known:
        return None
    count = len(known)
    return Link(
        sum(link.latency_s for link in known) / count,
        sum(link.bandwidth for link in known) / count,
    )


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
