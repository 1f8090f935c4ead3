"""Numbers that travel together, where their readers differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hetpass as hp
from hetpass.ir.program import Read, Staged
from tests.equality import differences


def late_readers(params: Any, batch: Any) -> Any:
    """Every stage needs the last one's part of a norm first, and its largest gradient last."""

    def loss(params: Any) -> Any:
        x = batch["x"]
        for number, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = hp.stage_boundary(x) if number < len(params) - 1 else x
        return (x**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum((g**2).sum() for g in grads))
    largest = jnp.abs(grads[-1]).max()
    steps = [g / (1.0 + norm) for g in grads]
    steps[0] = steps[0] * largest  # so it leaves the last stage early, for the others too
    taken = sum(jnp.abs(s).sum() for s in steps)
    new = [w - (s * jnp.cos(taken)) * largest for w, s in zip(params, steps, strict=True)]
    return new, value, grads


def test_a_joined_array_is_freed_by_the_last_that_reads_a_part() -> None:
    draw = np.random.default_rng(0)
    params = [jnp.asarray(draw.normal(size=(6, 6), scale=0.5), jnp.float32) for _ in range(3)]
    batch = {"x": jnp.asarray(draw.normal(size=(4, 6)), jnp.float32)}
    step = hp.het_parallelize(
        late_readers,
        cluster=hp.Cluster.emulated({"a": 1, "b": 1, "c": 1}),
        num_microbatches=2,
        plan="a: 0 | b: 1 | c: 2",
        donate_argnums=(),
    )
    compiled = step.compiled_for(params, batch)
    assert _read_by_several_of_a_stage(compiled.staged)
    assert differences(compiled(params, batch), jax.jit(late_readers)(params, batch)) == []


def _read_by_several_of_a_stage(staged: Staged) -> bool:
    joined = {slot.index for slot in staged.slots if " values of " in slot.name}
    readers = [s.slot for f in staged.fragments for s in f.inputs if isinstance(s, Read)]
    return any(readers.count(slot) > 1 for slot in joined)
