"""Names of layers, for people.

From the name stacks of a layer's heavy equations where the model has them (flax linen); else from
the paths of the parameters that they read (`params['blocks'][3]`); else by number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetpass._jax import JaxprEqn, name_stack

Path = tuple[str, ...]

_WRAPPER = re.compile(r"\w+\(|\)")
_NOISE = frozenset({"", "checkpoint", "rematted_computation", "remat", "while", "body", "cond"})
_STEP = re.compile(r"\[[^\]]*\]|\.?[^.\[]+")


def scope(eqn: JaxprEqn) -> Path:
    """The user's scopes of an equation, without transformations: ("GPT", "Block_3", "attn")."""
    bare = _WRAPPER.sub("", name_stack(eqn))
    return tuple(p for p in bare.split("/") if p not in _NOISE and "->" not in p)


def path_steps(path: str) -> Path:
    """`state.params['h'][3]` -> ("state", ".params", "['h']", "[3]")."""
    return tuple(_STEP.findall(path))


def layer_names(scopes: Sequence[Sequence[Path]], paths: Sequence[Sequence[Path]]) -> list[str]:
    """One name per layer, all different.

    Args:
      scopes: per layer, of the equations that it is known by.
      paths: per layer, of the parameters that these read.
    """
    names: list[str] = []
    seen: dict[str, int] = {}
    for number, (stack, read) in enumerate(zip(scopes, paths, strict=True)):
        name = _joined(stack, "/") or _joined(read, "") or f"layer_{number}"
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _joined(paths: Sequence[Path], separator: str) -> str:
    """What the paths share, and the first and the last way on: "GPT/block_0/up..down"."""
    paths = [p for p in paths if p]
    if not paths:
        return ""
    shared = _shared(paths)
    further = list(dict.fromkeys(p[len(shared)] for p in paths if len(p) > len(shared)))
    if shared and len(further) > 1:
        return separator.join((*shared, f"{further[0]}..{further[-1]}"))
    return separator.join(shared)


def _shared(paths: Sequence[Path]) -> Path:
    shortest = min(paths, key=len)
    for depth, part in enumerate(shortest):
        if any(other[depth] != part for other in paths):
            return shortest[:depth]
    return shortest
