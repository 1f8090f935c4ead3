"""Names of layers, for people: what the name stacks of a layer's heavy equations share."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetpass._jax import JaxprEqn, name_stack

_WRAPPER = re.compile(r"(?:\w+)\(|\)")
_NOISE = frozenset({"", "checkpoint", "rematted_computation", "remat", "while", "body", "cond"})


def scope(eqn: JaxprEqn) -> tuple[str, ...]:
    """The user's scopes of an equation, without transformations: ("GPT", "Block_3", "attn")."""
    bare = _WRAPPER.sub("", name_stack(eqn))
    return tuple(part for part in bare.split("/") if part not in _NOISE)


def layer_names(layers: Sequence[Sequence[JaxprEqn]]) -> tuple[str, ...]:
    """One name per layer, all different.

    Args:
      layers: for each layer the equations that it is known by.
    """
    names: list[str] = []
    seen: dict[str, int] = {}
    for number, eqns in enumerate(layers):
        name = "/".join(_shared([scope(e) for e in eqns])) or f"layer_{number}"
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(names)


def _shared(scopes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    if not scopes:
        return ()
    shortest = min(scopes, key=len)
    for depth, part in enumerate(shortest):
        if any(other[depth] != part for other in scopes):
            return shortest[:depth]
    return shortest
