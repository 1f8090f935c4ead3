"""How every slot is stored: its leading dimensions, and its sharding on the mesh of its stage.

The default rule reads two mesh axes by name. `data` cuts the examples: batched slots along their
batch dimension, partial slots along a leading dimension with one part per device. `model` cuts
parameters and optimizer state: every whole float array of two or more dimensions, along its
largest dimension that divides (the last of equals). A plan overrides the rule by slot name. What
a microbatch's forward keeps for its backward, the compiler may cut further (`free_slots` of
`backend/stored_slots`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from hetpass._jax import ShapedArray
from hetpass.backend.layout import batch_layout, legal_parts
from hetpass.backend.split import DATA_AXIS
from hetpass.errors import PlanError
from hetpass.ir.kinds import Partial
from hetpass.ir.operation_graph import Layout
from hetpass.ir.plan import Plan, Replica, Sharding
from hetpass.ir.program import FromSlot, Slot, Staged
from hetpass.ir.quantities import counted

MODEL_AXIS = "model"


def data_parts(replica: Replica) -> int:
    """D: the size of the data axis, 1 without one."""
    return dict(replica.mesh).get(DATA_AXIS, 1)


def stored_aval(
    slot: Slot, replica: Replica, num_microbatches: int, layout: Layout | None = None
) -> ShapedArray:
    """The array that is stored: [M, …] if stacked, [D, …] if partial and D > 1.

    Args:
      layout: of the slot on an assigned stage: with a leading dimension per partial axis.
    """
    shape = tuple(slot.aval.shape)
    if layout is not None and not slot.stacked:
        parts = (size for name, size in replica.mesh if name in layout.partial)
        return ShapedArray((*parts, *shape), slot.aval.dtype, weak_type=slot.aval.weak_type)
    if slot.stacked:
        shape = (num_microbatches, *shape)
    elif isinstance(slot.kind, Partial) and data_parts(replica) > 1:
        shape = (data_parts(replica), *shape)
    return ShapedArray(shape, slot.aval.dtype, weak_type=slot.aval.weak_type)


def slot_sharding(slot: Slot, replica: Replica, override: Sharding | None = None) -> PartitionSpec:
    """The spec of the stored array on the replica's mesh.

    Args:
      override: the sharding that the plan gives for the slot's value (without the leading
        dimension of a stacked or partial slot).

    Raises:
      PlanError: HP-PLAN-SHARDING, if the override does not fit the value or the mesh.
    """
    axes = dict(replica.mesh)
    rule = _checked(slot, axes, override) if override is not None else _default(slot, axes)
    if slot.stacked:
        return PartitionSpec(None, *map(_entry, rule))
    if isinstance(slot.kind, Partial) and axes.get(DATA_AXIS, 1) > 1:
        rule = [tuple(a for a in names if a != DATA_AXIS) for names in rule]
        return PartitionSpec(DATA_AXIS, *map(_entry, rule))
    return PartitionSpec(*map(_entry, rule))


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return names[0] if len(names) == 1 else names or None


def _default(slot: Slot, axes: Mapping[str, int]) -> list[tuple[str, ...]]:
    shape = tuple(slot.aval.shape)
    rule: list[tuple[str, ...]] = [() for _ in shape]
    layout = batch_layout(slot.kind)
    if layout is not None:
        dim, outer = layout
        if axes.get(DATA_AXIS, 1) > 1 and outer == 1 and shape[dim] % axes[DATA_AXIS] == 0:
            rule[dim] = (DATA_AXIS,)
        return rule
    size = axes.get(MODEL_AXIS, 1)
    if size > 1 and slot.scope == "step" and len(shape) >= 2 and _is_float(slot.aval):
        fits = [d for d, n in enumerate(shape) if n and n % size == 0]
        if fits:
            rule[max(fits, key=lambda d: (shape[d], d))] = (MODEL_AXIS,)
    return rule


def _is_float(aval: ShapedArray) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _checked(slot: Slot, axes: Mapping[str, int], sharding: Sharding) -> list[tuple[str, ...]]:
    shape = tuple(slot.aval.shape)

    def refuse(what: str, *details: str) -> PlanError:
        return PlanError(
            "HP-PLAN-SHARDING",
            what,
            where=f"the sharding of {slot.name!r} on stage {slot.stage}",
            details=(f"shape {shape}, sharding {sharding}, mesh {dict(axes)}", *details),
            ways_out=("correct the sharding, or leave it out for the default rule",),
        )

    if len(sharding) != len(shape):
        raise refuse(
            f"the value has {counted(len(shape), 'dimension')}, the sharding {len(sharding)}"
        )
    used = [name for names in sharding for name in names]
    unknown = sorted({name for name in used if name not in axes})
    if unknown:
        raise refuse(f"the mesh has no axis {', '.join(unknown)}")
    if len(set(used)) != len(used):
        raise refuse("a mesh axis cuts two dimensions")
    for dim, names in enumerate(sharding):
        parts = int(np.prod([axes[name] for name in names], dtype=int))
        if shape[dim] % parts:
            raise refuse(f"dimension {dim} of size {shape[dim]} does not divide into {parts}")
    return [tuple(names) for names in sharding]


def stage_replicas(staged: Staged, plan: Plan) -> tuple[Replica, ...]:
    """The submesh of each stage.

    Raises:
      PlanError: HP-PLAN-PIPELINES or HP-PLAN-REPLICAS for what one pipeline on one submesh per
        stage cannot run; HP-PLAN-STAGES for another number of stages; HP-PLAN-DATA-AXIS where the
        data axis does not divide a microbatch.
    """
    if len(plan.pipelines) != 1:
        raise PlanError(
            "HP-PLAN-PIPELINES",
            f"the plan has {len(plan.pipelines)} parallel pipelines; one can be run",
            ways_out=("plan with one pipeline",),
        )
    stages = plan.pipelines[0].stages
    if len(stages) != staged.num_stages:
        raise PlanError(
            "HP-PLAN-STAGES",
            f"the plan has {counted(len(stages), 'stage')}, the program was cut into "
            f"{staged.num_stages}",
            ways_out=("partition the program with this plan",),
        )
    for number, stage in enumerate(stages):
        if len(stage.replicas) != 1:
            raise PlanError(
                "HP-PLAN-REPLICAS",
                f"stage {number} has {counted(len(stage.replicas), 'replica')}; one can be run",
                where=f"stage {number}",
                ways_out=("use a mesh with a data axis in one group",),
            )
    replicas = tuple(stage.replicas[0] for stage in stages)
    for number, replica in enumerate(replicas):
        if not stages[number].assignments:
            _check_data_axis(staged, number, replica)
    return replicas


def _check_data_axis(staged: Staged, stage: int, replica: Replica) -> None:
    batch = staged.layered.program.traced.batch_size
    parts, count = data_parts(replica), staged.num_microbatches
    if batch is None or parts == 1 or (batch // count) % parts == 0:
        return
    part = batch // count
    legal = ", ".join(map(str, legal_parts(part, parts)))
    needed = parts * count
    raise PlanError(
        "HP-PLAN-DATA-AXIS",
        f"a microbatch of {counted(part, 'example')} does not divide over "
        f"{counted(parts, 'device')}",
        where=f"stage {stage}, group {replica.group!r}, mesh axis {DATA_AXIS!r}",
        details=(
            f"batch {batch} = {counted(count, 'microbatch')} of {part}",
            f"nearest sizes of the data axis that divide {part}: {legal}",
            f"nearest batches for this mesh: {batch // needed * needed or needed}, "
            f"{(batch // needed + 1) * needed}",
        ),
        ways_out=(
            "change the batch size or the number of microbatches",
            f"give the group a mesh whose {DATA_AXIS!r} axis divides the microbatch",
        ),
    )


def stage_meshes(
    replicas: Sequence[Replica], devices: Mapping[str, Sequence[jax.Device]]
) -> tuple[Mesh, ...]:
    """One mesh per stage, all axes Auto; equal replicas share a mesh.

    Raises:
      PlanError: HP-PLAN-GROUP for a group, HP-PLAN-DEVICE for a device that is not there.
    """
    meshes: dict[tuple[object, ...], Mesh] = {}
    for number, replica in enumerate(replicas):
        key = (replica.group, replica.devices, replica.mesh)
        if key not in meshes:
            meshes[key] = _mesh(number, replica, devices)
    return tuple(meshes[r.group, r.devices, r.mesh] for r in replicas)


def _mesh(stage: int, replica: Replica, devices: Mapping[str, Sequence[jax.Device]]) -> Mesh:
    if replica.group not in devices:
        raise PlanError(
            "HP-PLAN-GROUP",
            f"no devices for group {replica.group!r}",
            where=f"stage {stage}",
            details=(f"groups with devices: {', '.join(sorted(devices)) or 'none'}",),
        )
    group = devices[replica.group]
    if max(replica.devices) >= len(group):
        raise PlanError(
            "HP-PLAN-DEVICE",
            f"group {replica.group!r} has no device {max(replica.devices)}",
            where=f"stage {stage}",
            details=(f"the group has {counted(len(group), 'device')}, 0 to {len(group) - 1}",),
        )
    names = tuple(name for name, _ in replica.mesh)
    sizes = tuple(size for _, size in replica.mesh)
    grid = np.array([group[index] for index in replica.devices], dtype=object).reshape(sizes)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def slot_specs(
    staged: Staged,
    plan: Plan,
    replicas: Sequence[Replica],
    layouts: Sequence[Layout | None] | None = None,
) -> tuple[PartitionSpec, ...]:
    """One per slot, over the axes of its stage's mesh. State that comes back has the spec it went
    in with.

    Args:
      layouts: per slot, on assigned stages; None: by the default rule, or by name.
    """
    stages = plan.pipelines[0].stages
    specs = []
    for slot, layout in zip(staged.slots, layouts or [None] * len(staged.slots), strict=True):
        replica, name = replicas[slot.stage], slot.name
        if layout is None:
            override = stages[slot.stage].shardings.get(name)
            specs.append(slot_sharding(slot, replica, override))
        else:
            leading = [a for a, _ in replica.mesh if a in layout.partial]
            stack = [None] if slot.stacked else leading
            specs.append(PartitionSpec(*stack, *map(_entry, layout.dims)))
    feeds = {feed.input: feed.slot for feed in staged.feeds}
    for source, target in staged.pairs:
        result = staged.results[target]
        if not isinstance(result, FromSlot) or source not in feeds:
            continue
        before, after = staged.slots[feeds[source]], staged.slots[result.slot]
        if before.stage == after.stage and not before.stacked:
            specs[after.index] = specs[before.index]
    return tuple(specs)
