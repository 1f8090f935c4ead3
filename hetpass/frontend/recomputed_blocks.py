"""What `jax.checkpoint` recomputes in one piece must stay in one layer.

The backward pass of a checkpointed block first runs its forward equations again, then transposes
them. Backward values travel down only, so the recomputed end of the block would be on a layer no
higher than its beginning: a cut inside the block would make one layer recompute all of it, with
copies of the other's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpass.frontend.dataflow import Dataflow
from hetpass.frontend.structure import Key, equation_key


def recomputed_blocks(
    flow: Dataflow,
    heavy: Sequence[int],
    recomputed: Sequence[bool],
    roots: Sequence[frozenset[object]],
) -> tuple[tuple[int, int], ...]:
    """(first, last) heavy forward equations that are recomputed one from the other.

    A recomputed equation is known by what it does and the parameters that it reads.

    Args:
      heavy: forward equations, in program order.
      recomputed: one per equation.
      roots: per equation the parameters that it reads.
    """
    twins: dict[Key, int] = {}
    for number in heavy:
        if roots[number]:
            twins.setdefault((equation_key(flow.eqns[number]), roots[number]), number)
    earliest: dict[int, int] = {}  # recomputed equation -> first heavy one it is recomputed from
    blocks = []
    for number, operands in enumerate(flow.operands):
        if not recomputed[number]:
            continue
        before = [earliest[o] for o in operands if o in earliest]
        twin = None
        if roots[number]:
            twin = twins.get((equation_key(flow.eqns[number]), roots[number]))
        if twin is not None:
            inside = [b for b in before if b < twin]
            if inside:
                blocks.append((min(inside), twin))
            before.append(twin)
        if before:
            earliest[number] = min(before)
    return tuple(blocks)
