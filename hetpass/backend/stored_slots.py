"""Staged, Plan -> how every slot is stored on the mesh of its stage, before any device is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetpass._jax import ShapedArray
from hetpass.backend.assigned_stages import AssignedStages, assigned_stages
from hetpass.backend.lower import StageProgram, finish_results, lower
from hetpass.backend.reshard import Placement, placement
from hetpass.backend.shard import data_parts, slot_specs, stage_replicas, stored_aval
from hetpass.ir.operation_graph import Layout
from hetpass.ir.plan import Plan, Replica
from hetpass.ir.program import Staged, Write


@dataclass(frozen=True)
class StoredSlots:
    """What every process that takes part in a step knows of all its stages.

    Attributes:
      assigned: what the plan's assignments say; its program has a slot of its own for every result.
      replicas: per stage.
      avals: per slot, of the array that is stored.
      specs: per slot, its sharding over the axes of its stage's mesh.
      free: slots that the compiler may cut further (`free_slots`).
    """

    assigned: AssignedStages
    replicas: tuple[Replica, ...]
    avals: tuple[ShapedArray, ...]
    specs: tuple[PartitionSpec, ...]
    free: frozenset[int]

    @property
    def staged(self) -> Staged:
        return self.assigned.staged

    def shardings(self, meshes: Mapping[int, Mesh]) -> dict[int, NamedSharding]:
        """By slot, of the stages whose meshes are given."""
        return {
            slot.index: NamedSharding(meshes[slot.stage], self.specs[slot.index])
            for slot in self.staged.slots
            if slot.stage in meshes
        }

    def placements(self, shardings: Mapping[int, NamedSharding]) -> dict[int, Placement]:
        """By position in `staged.feeds`, of the slots whose shardings are given."""
        inputs = self.staged.layered.program.traced.inputs
        count = self.staged.num_microbatches
        return {
            number: placement(
                inputs[feed.input].aval.shape,
                self.staged.slots[feed.slot],
                count,
                shardings[feed.slot],
            )
            for number, feed in enumerate(self.staged.feeds)
            if feed.slot in shardings
        }

    def programs(self) -> tuple[StageProgram, ...]:
        """Of all stages: one per fragment, in their order, then the starts."""
        return lower(self.staged, self.replicas, self.assigned)


def stored_slots(staged: Staged, plan: Plan) -> StoredSlots:
    """See StoredSlots.

    Raises:
      PlanError: the plan does not fit the program.
    """
    replicas = stage_replicas(staged, plan)
    assigned = assigned_stages(finish_results(staged), plan)
    count = staged.num_microbatches
    avals = tuple(
        stored_aval(slot, replicas[slot.stage], count, layout)
        for slot, layout in zip(assigned.staged.slots, assigned.layouts, strict=True)
    )
    specs = slot_specs(assigned.staged, plan, replicas, assigned.layouts)
    free = free_slots(assigned.staged, plan, replicas, assigned.layouts)
    return StoredSlots(assigned, replicas, avals, specs, free)


def free_slots(
    staged: Staged, plan: Plan, replicas: Sequence[Replica], layouts: Sequence[Layout | None]
) -> frozenset[int]:
    """Slots of which the plan says nothing but how examples are cut, and that nobody sees but
    programs of one stage: what a microbatch's forward keeps for its backward. Where the mesh has
    more axes than `data`, the compiler knows best how it made them; to store them whole would
    gather every one, in every microbatch, and multiply what is kept.

    Args:
      layouts: per slot, on assigned stages.
    """
    seen = {slot for t in staged.transfers for slot in (t.source, t.target)}
    seen |= {feed.slot for feed in staged.feeds}
    made = {o.slot for f in staged.fragments for o in f.outputs if isinstance(o, Write)}
    own = made - seen
    stages = plan.pipelines[0].stages
    return frozenset(
        slot.index
        for slot, layout in zip(staged.slots, layouts, strict=True)
        if slot.scope == "microbatch"
        and slot.index in own
        and layout is None
        and slot.name not in stages[slot.stage].shardings
        and not jax.dtypes.issubdtype(slot.aval.dtype, jax.dtypes.extended)
        and len(replicas[slot.stage].devices) > data_parts(replicas[slot.stage])
    )
