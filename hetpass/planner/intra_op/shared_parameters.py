"""Parameters that layers of several kinds read rest alike in all of them. No JAX.

A tied embedding has one master copy. Its first layer looks rows up, its last multiplies by the
table, and each would have it lie otherwise. What either would have by itself is tried on both, and
what is less in sum is taken: layers that are far apart need not be solved as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from hetpass.ir.operation_graph import Layout
from hetpass.planner.intra_op.answers import cheapest
from hetpass.planner.intra_op.linear_program import Effort
from hetpass.planner.intra_op.program import Program, program


def agreed(
    made: Sequence[Program], price: float = 0.0, effort: Effort = Effort()
) -> tuple[Program, ...]:
    """The programs of all layer kinds, so that shared parameters have one layout at rest.

    Args:
      made: for one setting.
      price: of memory, seconds per byte.
    """
    found, resting = list(made), dict[str, Layout]()
    for name, kinds in _shared(made).items():
        liked = {_rests(found[kind], name, price, effort): None for kind in kinds}
        options = []
        for layout in liked:
            own = resting | ({} if layout is None else {name: layout})
            trial = {kind: program(found[kind].graph, found[kind].setting, own) for kind in kinds}
            cost = sum(cheapest(p.weighed(price), effort).bound for p in trial.values())
            options.append((cost, own, trial))
        cost, resting, trial = min(options, key=lambda option: option[0])
        if np.isfinite(cost):
            for kind, agreeing in trial.items():
                found[kind] = agreeing
    return tuple(found)


def _shared(made: Sequence[Program]) -> dict[str, list[int]]:
    """Name of a parameter -> the kinds that read it, of those that more than one does."""
    readers: dict[str, list[int]] = {}
    away: set[str] = set()
    for kind, own in enumerate(made):
        for parameter in own.graph.parameters:
            name = own.graph.values[parameter.value].name
            readers.setdefault(name, [])
            if kind not in readers[name]:
                readers[name].append(kind)
            if parameter.elsewhere:
                away.add(name)
    return {name: kinds for name, kinds in readers.items() if name in away and len(kinds) > 1}


def _rests(made: Program, name: str, price: float, effort: Effort) -> Layout | None:
    """How the cheapest assignment of a kind by itself has a parameter; None: there is none."""
    found = cheapest(made.weighed(price), effort)
    if found.choices is None:
        return None
    for node, choice in zip(made.nodes, found.choices, strict=True):
        if node.of == "at_rest":
            value = made.graph.values[made.graph.parameters[node.number].value]
            if value.name == name:
                return cast(Layout, node.choices[choice])
    return None
