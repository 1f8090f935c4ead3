"""Runs a StepProgram in plain Python: what the definition of prologue, region, epilogue says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hetpass import _jax
from hetpass.ir.kinds import Batched
from hetpass.ir.program import Joined, SliceInput, StepProgram, WholeInput

_COMBINE = {
    "sum": lambda a, b: a + b,
    "total": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "or": jnp.bitwise_or,
    "and": jnp.bitwise_and,
}


def evaluate(
    program: StepProgram, args: Sequence[Any], kwargs: Any = None, compiled: bool = False
) -> list[Any]:
    """The step's output leaves for full-batch arguments.

    `compiled`: what comes before the region, the region, and what follows are compiled once each,
    which is faster when their operations are new to JAX.
    """
    maybe_jit = jax.jit if compiled else (lambda f: f)
    leaves = jax.tree.leaves((tuple(args), kwargs or {}))
    values = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in leaves]
    known, microbatches = maybe_jit(partial(_before, program))(values, program.traced.constants)
    region = maybe_jit(partial(jax.core.eval_jaxpr, program.region, ()))
    rounds = [region(*arguments) for arguments in microbatches]
    return maybe_jit(partial(_after, program))(known, rounds)


def _before(
    program: StepProgram, values: Sequence[Any], constants: Sequence[Any]
) -> tuple[list[Any], list[list[Any]]]:
    """Every full-batch value before the region, and the region's arguments by microbatch."""
    env = dict(zip(program.traced.jaxpr.invars, [*values, *constants], strict=True))
    _run(program.prologue, env)
    count = program.num_microbatches
    examples = (program.traced.batch_size or count) // count
    return list(env.values()), [_microbatch(program, env, m, examples) for m in range(count)]


def _after(program: StepProgram, known: Sequence[Any], rounds: Sequence[Any]) -> list[Any]:
    """Combine the microbatches' results, and run the epilogue."""
    made = [v for e in program.prologue for v in e.outvars]
    env = dict(zip([*program.traced.jaxpr.invars, *made], known, strict=True))
    for k, output in enumerate(program.region_outputs):
        parts = [r[k] for r in rounds]
        if isinstance(output, Joined):
            env[output.target] = join(parts, output.kind)
            continue
        if output.op == "same":
            env[output.target] = parts[-1]
            continue
        total = parts[0].astype(output.dtype)
        for part in parts[1:]:
            total = _COMBINE[output.op](total, part.astype(output.dtype))
        env[output.target] = total.astype(output.target.aval.dtype)
    _run(program.epilogue, env)
    return [a.val if isinstance(a, _jax.Literal) else env[a] for a in program.outvars]


def _run(eqns: Sequence[Any], env: dict[Any, Any]) -> None:
    made = [v for e in eqns for v in e.outvars]
    jaxpr = _jax.make_jaxpr_value(list(env), made, eqns)
    env.update(zip(made, jax.core.eval_jaxpr(jaxpr, (), *env.values()), strict=True))


def _microbatch(program: StepProgram, env: dict[Any, Any], m: int, examples: int) -> list[Any]:
    """Microbatch m's arguments of the region."""
    values = []
    for var, source in zip(program.region.invars, program.region_inputs, strict=True):
        if isinstance(source, WholeInput):
            values.append(env[source.var])
        elif isinstance(source, SliceInput):
            values.append(cut(env[source.var], source.kind, m, program.num_microbatches))
        else:
            values.append(jnp.int32(m * examples))
        assert values[-1].shape == var.aval.shape
    return values


def cut(x: Any, kind: Batched, m: int, count: int) -> Any:
    """Microbatch m's examples."""
    dim, outer = kind.dim, kind.outer or 1
    size = x.shape[dim] // outer // count
    parts = x.reshape(*x.shape[:dim], outer, count, size, *x.shape[dim + 1 :])
    return parts.take(m, axis=dim + 1).reshape(*x.shape[:dim], outer * size, *x.shape[dim + 1 :])


def join(parts: Sequence[Any], kind: Batched) -> Any:
    """The full value from the microbatches' slices."""
    dim, outer = kind.dim, kind.outer or 1
    shape = parts[0].shape
    opened = [p.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]) for p in parts]
    full = (*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :])
    return jnp.stack(opened, axis=dim + 1).reshape(full)
