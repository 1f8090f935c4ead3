"""Creates a state in place: every leaf is born on its own stage, with its own sharding.

The function that makes the whole state is cut, per mesh, down to the leaves that live there (dead
code goes), compiled with their shardings and run. No device, and not the host, ever holds the
whole state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetpass._jax import drop_dead_code, open_jaxpr
from hetpass.backend.compile import CompiledStep
from hetpass.backend.reshard import plan_reshard, put


def input_shardings(compiled: CompiledStep) -> tuple[NamedSharding | None, ...]:
    """Per flat input of the step: where it is used as it is; None if it is cut into microbatches
    or not used at all."""
    found: list[NamedSharding | None] = [None] * len(compiled.staged.layered.program.traced.inputs)
    for feed, place in zip(compiled.staged.feeds, compiled.placements, strict=True):
        if place.cut is None:
            found[feed.input] = place.target
    return tuple(found)


def create(
    jaxpr: Any, arguments: Sequence[Any], shardings: Sequence[NamedSharding]
) -> list[jax.Array]:
    """The outputs of a closed jaxpr, each made where its sharding says.

    Args:
      jaxpr: closed (as `jax.make_jaxpr` gives it); its outputs are the leaves of the state. What
        several meshes need (a key, a shared table) is computed on each of them.
      arguments: one per input; small: they are copied to every mesh.
      shardings: one per output.
    """
    results: list[Any] = [None] * len(shardings)
    by_mesh: dict[Mesh, list[int]] = {}
    for number, sharding in enumerate(shardings):
        by_mesh.setdefault(sharding.mesh, []).append(number)
    for mesh, numbers in by_mesh.items():
        made = create_on(mesh, jaxpr, arguments, {n: shardings[n] for n in numbers})
        for number, leaf in zip(numbers, made, strict=True):
            results[number] = leaf
    return results


def create_on(
    mesh: Mesh, jaxpr: Any, arguments: Sequence[Any], wanted: Mapping[int, NamedSharding]
) -> Sequence[jax.Array]:
    """Some outputs of a closed jaxpr, by number and in their order, all on one mesh."""
    whole, consts = open_jaxpr(jaxpr)
    keep = [number in wanted for number in range(len(whole.outvars))]
    part, used = drop_dead_code(whole, keep, [False] * len(whole.invars))
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = [
        _on(everywhere, value) for value, needed in zip(arguments, used, strict=True) if needed
    ]
    run = jax.jit(
        lambda *values: jax.core.eval_jaxpr(part, consts, *values),
        out_shardings=[wanted[number] for number in sorted(wanted)],
    )
    return run(*placed)


def _on(sharding: NamedSharding, value: Any) -> jax.Array:
    if not isinstance(value, jax.Array):
        return put(np.asarray(value), sharding)
    if not sharding.is_fully_addressable:
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = put(np.asarray(jax.random.key_data(value)), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        return put(np.asarray(value), sharding)
    itemsize = getattr(value.dtype, "itemsize", 0)
    return plan_reshard(value.sharding, sharding, value.shape, itemsize)(value)
