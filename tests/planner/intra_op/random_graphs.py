"""Random small operation graphs: operations forward and backward, parameters, residuals."""

from __future__ import annotations

import random

from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import Link
from hetpass.ir.operation_graph import Operation, OperationGraph, Parameter, ShardingRule, Value
from hetpass.planner.intra_op.setting import Setting

SIZES = (4, 6, 8, 16)


def random_graph(rng: random.Random, most_operations: int = 8) -> OperationGraph:
    """Products of matrices and elementwise operations, the second half of them backward."""
    count = rng.randint(1, most_operations)
    values = [Value((rng.choice(SIZES), rng.choice(SIZES)), 2e5, "activation")]
    operations: list[Operation] = []
    parameters: list[int] = []
    usable = [0]
    for k in range(count):
        phase = "forward" if 2 * k < count else "backward"
        operand = rng.choice(usable[-3:])
        rows, columns = values[operand].shape
        draw = rng.random()
        if draw < 0.5:
            if parameters and rng.random() < 0.4:
                other = rng.choice(parameters)
            else:
                values.append(Value((columns, rng.choice(SIZES)), 2e5, "parameter"))
                other = len(values) - 1
                parameters.append(other)
            if values[other].shape[0] != columns:
                other = None
        else:
            other = None
        if other is not None:
            width = values[other].shape[1]
            rule = ShardingRule(
                (rows, columns, width),
                (((0,), (1,)), ((1,), (2,))),
                (((0,), (2,)),),
                frozenset({1}),
            )
            made, operands, more = (rows, width), (operand, other), {"sums": True}
        elif draw < 0.75:
            alike = [v for v in usable if values[v].shape == (rows, columns)]
            operands = (operand, rng.choice(alike)) if rng.random() < 0.6 else (operand,)
            rule = ShardingRule((rows, columns), (((0,), (1,)),) * len(operands), (((0,), (1,)),))
            made, more = (rows, columns), {"linear": rng.random() < 0.7}
        elif draw < 0.87:
            rule = ShardingRule((rows, columns), (((0,), (1,)),), (((1,), (0,)),))
            made, operands, more = (columns, rows), (operand,), {"linear": True}
        elif draw < 0.94:
            rule = ShardingRule(
                (rows, columns), (((0,), (1,)),), (((0,), (1,)),), whole=frozenset({1})
            )
            made, operands, more = (rows, columns), (operand,), {}
        else:
            rule, made, operands, more = None, (rows, columns), (operand,), {}
        values.append(Value(made, 2e5))
        flops, traffic = rng.choice((0.0, 1e9, 1e10)), rng.choice((0.0, 1e7))
        operations.append(
            Operation(
                f"op{k}",
                phase,
                operands,
                (len(values) - 1,),
                rule,
                flops,
                "float32",
                traffic,
                **more,
            )
        )
        usable.append(len(values) - 1)
    return _finished(rng, values, operations, parameters)


def _finished(rng, values, operations, parameters) -> OperationGraph:
    made = [v for operation in operations for v in operation.results]
    read = {v for operation in operations for v in operation.operands}
    ends = [v for v in made if v not in read]
    trained, accumulated = [], []
    for v in parameters:
        alike = [e for e in ends if values[e].shape == values[v].shape and e not in accumulated]
        gradient = rng.choice(alike) if alike and rng.random() < 0.7 else None
        if gradient is not None:
            accumulated.append(gradient)
        size = values[v].size_bytes
        trained.append(Parameter(v, gradient, 6 * size, 2 * size))
    for e in ends:
        if e not in accumulated and rng.random() < 0.3:
            accumulated.append(e)
    out = tuple(e for e in ends if e not in accumulated)[:1]
    return OperationGraph(
        tuple(values),
        tuple(operations),
        tuple(trained),
        activations_out=out,
        accumulated=tuple(accumulated),
    )


def random_setting(rng: random.Random, axes: int) -> Setting:
    """One or two axes with links of any speed; every capability."""
    sizes = (rng.choice((2, 4)),) if axes == 1 else (2, rng.choice((2, 3)))
    links = tuple(Link(rng.choice((0.0, 1e-5)), rng.choice((1e9, 1e10, 1e11))) for _ in sizes)
    mesh = LinkedMesh(
        tuple(zip(("data", "model"), sizes, strict=False)),
        links,
        reduce_scatter=rng.random() < 0.7,
        merges_reductions=rng.random() < 0.5,
    )
    return Setting(
        mesh,
        find_kind(rng.choice(("V100-16", "A100-40"))),
        num_microbatches=rng.choice((1, 4)),
        in_flight=rng.choice((1, 3)),
        recompute=rng.random() < 0.3,
    )
