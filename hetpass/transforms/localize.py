"""Where each region equation runs: at home, again where a recipe says so, or nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetpass._jax import JaxprEqn, Var

Place = tuple[int, str]
"""(stage, role) of a microbatch fragment."""


@dataclass(frozen=True)
class LocalCode:
    """What one microbatch fragment runs.

    Attributes:
      eqns: in order.
      inputs: the region inputs that they read, in order of first use.
      imports: the values that they read from other fragments, in order of first use.
    """

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    imports: tuple[Var, ...]


@dataclass(frozen=True)
class Localized:
    """The code of every place, and the place that makes each variable for the others."""

    code: Mapping[Place, LocalCode]
    home: Mapping[Var, Place]


def localize(
    eqns: Sequence[JaxprEqn],
    homes: Sequence[Place],
    free: Sequence[bool],
    needed: Iterable[Var],
) -> Localized:
    """Walks from the needed values back to the inputs.

    Args:
      eqns: of the region, in order.
      homes: where each runs.
      free: whether a place that reads its result may run it itself (see `recipes`).
      needed: region results; each is made at the home of its equation.
    """
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    runs: list[set[Place]] = [set() for _ in eqns]
    for v in needed:
        runs[maker[v]].add(homes[maker[v]])
    for i in range(len(eqns) - 1, -1, -1):
        if eqns[i].effects:
            runs[i].add(homes[i])
        for v in eqns[i].invars:
            j = maker.get(v, -1) if isinstance(v, Var) else -1
            if j >= 0:
                runs[j].update(runs[i] if free[j] else {homes[j]} if runs[i] else ())
    code: dict[Place, tuple[list[JaxprEqn], dict[Var, None], dict[Var, None]]] = {}
    made: set[tuple[Var, Place]] = set()
    for eqn, places in zip(eqns, runs, strict=True):
        for place in sorted(places):
            body, inputs, imports = code.setdefault(place, ([], {}, {}))
            body.append(eqn)
            made.update((v, place) for v in eqn.outvars)
            for v in eqn.invars:
                if isinstance(v, Var) and v not in maker:
                    inputs[v] = None
                elif isinstance(v, Var) and (v, place) not in made:
                    imports[v] = None
    return Localized(
        {p: LocalCode(tuple(b), tuple(i), tuple(m)) for p, (b, i, m) in sorted(code.items())},
        {v: homes[i] for v, i in maker.items()},
    )
