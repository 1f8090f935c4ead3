"""A picture of a plan on its cluster: which device computes which layers, and how they share them.

Each device is a box, each host a frame, each stage a colour. A box says the number of its stage and
the device's place on the stage's mesh: devices that differ along `data` have other examples, along
`model` other parts of every matrix. Devices that no stage uses are grey.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpass.ir.cluster import Cluster, DeviceGroup
from hetpass.ir.plan import Plan, Replica
from hetpass.ir.quantities import counted, span_text
from hetpass.pictures.matplotlib_figure import LANE_COLOURS, figure_of, plain, saved

_IDLE, _EDGE = "#e4e4e4", "#888888"
_PER_ROW = 8
_BOX_IN = 1.05
_MOST_DRAWN = 64
"""Devices of a group that are drawn; a larger group ends in a word about the rest."""


@dataclass(frozen=True)
class _Use:
    """What a device does."""

    stages: tuple[int, ...]
    place: str


def plot_sharding(plan: Plan, cluster: Cluster, path: str | Path | None = None) -> Any:
    """Draws every group's devices with their stages.

    Args:
      path: where to write the picture (.png, .svg, .pdf); None: nowhere.

    Returns:
      The matplotlib figure.

    Raises:
      ExecutionError: HP-RUN-PLOT, matplotlib is not installed.
    """
    uses = _uses(plan)
    rows = [max(1, -(-min(g.num_devices, _MOST_DRAWN) // _PER_ROW)) for g in cluster.groups]
    heights = [row * _BOX_IN * 0.62 + 0.55 for row in rows]
    height_in = sum(heights) + 0.3 * plan.num_stages + 0.9
    figure = figure_of(_PER_ROW * _BOX_IN + 1.2, height_in)
    axes = figure.subplots(len(cluster.groups), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axis, group, count in zip(axes, cluster.groups, rows, strict=True):
        _draw_group(axis, group, count, uses)
    figure.suptitle(
        plain(f"{counted(plan.num_layers, 'layer')} on {counted(plan.num_stages, 'stage')}, "
              f"{counted(plan.num_microbatches, 'microbatch')}, schedule {plan.schedule}"),
        x=0.01, ha="left", fontsize=10,
    )  # fmt: skip
    _legend(figure, plan)
    return saved(figure, path)


def _uses(plan: Plan) -> dict[tuple[str, int], _Use]:
    """By group and device. Stages are numbered over all pipelines."""
    uses: dict[tuple[str, int], _Use] = {}
    number = 0
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica in stage.replicas:
                for index, device in enumerate(replica.devices):
                    key = (replica.group, device)
                    before = uses[key].stages if key in uses else ()
                    uses[key] = _Use((*before, number), _place(replica, index))
            number += 1
    return uses


def _place(replica: Replica, index: int) -> str:
    """The coordinates of a device on the mesh, row-major: "data 1, model 0"."""
    parts = []
    for name, size in reversed(replica.mesh):
        if size > 1:
            parts.append(f"{name} {index % size}")
        index //= size
    return "\n".join(reversed(parts))


def _draw_group(
    axis: Any, group: DeviceGroup, rows: int, uses: dict[tuple[str, int], _Use]
) -> None:
    from matplotlib.patches import Rectangle

    drawn = min(group.num_devices, _MOST_DRAWN)
    for device in range(drawn):
        x, y = device % _PER_ROW, device // _PER_ROW
        use = uses.get((group.name, device))
        colours = [_IDLE] if use is None else [_colour(s) for s in use.stages]
        width = 0.86 / len(colours)
        for part, colour in enumerate(colours):
            corner = (x + 0.07 + part * width, y + 0.1)
            axis.add_patch(Rectangle(corner, width, 0.8, facecolor=colour, edgecolor="white"))
        text = "idle" if use is None else _use_text(use)
        ink = "#555555" if use is None else "white"
        axis.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7, color=ink)
    for host in range(group.hosts):
        first, last = host * group.devices_per_host, (host + 1) * group.devices_per_host - 1
        if last < drawn and first // _PER_ROW == last // _PER_ROW and group.hosts > 1:
            corner = (first % _PER_ROW + 0.01, first // _PER_ROW + 0.03)
            size = (group.devices_per_host - 0.02, 0.94)
            axis.add_patch(Rectangle(corner, *size, fill=False, edgecolor=_EDGE, lw=0.8))
    hosts = f", {group.hosts} hosts of {group.devices_per_host}" if group.hosts > 1 else ""
    more = f"; {group.num_devices - drawn} more not drawn" if group.num_devices > drawn else ""
    axis.set_title(plain(f"{group.name}: {group.num_devices} {group.kind.name}{hosts}{more}"),
                   loc="left", fontsize=9)  # fmt: skip
    axis.set_xlim(0, _PER_ROW)
    axis.set_ylim(rows, 0)
    axis.axis("off")


def _use_text(use: _Use) -> str:
    """ "3 · data 0": the stages, numbered as lanes are, and the place."""
    stages = ", ".join(map(str, use.stages))
    return f"{stages} · {use.place}" if use.place else f"stage {stages}"


def _colour(stage: int) -> str:
    return LANE_COLOURS[stage % len(LANE_COLOURS)]


def _legend(figure: Any, plan: Plan) -> None:
    from matplotlib.patches import Patch

    patches = []
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    for number, stage in enumerate(stages):
        mesh = " by ".join(f"{name} {size}" for name, size in stage.replicas[0].mesh if size > 1)
        where = " + ".join(f"{r.group}[{len(r.devices)}]" for r in stage.replicas)
        shared = f", {mesh}" if mesh else ""
        layers = span_text(stage.first_layer, stage.last_layer)
        label = f"stage {number}: layers {layers} on {where}{shared}"
        patches.append(Patch(color=_colour(number), label=plain(label)))
    figure.legend(handles=patches, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
