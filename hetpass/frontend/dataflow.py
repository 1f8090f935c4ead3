"""Who makes and who reads each value of a jaxpr, by equation number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetpass._jax import Jaxpr, JaxprEqn, Var


@dataclass(frozen=True)
class Dataflow:
    """Edges between the equations of a jaxpr.

    Attributes:
      eqns: the equations, a topological order.
      producer: result -> the number of the equation that makes it. Inputs are absent.
      operands: per equation, the numbers of the equations it reads, ascending.
      readers: value -> the numbers of the equations that read it, ascending; absent if none.
      successors: per equation, the numbers of the equations that read it, ascending.
      outvars: the jaxpr's results.
    """

    eqns: tuple[JaxprEqn, ...]
    producer: Mapping[Var, int]
    operands: tuple[tuple[int, ...], ...]
    readers: Mapping[Var, tuple[int, ...]]
    successors: tuple[tuple[int, ...], ...]
    outvars: frozenset[Var]


def dataflow(jaxpr: Jaxpr) -> Dataflow:
    """Index a jaxpr."""
    producer: dict[Var, int] = {}
    readers: dict[Var, dict[int, None]] = {}
    operands: list[tuple[int, ...]] = []
    successors: list[dict[int, None]] = [{} for _ in jaxpr.eqns]
    for number, eqn in enumerate(jaxpr.eqns):
        read = [a for a in eqn.invars if isinstance(a, Var)]
        for var in read:
            readers.setdefault(var, {})[number] = None
        made_by = sorted({producer[v] for v in read if v in producer})
        for other in made_by:
            successors[other][number] = None
        operands.append(tuple(made_by))
        for var in eqn.outvars:
            producer[var] = number
    return Dataflow(
        eqns=tuple(jaxpr.eqns),
        producer=producer,
        operands=tuple(operands),
        readers={v: tuple(r) for v, r in readers.items()},
        successors=tuple(tuple(s) for s in successors),
        outvars=frozenset(v for v in jaxpr.outvars if isinstance(v, Var)),
    )


def closed_forward(flow: Dataflow, seeds: Sequence[bool]) -> list[bool]:
    """The seeds and everything that depends on one."""
    marked = list(seeds)
    for number, operands in enumerate(flow.operands):
        marked[number] = marked[number] or any(marked[o] for o in operands)
    return marked


def only_from(flow: Dataflow, allowed: Callable[[int], bool]) -> list[bool]:
    """The allowed equations whose operands are inputs or such equations again."""
    flags: list[bool] = []
    for number, operands in enumerate(flow.operands):
        flags.append(allowed(number) and all(flags[o] for o in operands))
    return flags
