"""What Shardy says of an equation: which dimensions of operands and results go together.

The stock jaxlib carries Shardy's passes. `sdy-populate-op-sharding-rules` attaches a rule to every
operation of a lowered module: `([i, k], [k, j]) -> ([i, j]) reduction={k}` for a matrix product.
Equations are lowered together, each as a function of its own, and their rules read as plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from hetpass import _jax
from hetpass._jax import JaxprEqn
from hetpass.ir.operation_graph import ShardingRule


def sharding_rules(eqns: Sequence[JaxprEqn]) -> tuple[ShardingRule | None, ...]:
    """One rule per equation; None for one that lowers to several operations, or to none.

    All are lowered in one module. Equations of control flow have no rule of their own.
    """
    found: dict[int, ShardingRule] = {}
    chosen = [k for k, e in enumerate(eqns) if _is_plain(e)]
    if chosen:
        named = {f"equation_{k}": eqns[k] for k in chosen}
        functions = [_function(name, eqn) for name, eqn in named.items()]
        operands = [_operands(eqn) for eqn in named.values()]

        def together(values: list[list[Any]]) -> list[Any]:
            return [f(*v) for f, v in zip(functions, values, strict=True)]

        module = jax.jit(together, keep_unused=True).lower(operands).compiler_ir("stablehlo")
        for name, parts in _jax.operation_sharding_rules(module).items():
            if name in named and len(parts) == 1:
                found[int(name.removeprefix("equation_"))] = ShardingRule(*parts[0])
    return tuple(found.get(k) for k in range(len(eqns)))


def _is_plain(eqn: JaxprEqn) -> bool:
    nested = any(_jax.is_jaxpr(p) for p in eqn.params.values())
    return not nested and not eqn.effects and eqn.primitive.name not in ("cond",)


def _function(name: str, eqn: JaxprEqn) -> Any:
    def equation(*values: Any) -> Any:
        return _jax.bind_equation(eqn, values)

    equation.__name__ = equation.__qualname__ = name
    return jax.jit(equation, keep_unused=True)


def _operands(eqn: JaxprEqn) -> list[Any]:
    return [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
