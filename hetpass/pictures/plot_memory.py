"""A picture of memory: what each stage holds on one device, against what the device has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hetpass.ir.quantities import spelled
from hetpass.pictures.matplotlib_figure import BYTES, figure_of, plain, saved, unit_of

_FIXED, _ACTIVATIONS, _FREE, _LIMIT = "#4c78a8", "#f2a35e", "#ececec", "#b00020"
_NEAR_SHARE = 0.02
"""Where every stage holds less of what it may use, limits would make all bars too short to see."""


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
    helds = [stage.fixed_bytes + stage.activation_bytes for stage in stages]
    near = any(h >= _NEAR_SHARE * s.limit_bytes for h, s in zip(helds, stages, strict=True))
    most = max(*helds, *(s.limit_bytes for s in stages)) if near else max(helds)
    unit, scale = unit_of(most, BYTES)
    for row, (stage, held) in enumerate(zip(stages, helds, strict=True)):
        fixed = stage.fixed_bytes / scale
        limit = stage.limit_bytes / scale if near else 0.0
        axis.barh(row, limit, color=_FREE, height=0.7)
        axis.barh(row, fixed, color=_FIXED, height=0.7)
        axis.barh(row, held / scale - fixed, left=fixed, color=_ACTIVATIONS, height=0.7)
        if near:
            axis.plot([limit, limit], [row - 0.4, row + 0.4], color=_LIMIT, lw=1.5)
        of = spelled(stage.limit_bytes, "bytes")
        text = f"{spelled(held, 'bytes')} of {of}, {stage.in_flight} in flight"
        end = max(held / scale, limit) + 0.01 * most / scale
        axis.text(end, row, text, va="center", fontsize=8)
    labels = [plain(f"{i} · {s.group}[{s.devices}]") for i, s in enumerate(stages)]
    axis.set_yticks(range(len(stages)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, most / scale * 1.35)
    beyond = "" if near else "; what may be used is far beyond"
    axis.set_xlabel(f"on each device, {unit}{beyond}", fontsize=9)
    axis.tick_params(labelsize=8)
    if title:
        axis.set_title(plain(title), loc="left", fontsize=10)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    _legend(figure, near)
    return saved(figure, path)


def _legend(figure: Any, limits: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=_FIXED, label="parameters, optimizer, gradients"),
        Patch(color=_ACTIVATIONS, label="activations in flight"),
    ]
    if limits:
        handles.append(Patch(color=_FREE, label="free"))
        handles.append(Line2D([], [], color=_LIMIT, label="may be used"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
