"""One sharding rule for an equation that lowers to several operations.

Every dimension of every value is a list of tokens (`dimension_tokens`). A rule says that a
dimension of one value and one of another are made of the same factors: their tokens become one.
What is left on the function's arguments and results in the end is its rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hetpass._jax import LoweredBody, LoweredOperation
from hetpass.analysis.dimension_tokens import DimensionTokens
from hetpass.ir.operation_graph import Factors, ShardingRule

_FREE = ("stablehlo.constant", "stablehlo.iota")
"""What makes values from nothing: any part can be made where it is needed."""


def composed_rule(
    function: LoweredBody,
    functions: Mapping[str, LoweredBody],
    shapes: Mapping[int, tuple[int, ...]],
) -> ShardingRule:
    """The rule of a function from its arguments to its results.

    A factor that some operation inside cannot shard stays whole, and so does one that is reduced
    inside and then used again: sharding it would communicate within the equation.
    """
    composition = _Composition(functions, shapes)
    composition.run(function)
    return composition.rule(function)


class _Composition:
    """Tokens under unification; local to `composed_rule`."""

    def __init__(
        self, functions: Mapping[str, LoweredBody], shapes: Mapping[int, tuple[int, ...]]
    ) -> None:
        self.functions, self.shapes = functions, shapes
        self.tokens = DimensionTokens()
        self.values: dict[int, list[list[int]]] = {}
        self.whole: list[int] = []
        self.permuted: list[int] = []
        self.reduced: list[tuple[int, int]] = []  # token, elements of what the reduction makes

    def unify(self, left: Sequence[int], right: Sequence[int]) -> None:
        """The two lists are one dimension; where sizes do not divide, what is left is whole."""
        self.whole += self.tokens.unify(left, right)

    def dims(self, value: int) -> list[list[int]]:
        if value not in self.values:
            self.values[value] = [[self.tokens.token(size)] for size in self.shapes[value]]
        return self.values[value]

    def unify_values(self, left: int, right: int) -> None:
        for a, b in zip(self.dims(left), self.dims(right), strict=True):
            self.unify(a, b)

    # -- Operations ---------------------------------------------------------------------------

    def run(self, body: LoweredBody) -> None:
        for operation in body.operations:
            self.operation(operation)

    def operation(self, op: LoweredOperation) -> None:
        if op.rule is not None:
            self.apply(op)
        elif op.callee is not None and op.callee in self.functions:
            self.call(op, self.functions[op.callee])
        elif op.name == "stablehlo.while":
            self.loop(op)
        elif op.name in ("stablehlo.case", "stablehlo.if"):
            for body in op.bodies:
                self.run(body)
                for made, result in zip(body.returned, op.results, strict=True):
                    self.unify_values(made, result)
        elif op.name == "chlo.top_k":
            self.top_k(op)
        elif op.name == "stablehlo.optimization_barrier":
            for operand, result in zip(op.operands, op.results, strict=True):
                self.unify_values(operand, result)
        elif op.name.startswith("chlo.") and self.is_elementwise(op):
            for other in (*op.operands[1:], *op.results):
                self.unify_values(op.operands[0], other)
        elif op.name not in _FREE:
            for value in (*op.operands, *op.results):
                self.whole += [t for dim in self.dims(value) for t in dim]

    def is_elementwise(self, op: LoweredOperation) -> bool:
        return len({self.shapes[v] for v in (*op.operands, *op.results)}) == 1

    def top_k(self, op: LoweredOperation) -> None:
        """Along all dimensions but the last every row is for itself."""
        operand = self.dims(op.operands[0])
        for result in op.results:
            for a, b in zip(operand[:-1], self.dims(result)[:-1], strict=True):
                self.unify(a, b)
            self.whole += self.dims(result)[-1]
        self.whole += operand[-1]

    def loop(self, op: LoweredOperation) -> None:
        """What the loop carries is cut alike before, inside and after."""
        for body in op.bodies:
            for outer, inner in zip(op.operands, body.arguments, strict=True):
                self.unify_values(outer, inner)
            self.run(body)
        for outer, made, result in zip(
            op.operands, op.bodies[-1].returned, op.results, strict=True
        ):
            self.unify_values(outer, made)
            self.unify_values(outer, result)

    def call(self, op: LoweredOperation, function: LoweredBody) -> None:
        """The function's operations with values of their own."""
        names = dict(zip(function.arguments, op.operands, strict=True))
        inside = _Composition(self.functions, self.shapes)
        inside.__dict__.update({k: v for k, v in self.__dict__.items() if k != "values"})
        inside.values = {inner: self.dims(outer) for inner, outer in names.items()}
        inside.run(function)
        for made, result in zip(function.returned, op.results, strict=True):
            for a, b in zip(inside.dims(made), self.dims(result), strict=True):
                self.unify(a, b)

    def apply(self, op: LoweredOperation) -> None:
        assert op.rule is not None
        sizes, operands, results, reduction, whole, permutation = op.rule
        tokens = [self.tokens.token(size) for size in sizes]
        for value, dims in zip((*op.operands, *op.results), (*operands, *results), strict=True):
            for own, size, factors in zip(self.dims(value), self.shapes[value], dims, strict=True):
                if math.prod(sizes[f] for f in factors) == size:
                    self.unify(own, [tokens[f] for f in factors])
                else:  # a slice: part of the factor
                    self.whole += [*own, *(tokens[f] for f in factors)]
        self.whole += [tokens[f] for f in whole]
        self.permuted += [tokens[f] for f in permutation]
        if len(op.results) > 1:  # the compiler gathers for a reduction of several values
            self.whole += [tokens[f] for f in reduction]
        elements = math.prod(self.shapes[op.results[0]])
        self.reduced += [(tokens[f], elements) for f in reduction]

    # -- The outcome --------------------------------------------------------------------------

    def rule(self, function: LoweredBody) -> ShardingRule:
        numbers: dict[int, int] = {}

        def factors(values: Sequence[int]) -> Factors:
            return tuple(
                tuple(
                    tuple(numbers.setdefault(t, len(numbers)) for t in self.tokens.leaves(dim))
                    for dim in self.dims(value)
                )
                for value in values
            )

        operands, results = factors(function.arguments), factors(function.returned)
        made = {f for value in results for dim in value for f in dim}
        finished = {math.prod(self.shapes[v]) for v in function.returned}

        def numbered(tokens: Sequence[int]) -> set[int]:
            return {numbers[t] for t in self.tokens.leaves(tokens) if t in numbers}

        reduced = numbered([t for t, _ in self.reduced])
        inside = numbered([t for t, elements in self.reduced if elements not in finished])
        whole = numbered(self.whole) | (reduced & (made | inside))
        return ShardingRule(
            sizes=tuple(self.tokens.sizes[t] for t in numbers),
            operands=operands,
            results=results,
            reduction=frozenset(reduced - made),
            whole=frozenset(whole),
            permutation=frozenset(numbered(self.permuted)),
        )
