"""A matplotlib figure without a window, and what all pictures share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetpass.errors import ExecutionError

LANE_COLOURS = (
    "#1f4e79", "#c0504d", "#5b8c3a", "#7f5fa8", "#b8860b", "#3a8c8c", "#a0522d", "#555555",
    "#4c8fd1", "#8b1a4f", "#1e6b3c", "#c06fb0", "#8a8a2a", "#20506b", "#e07b39", "#3d3580",
)  # fmt: skip
"""Of stages and groups, in order, then again from the first."""

BYTES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))
"""As `hetpass.ir.quantities.spelled` writes them in tables."""

SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def figure_of(width_in: float, height_in: float) -> Any:
    """A figure that no window belongs to.

    Raises:
      ExecutionError: HP-RUN-PLOT, matplotlib is not installed.
    """
    try:
        from matplotlib import figure
    except ImportError:
        raise ExecutionError(
            "HP-RUN-PLOT",
            "pictures need matplotlib, which is not installed",
            ways_out=("pip install 'hetpass[plot]'",),
        ) from None
    return figure.Figure(figsize=(width_in, height_in), layout="constrained")


def saved(figure: Any, path: str | Path | None) -> Any:
    """The figure, written to `path` if there is one.

    Raises:
      ExecutionError: HP-RUN-PLOT, it cannot be written there.
    """
    if path is None:
        return figure
    try:
        figure.savefig(Path(path), dpi=150)
    except (OSError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ExecutionError(
            "HP-RUN-PLOT",
            f"the picture cannot be written: {reason}",
            where=f"{path}",
            ways_out=("a file .png, .svg or .pdf, in a folder that exists",),
        ) from error
    return figure


def plain(text: str) -> str:
    """Names are people's own: matplotlib shall not read them as formulas."""
    return text.replace("$", r"\$")


def unit_of(most: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit that `most` holds at least once."""
    return next(((name, scale) for name, scale in units if most >= scale), units[-1])
