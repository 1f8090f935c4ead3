"""What `jax.checkpoint` recomputes in one piece should stay in one layer.

The backward pass of a checkpointed block first runs its forward equations again, then transposes
them. Backward values travel down only, so the recomputed end of the block would be on a layer no
higher than its beginning: a cut inside the block would make one layer recompute all of it, with
copies of the other's parameters or residuals.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpass._jax import Atom, Literal, Var
from hetpass.frontend.dataflow import Dataflow
from hetpass.frontend.structure import Key, equation_key, literal_key


def recomputed_blocks(
    flow: Dataflow, backward: Sequence[bool], recomputed: Sequence[bool], free: Sequence[bool]
) -> list[bool]:
    """Per equation, whether a cut before it would part what is recomputed together.

    A recomputed equation stands for the forward one that does the same on the same values. One
    that needs only inputs joins nothing: it may be computed anywhere.

    Args:
      backward, recomputed: one per equation; what is recomputed is backward.
      free: one per equation: depends on inputs only.
    """
    inside = [False] * len(flow.eqns)
    if not any(recomputed):
        return inside
    twins = _forward_twins(flow, backward, recomputed)
    earliest: dict[int, int] = {}  # recomputed equation -> first forward one it starts from
    change = [0] * (len(flow.eqns) + 1)
    for number, operands in enumerate(flow.operands):
        twin = twins.get(number)
        if twin is None or free[twin]:
            continue
        first = min([twin, *(earliest[o] for o in operands if o in earliest)])
        earliest[number] = first
        change[first + 1] += 1
        change[twin + 1] -= 1
    depth = 0
    for number in range(len(flow.eqns)):
        depth += change[number]
        inside[number] = depth > 0
    return inside


def _forward_twins(
    flow: Dataflow, backward: Sequence[bool], recomputed: Sequence[bool]
) -> dict[int, int]:
    """Recomputed equation -> the forward equation that computes the same."""
    same: dict[Var, Var] = {}
    seen: dict[Key, int] = {}
    twins: dict[int, int] = {}

    def atom_key(atom: Atom) -> Key:
        return literal_key(atom) if isinstance(atom, Literal) else same.get(atom, atom)

    for number, eqn in enumerate(flow.eqns):
        if backward[number] and not recomputed[number]:
            continue
        key = equation_key(eqn), tuple(atom_key(a) for a in eqn.invars)
        if not backward[number]:
            seen.setdefault(key, number)
        elif key in seen:
            twins[number] = seen[key]
            same.update(zip(eqn.outvars, flow.eqns[seen[key]].outvars, strict=True))
    return twins
