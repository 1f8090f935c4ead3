"""From measured figures to the planner's inputs, a cluster and facts that say them. No JAX.

The cost model takes shares of nominal figures (`Assumptions`). A measured rate is what a device
really does, so the nominal figure is set to what gives that rate under the model's assumptions:
every other part of the planner then works as it does without a profile.
"""

from __future__ import annotations

from dataclasses import replace

from hetpass.cost.analytic import Assumptions
from hetpass.ir.cluster import Cluster
from hetpass.ir.device_profile import DeviceProfile
from hetpass.ir.devices import DeviceGroup, DeviceKind
from hetpass.ir.facts import ProgramFacts


def calibrated_cluster(
    cluster: Cluster, profile: DeviceProfile, assumed: Assumptions = Assumptions()
) -> Cluster:
    """The cluster with the figures of its device kinds replaced by what was measured of them.

    Formats that were not measured keep their nominal rate times the mean share that the measured
    ones reached. Links between groups are as the cluster has them; the link inside a host is the
    measured one where the cluster says nothing but the kind's own.
    """
    groups = tuple(_group(group, profile, assumed) for group in cluster.groups)
    return Cluster(groups, cluster.links, cluster.default_link)


def _group(group: DeviceGroup, profile: DeviceProfile, assumed: Assumptions) -> DeviceGroup:
    found = profile.kinds.get(group.kind.name)
    if found is None:
        return group
    own = group.kind
    shares = [rate / own.peak_flops[d] for d, rate in found.rates.items() if d in own.peak_flops]
    share = sum(shares) / len(shares) if shares else assumed.flops
    rates = {d: found.rates.get(d, peak * share) / assumed.flops for d, peak in
             own.peak_flops.items()}  # fmt: skip
    kind = DeviceKind(
        own.name,
        rates,
        own.memory_bytes,
        found.memory_bandwidth / assumed.bandwidth,
        own.capabilities,
        found.link or own.link,
        f"measured on {profile.date}, {profile.machine}",
    )
    inside = kind.link if group.intra_host == own.link else group.intra_host
    return replace(group, kind=kind, intra_host=inside)


def measured_facts(facts: ProgramFacts, profile: DeviceProfile) -> ProgramFacts:
    """The facts with the layer seconds that the profile has of this program.

    A program is known by its fingerprint, a layer by its kind.
    """
    known = profile.layers.get(facts.fingerprint or "")
    if not known:
        return facts
    layers = tuple(
        replace(
            layer,
            seconds={**layer.seconds, **{d: rows[layer.kind] for d, rows in known.items()
                                         if layer.kind in rows}},
        )
        for layer in facts.layers
    )  # fmt: skip
    return replace(facts, layers=layers)
