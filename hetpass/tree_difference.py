"""Where two argument trees differ, for people."""

from __future__ import annotations

from typing import Any

import jax

from hetpass._jax import equality_errors_pytreedef

_BEFORE, _AFTER = 60, 120
_MOST = 3


def tree_difference(one: Any, other: Any, labels: tuple[str, str]) -> list[str]:
    """Lines that say at which paths two tree definitions differ, and how; at most three places.

    The static part of a node (a function, a configuration) may be long and differ late: what is
    shown is cut around the first character that differs.
    """
    lines = []
    for path, left, right, _ in list(equality_errors_pytreedef(one, other))[:_MOST]:
        start = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), len(left)
        )
        lines.append(f"at {jax.tree_util.keystr(path) or 'the top'}:")
        lines += [
            f"  {label}: {_around(text, start)}"
            for label, text in zip(labels, (left, right), strict=True)
        ]
    return lines


def _around(text: str, start: int) -> str:
    begin = max(0, start - _BEFORE)
    shown = " ".join(text[begin : start + _AFTER].split())
    return f"{'…' if begin else ''}{shown}{'…' if start + _AFTER < len(text) else ''}"
