"""An equation for 1 / D of the examples: what runs in one part of a split equation.

Most equations take their sizes from their operands, so the same equation serves any number of
examples. Equations that hold jaxprs (`scan`, `cond`, `while`) do not: their bodies are typed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetpass._jax import JaxprEqn, bind_equation, is_jaxpr
from hetpass.backend.layout import batch_layout
from hetpass.ir.kinds import Kind

Part = Callable[..., list[Any]]


def narrowed(eqn: JaxprEqn, operand_kinds: Sequence[Kind | None], parts: int) -> Part | None:
    """A function from the operands of one part to its results; None if there is none.

    Only for equations with a partial result, so that no parameter that gives the shape of a result
    depends on the batch.
    """
    has_batch = any(k is not None and batch_layout(k) is not None for k in operand_kinds)
    if has_batch and any(_holds_jaxpr(value) for value in eqn.params.values()):
        return None
    return lambda *operands: bind_equation(eqn, operands)


def _holds_jaxpr(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_jaxpr(item) for item in value)
    return is_jaxpr(value)
