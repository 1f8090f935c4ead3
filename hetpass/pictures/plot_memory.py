"""A picture of memory: what each stage holds on one device, against what the device has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hetpass.ir.quantities import spelled
from hetpass.pictures.matplotlib_figure import BYTES, figure_of, plain, saved, unit_of

_FIXED, _ACTIVATIONS, _FREE = "#4c78a8", "#f2a35e", "#ececec"


class StageMemory(Protocol):
    """One bar: a stage, in bytes on each of its devices (a `StageEvaluation` is one).

    Attributes:
      group: of devices; `devices` of them.
      fixed_bytes: parameters, optimizer state, gradients: all the time.
      activation_bytes: of the microbatches in flight.
      limit_bytes: that the stage may use.
      in_flight: microbatches.
    """

    @property
    def group(self) -> str: ...
    @property
    def devices(self) -> int: ...
    @property
    def fixed_bytes(self) -> float: ...
    @property
    def activation_bytes(self) -> float: ...
    @property
    def limit_bytes(self) -> float: ...
    @property
    def in_flight(self) -> int: ...


def plot_memory(
    stages: Sequence[StageMemory], path: str | Path | None = None, *, title: str = ""
) -> Any:
    """Draws one bar a stage: fixed, activations, what is free.

    Args:
      path: where to write the picture (.png, .svg, .pdf); None: nowhere.

    Returns:
      The matplotlib figure.

    Raises:
      ExecutionError: HP-RUN-PLOT, matplotlib is not installed.
    """
    figure = figure_of(9.0, 1.5 + 0.5 * len(stages))
    axis = figure.subplots()
    most = max(max(s.limit_bytes, s.fixed_bytes + s.activation_bytes) for s in stages)
    unit, scale = unit_of(most, BYTES)
    for row, stage in enumerate(stages):
        fixed = stage.fixed_bytes / scale
        held = fixed + stage.activation_bytes / scale
        limit = stage.limit_bytes / scale
        axis.barh(row, limit, color=_FREE, height=0.7)
        axis.barh(row, fixed, color=_FIXED, height=0.7)
        axis.barh(row, held - fixed, left=fixed, color=_ACTIVATIONS, height=0.7)
        axis.plot([limit, limit], [row - 0.4, row + 0.4], color="#b00020", lw=1.5)
        of = spelled(stage.limit_bytes, "bytes")
        text = f"{spelled(held * scale, 'bytes')} of {of}, {stage.in_flight} in flight"
        axis.text(max(held, limit) + 0.01 * most / scale, row, text, va="center", fontsize=8)
    labels = [plain(f"{i} · {s.group}[{s.devices}]") for i, s in enumerate(stages)]
    axis.set_yticks(range(len(stages)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, most / scale * 1.35)
    axis.set_xlabel(f"on each device, {unit}", fontsize=9)
    axis.tick_params(labelsize=8)
    if title:
        axis.set_title(plain(title), loc="left", fontsize=10)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    _legend(figure)
    return saved(figure, path)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(color=_FIXED, label="parameters, optimizer, gradients"),
        Patch(color=_ACTIVATIONS, label="activations in flight"),
        Patch(color=_FREE, label="free"),
        Line2D([], [], color="#b00020", label="may be used"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
