"""Which layers are equal: the same equations, joined the same way, on values of the same types.

Everything downstream (sharding rules, programs per layer, compiles) works per layer kind, so a
model of 48 equal blocks costs no more to plan than one of a few.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from hetpass._jax import Atom, Literal, Var
from hetpass.frontend.dataflow import Dataflow
from hetpass.frontend.structure import Key, aval_key, equation_key, literal_key
from hetpass.ir.kinds import Kind
from hetpass.ir.program import LayerSpan, StepProgram


def layer_kinds(
    program: StepProgram,
    flow: Dataflow,
    spans: Sequence[LayerSpan],
    backward: Sequence[bool],
    duplicable: Sequence[bool],
    num_layers: int,
) -> tuple[int, ...]:
    """One number per layer, counted from 0 in order of first appearance.

    A key is made of the layer's equations, forward and backward, in program order: what each does,
    where inside the layer its operands come from, or what sort of value comes from outside and
    whether it is the same one again; and which results leave the layer. Duplicable equations count
    where they are read, so that a mask made once in the first layer makes it no different from
    others; PRNG keys count by type, since layers fold different constants into them.
    """
    members: list[list[int]] = [[] for _ in range(num_layers)]
    for number, span in enumerate(spans):
        for layer in range(span.first, span.last + 1):
            members[layer].append(number)
    expressions = _Expressions(program, flow, backward, duplicable)
    numbers: dict[Key, int] = {}
    kinds = []
    for numbers_in_layer in members:
        key = _layer_key(flow, numbers_in_layer, expressions, program.kinds)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return tuple(kinds)


def _layer_key(
    flow: Dataflow,
    members: Sequence[int],
    expressions: _Expressions,
    kinds: Mapping[Var, Kind],
) -> Key:
    counted = [n for n in members if not expressions.duplicable[n]]
    inside = set(members)
    local: dict[Var, Key] = {}
    outside: dict[Var, Key] = {}

    def outer(var: Var) -> Key:
        if var not in outside:
            outside[var] = (expressions.sort(var), len(outside))
        return outside[var]

    parts = []
    for place, number in enumerate(counted):
        eqn = flow.eqns[number]
        operands = tuple(
            local[a] if not isinstance(a, Literal) and a in local else expressions.of(a, outer)
            for a in eqn.invars
        )
        leaving = []
        for index, var in enumerate(eqn.outvars):
            local[var] = (place, index)
            leaves = any(r not in inside for r in flow.readers.get(var, ()))
            leaving.append((leaves, var in flow.outvars, str(kinds.get(var))))
        parts.append(
            (expressions.equation(number), operands, expressions.backward[number], tuple(leaving))
        )
    return tuple(parts)


class _Expressions:
    """Keys of values from outside a layer; local to `layer_kinds`."""

    def __init__(
        self,
        program: StepProgram,
        flow: Dataflow,
        backward: Sequence[bool],
        duplicable: Sequence[bool],
    ) -> None:
        self.flow, self.backward, self.duplicable = flow, backward, duplicable
        self.kinds = program.kinds
        self.inputs = {
            var: type(source).__name__
            for var, source in zip(program.region.invars, program.region_inputs, strict=True)
        }
        self.keys: dict[int, int] = {}  # equation -> number of its key
        self.numbers: dict[Hashable, int] = {}

    def equation(self, number: int) -> int:
        if number not in self.keys:
            key = equation_key(self.flow.eqns[number])
            self.keys[number] = self.numbers.setdefault(key, len(self.numbers))
        return self.keys[number]

    def sort(self, var: Var) -> Key:
        """What sort of value comes from outside: where from, type, kind."""
        number = self.flow.producer.get(var)
        if number is None:
            source = self.inputs[var]
        else:
            source = "backward" if self.backward[number] else "forward"
        return source, aval_key(var.aval), str(self.kinds.get(var))

    def of(self, atom: Atom, outer: Callable[[Var], Key]) -> Key:
        """A value from outside; a duplicable one by the expression that makes it."""
        if isinstance(atom, Literal):
            return literal_key(atom)
        number = self.flow.producer.get(atom)
        if number is None or not self.duplicable[number]:
            return outer(atom)
        eqn = self.flow.eqns[number]
        if str(atom.aval).startswith("key<"):
            return "key", aval_key(atom.aval)
        operands = tuple(self.of(a, outer) for a in eqn.invars)
        index = next(i for i, v in enumerate(eqn.outvars) if v is atom)
        return self.equation(number), index, operands
