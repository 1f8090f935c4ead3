"""What Shardy says of an equation: which dimensions of operands and results go together.

The stock jaxlib carries Shardy's passes. `sdy-populate-op-sharding-rules` attaches a rule to every
operation of a lowered module: `([i, k], [k, j]) -> ([i, j]) reduction={k}` for a matrix product.
All distinct equations are lowered in one module, each as a function of its own; where one lowers to
several operations their rules are composed (`compose_rules`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax

from hetpass import _jax
from hetpass._jax import JaxprEqn
from hetpass.analysis.compose_rules import composed_rule
from hetpass.ir.operation_graph import Factors, ShardingRule

SCALAR_BODIES = frozenset(
    "reduce reduce_window scatter scatter-add scatter-mul scatter-min scatter-max scatter_add "
    "scatter_sub scatter-sub select_and_scatter sort".split()
)
"""Primitives whose jaxprs combine two elements: no programs of their own."""

_REPLACING_SCATTERS = ("scatter", "scatter-mul", "scatter-min", "scatter-max")
_RIGHT_AT_MANY_INDICES = ("scatter-add", "scatter-sub", "gather")


def indexes_wrongly(eqn: JaxprEqn, num_devices: int = 32) -> bool:
    """Whether it is a scatter or gather that is wrong where a dimension that it indexes is cut.

    XLA (jaxlib 0.10 to 0.12, CPU) writes one of a single index as a slice and its update, reads
    outside of its part on the devices that do not hold the index, and fuses that read with the
    cut: `dynamic_slice(dynamic_slice(x, i), j)` becomes `dynamic_slice(x, i + j)`, which does not
    clamp j. Gathers, and scatters that add, are right where a device has two indices or more.

    Args:
      num_devices: at most so many share the indices.
    """
    if eqn.primitive.name in _RIGHT_AT_MANY_INDICES:
        indices = eqn.invars[1].aval
        return indices.size < 2 * num_devices * max(1, indices.shape[-1])
    return eqn.primitive.name in _REPLACING_SCATTERS


def holds_program(eqn: JaxprEqn) -> bool:
    """Whether the equation runs other equations: a loop, a branch, a call."""
    if eqn.primitive.name in SCALAR_BODIES:
        return False
    return bool(_jax.nested_jaxprs(eqn))


def sharding_rules(eqns: Sequence[JaxprEqn]) -> tuple[ShardingRule | None, ...]:
    """One rule per equation, its operands and results as the equation has them.

    None for an equation that runs others, has effects, or cannot be lowered alone: its operands
    and results stay whole. Factors of size 1 are left out.
    """
    numbers: dict[Hashable, int] = {}
    chosen: list[JaxprEqn] = []
    keys = []
    for eqn in eqns:
        key = _key(eqn) if not holds_program(eqn) and not eqn.effects else None
        keys.append(key)
        if key is not None and key not in numbers:
            numbers[key] = len(chosen)
            chosen.append(eqn)
    rules = _lowered_rules(chosen)
    return tuple(None if key is None else rules[numbers[key]] for key in keys)


def _key(eqn: JaxprEqn) -> Hashable:
    """Equal for equations of equal rules: what they do, and on values of which types."""
    avals = tuple(a.aval.str_short() for a in (*eqn.invars, *eqn.outvars))
    params = tuple((k, str(v)) for k, v in sorted(eqn.params.items()))
    return eqn.primitive.name, avals, params


def _lowered_rules(eqns: Sequence[JaxprEqn]) -> list[ShardingRule | None]:
    """The rules of distinct equations, all from one module; one by one where that fails."""
    if not eqns:
        return []
    try:
        return _module_rules(eqns)
    except Exception:  # whatever a lowering raises; then each stands for itself
        if len(eqns) == 1:
            return [None]
        middle = len(eqns) // 2
        return _lowered_rules(eqns[:middle]) + _lowered_rules(eqns[middle:])


def _module_rules(eqns: Sequence[JaxprEqn]) -> list[ShardingRule | None]:
    functions = [_function(f"equation_{k}", eqn) for k, eqn in enumerate(eqns)]
    operands = [_operands(eqn) for eqn in eqns]

    def together(values: list[list[Any]]) -> list[Any]:
        return [f(*v) for f, v in zip(functions, values, strict=True)]

    module = jax.jit(together).lower(operands).compiler_ir("stablehlo")
    bodies, shapes = _jax.sharding_rules_of(module)
    rules: list[ShardingRule | None] = []
    for k, eqn in enumerate(eqns):
        body = bodies.get(f"equation_{k}")
        composed = None if body is None else composed_rule(body, bodies, shapes)
        if composed is not None:
            composed = _without_words(composed, eqn)
            if eqn.primitive.name == "conv_general_dilated":
                composed = _convolution_rule(composed, eqn)
            if indexes_wrongly(eqn):
                composed = _indexing_rule(composed, eqn)
        rules.append(composed)
    return rules


def _indexing_rule(rule: ShardingRule, eqn: JaxprEqn) -> ShardingRule:
    """Dimensions that are indexed stay whole."""
    numbers = eqn.params["dimension_numbers"]
    is_gather = eqn.primitive.name == "gather"
    dims = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
    into = {factor for dim in dims for factor in rule.operands[0][dim]}
    return replace(rule, whole=rule.whole | into)


def _convolution_rule(rule: ShardingRule, eqn: JaxprEqn) -> ShardingRule:
    """Windows reach over every cut of a spatial dimension, so these stay whole.

    (Shardy calls a spatial dimension reduced where the window is as large as the image, as in the
    gradient of the weights; with padding it is not.) With groups only the examples are free: the
    partitioner gets a cut of grouped features wrong.
    """
    dims = eqn.params["dimension_numbers"]
    specs = (dims.lhs_spec, dims.rhs_spec, dims.out_spec)
    sides = (rule.operands[0], rule.operands[1], rule.results[0])
    whole = {f for spec, side in zip(specs, sides, strict=True) for d in spec[2:] for f in side[d]}
    if eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1:
        free = set(sides[0][dims.lhs_spec[0]]) & set(sides[2][dims.out_spec[0]])
        whole = set(range(len(rule.sizes))) - free
        if eqn.params["batch_group_count"] > 1:
            whole = set(range(len(rule.sizes)))
    return replace(rule, whole=rule.whole | whole)


def _without_words(rule: ShardingRule, eqn: JaxprEqn) -> ShardingRule:
    """PRNG keys are arrays of words below: their last dimension is no dimension of the value."""

    def trimmed(values: Factors, atoms: Sequence[Any]) -> Factors:
        return tuple(
            dims[: len(getattr(a.aval, "shape", ()))] for dims, a in zip(values, atoms, strict=True)
        )

    return ShardingRule(
        rule.sizes,
        trimmed(rule.operands, eqn.invars),
        trimmed(rule.results, eqn.outvars),
        rule.reduction,
        rule.whole,
        rule.permutation,
    )


def _function(name: str, eqn: JaxprEqn) -> Any:
    def equation(*values: Any) -> Any:
        return _jax.bind_equation(eqn, values)

    equation.__name__ = equation.__qualname__ = name
    return jax.jit(equation, keep_unused=True)


def _operands(eqn: JaxprEqn) -> list[Any]:
    return [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
