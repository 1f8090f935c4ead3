"""Where two argument trees differ, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from hetpass._jax import equality_errors_pytreedef
from hetpass.ir.quantities import counted

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


def call_difference(
    one: Any, other: Any, labels: tuple[str, str], names: Sequence[str]
) -> list[str]:
    """The same for two calls: trees of (args, kwargs); `names` are of the arguments by position."""
    calls = [jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in (one, other)]
    texts = [call_text(*call) for call in calls]
    if texts[0] != texts[1]:
        return [f"{label}: {text}" for label, text in zip(labels, texts, strict=True)]
    by_name = [
        {names[i] if i < len(names) else f"argument {i}": a for i, a in enumerate(args)} | kwargs
        for args, kwargs in calls
    ]
    trees = [jax.tree.structure(call) for call in by_name]
    return tree_difference(trees[0], trees[1], labels)


def call_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """How a step is called: "2 arguments by position, rate by name"."""
    named = f", {', '.join(kwargs)} by name" if kwargs else ""
    return f"{counted(len(args), 'argument')} by position{named}"


def _around(text: str, start: int) -> str:
    begin = max(0, start - _BEFORE)
    shown = " ".join(text[begin : start + _AFTER].split())
    return f"{'…' if begin else ''}{shown}{'…' if start + _AFTER < len(text) else ''}"
