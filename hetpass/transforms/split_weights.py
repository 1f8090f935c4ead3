"""Which backward equations may wait: what only weight gradients need.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), split a backward task into B, which the
stages before wait for, and W, which nobody waits for but the optimizer. On a jaxpr this is dead
code elimination: B keeps what the input gradients need, and W is the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetpass._jax import JaxprEqn, Var
from hetpass.ir.kinds import Kind, Partial
from hetpass.ir.program import LayerSpan
from hetpass.transforms.dead_code import live_equations
from hetpass.transforms.localize import Place


def split_weights(
    eqns: Sequence[JaxprEqn],
    homes: Sequence[Place],
    spans: Sequence[LayerSpan],
    kinds: Mapping[Var, Kind],
    needed: Sequence[object],
) -> tuple[Place, ...]:
    """The homes with role "weight" for the backward equations that B does not need.

    B needs what leads to a value that another stage reads, or that goes on from one layer to the
    one before it and is no sum over the examples. (The gradients that pass between the layers of
    stage 0 lead to no other stage; they are B all the same, so that its W is as light as others'.)

    Args:
      eqns: of the region, each on one stage.
      homes: (stage, "forward" or "backward") of each.
      spans: the layers of each.
      kinds: of the region's variables.
      needed: results of the region.
    """
    live = live_equations(eqns, needed)
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    wanted: set[int] = set()
    for i, eqn in enumerate(eqns):
        for v in eqn.invars:
            j = maker.get(v, -1) if live[i] and isinstance(v, Var) else -1
            if j >= 0 and homes[i][1] == homes[j][1] == "backward":
                far = homes[i][0] != homes[j][0]
                onward = spans[i].first < spans[j].first and not isinstance(kinds.get(v), Partial)
                if far or onward:
                    wanted.add(j)
    for i in range(len(eqns) - 1, -1, -1):
        if homes[i][1] == "backward" and (i in wanted or eqns[i].effects):
            wanted.add(i)
            wanted.update(maker[v] for v in eqns[i].invars if isinstance(v, Var) and v in maker)
    return tuple(
        (stage, "weight") if role == "backward" and i not in wanted else (stage, role)
        for i, (stage, role) in enumerate(homes)
    )
