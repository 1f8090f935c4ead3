"""Parts of sums that cross between stages with data axes of unlike sizes.

Within a stage a value that sums over examples exists in D parts, one per device of the data axis,
until the step ends. Between stages with equal D the parts cross as they are. Between unlike ones
they cannot: there the sum over the parts of one microbatch crosses, and is the first part on the
other side. (A balance loss that a scan over layers carries from stage to stage is such a value.)
"""

from __future__ import annotations

from dataclasses import replace

from hetpass.backend.shard import data_parts
from hetpass.ir.kinds import Partial, Whole
from hetpass.ir.plan import Plan
from hetpass.ir.program import Staged


def crossing_sums(staged: Staged, plan: Plan) -> Staged:
    """The program with such slots stored whole; programs read and write them accordingly."""
    import networkx as nx  # a quarter of what hetpass takes to import, so only where it is used

    stages = plan.pipelines[0].stages
    parts = [data_parts(stage.replicas[0]) for stage in stages]
    links = nx.Graph()
    for transfer in staged.transfers:
        slot = staged.slots[transfer.source]
        if isinstance(slot.kind, Partial) and slot.scope == "microbatch":
            links.add_edge(transfer.source, transfer.target)
    whole = {
        index
        for joined in nx.connected_components(links)
        if len({parts[staged.slots[index].stage] for index in joined}) > 1
        for index in joined
    }
    if not whole:
        return staged
    slots = tuple(replace(s, kind=Whole()) if s.index in whole else s for s in staged.slots)
    return replace(staged, slots=slots)
