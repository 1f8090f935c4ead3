"""Equations that XLA's partitioner gets wrong, and ways to run them that it has no part in.

Seen with jaxlib 0.10 to 0.12 on CPU; the numbers come out wrong without a word:

  scatters and gathers: where a mesh axis cuts a dimension that is indexed (`indexes_wrongly`);
  Fourier transforms: where one cuts a dimension that is transformed, the process ends on a failed
    check, or digits are lost;
  convolutions: batched over parts they are grouped, and a grouped convolution is wrong where a part
    has one example or the mesh has two axes, or ends the process on a failed check;
  others can be written in other words: `backend/rewritten`.

What one of these is inside of (a loop, a branch) shares its fate, since its body is cut as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from hetpass._jax import JaxprEqn, holds
from hetpass.analysis.sharding_rules import indexes_wrongly
from hetpass.backend.rewritten import bind

Function = Callable[..., Sequence[Any]]


def wrong_when_batched(eqn: JaxprEqn, mesh: AbstractMesh) -> bool:
    """Whether it may be wrong once `vmap` has added a dimension that an axis cuts."""
    return holds(eqn, lambda e: _is_convolution(e) or _is_wrong(e, mesh))


def bind_whole(eqn: JaxprEqn, operands: Sequence[Any], mesh: AbstractMesh) -> list[Any]:
    """`bind`, but every device runs it whole where cuts of its operands may make it wrong."""
    if mesh.size > 1 and holds(eqn, lambda e: _is_wrong(e, mesh)):
        return list(everywhere(lambda *values: bind(eqn, values), mesh)(*operands))
    return bind(eqn, operands)


def _is_wrong(eqn: JaxprEqn, mesh: AbstractMesh) -> bool:
    return eqn.primitive.name == "fft" or indexes_wrongly(eqn, mesh.size)


def _is_convolution(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "conv_general_dilated"


def everywhere(function: Function, mesh: AbstractMesh) -> Function:
    """Every device of the mesh runs the function on whole operands."""
    whole = PartitionSpec()

    def run(*operands: Any) -> Sequence[Any]:
        return jax.shard_map(
            lambda *values: tuple(function(*values)),
            mesh=mesh,
            in_specs=(whole,) * len(operands),
            out_specs=whole,
            check_vma=False,
        )(*operands)

    return run


def each_its_part(
    function: Function, mesh: AbstractMesh, axis: str, in_parts: Sequence[bool]
) -> Function:
    """Each device along the axis runs the function on its part, those along others the same one.

    Args:
      in_parts: per operand, whether it has a leading dimension of parts. Results have one.
    """
    along, whole = PartitionSpec(axis), PartitionSpec()

    def one(*values: Any) -> tuple[Any, ...]:
        mine = [v[0] if cut else v for v, cut in zip(values, in_parts, strict=True)]
        return tuple(jnp.expand_dims(result, 0) for result in function(*mine))

    return jax.shard_map(
        one,
        mesh=mesh,
        in_specs=tuple(along if cut else whole for cut in in_parts),
        out_specs=along,
        axis_names=set(mesh.axis_names),
        check_vma=False,
    )
