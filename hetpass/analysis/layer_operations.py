"""The operations and values of one layer, numbered; equal layers are numbered equally.

The equations of a layer are walked in order, forward first, and so are the bodies of its loops and
branches. An operation is known by its *path*: the number of the equation in its layer, then for
every body that holds it the number of the body and of the equation in it. Where a loop takes and
gives values stand operations of its own, with paths that end in `LOOP_IN` or `LOOP_OUT` and the
number of the operand or result.

Scalars from outside, and what is computed from scalars alone, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpass._jax import Atom, DropVar, Jaxpr, JaxprEqn, Var, open_jaxpr, scan_counts
from hetpass.analysis.duplicable import duplicable_equations
from hetpass.analysis.region_recipes import region_recipes
from hetpass.ir.operation_graph import Phase, Role
from hetpass.ir.program import Layered, SliceInput

LOOP_IN, LOOP_OUT = -1, -2

Path = tuple[int, ...]


@dataclass(frozen=True)
class OperationDraft:
    """An operation before its rule is known.

    Attributes:
      eqn: itself, or the loop that it belongs to.
      kind: an equation; a value entering or leaving a loop or branch as it is ("same"); rows of a
        stacked value taken ("unstack") or put together ("stack").
      rows: which of the equation's operands and results are numbered values: positions.
    """

    path: Path
    eqn: JaxprEqn
    kind: str
    phase: Phase
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    count: int


@dataclass
class LayerOperations:
    """One layer.

    Attributes:
      numbers: variable -> value; None: a scalar or a literal that has no number. Variables of the
        region, and of the bodies of loops.
      variables: one per value.
      roles: per value.
      drafts: the operations.
      ties: pairs of values that loops carry.
      paths: path -> number of the operation.
      ordinals: number of a region equation -> its number in the layer.
      rows_of: value -> the stacked region variable that holds it for all layers of a scan.
    """

    layer: int
    numbers: dict[Var, int | None] = field(default_factory=dict)
    variables: list[Var] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    drafts: list[OperationDraft] = field(default_factory=list)
    ties: list[tuple[int, int]] = field(default_factory=list)
    paths: dict[Path, int] = field(default_factory=dict)
    ordinals: dict[int, int] = field(default_factory=dict)
    rows_of: dict[int, Var] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerEquations:
    """The region's equations by layer, without what any fragment may make for itself.

    Attributes:
      members: per layer, the numbers of its equations, forward first.
      outside: region variable -> its role where a layer reads it that does not make it; of a
        variable that equations of the region make, "inner".
      maker: region variable -> the number of its equation; duplicable ones are not here.
      remade: numbers of the equations that every phase that reads their results runs for itself.
    """

    layered: Layered
    members: tuple[tuple[int, ...], ...]
    outside: Mapping[Var, Role]
    maker: Mapping[Var, int]
    remade: frozenset[int]

    @classmethod
    def of(cls, layered: Layered, trained: frozenset[Var]) -> LayerEquations:
        program = layered.program
        duplicable = duplicable_equations(program)
        members: list[list[int]] = [[] for _ in range(layered.num_layers)]
        outside: dict[Var, Role] = {}
        for var, source in zip(program.region.invars, program.region_inputs, strict=True):
            whole: Role = "parameter" if var in trained else "whole"
            outside[var] = "example" if isinstance(source, SliceInput) else whole
        maker: dict[Var, int] = {}
        of_state = set(trained)
        for number, eqn in enumerate(program.region.eqns):
            if duplicable[number] and any(isinstance(a, Var) and a in of_state for a in eqn.invars):
                of_state.update(eqn.outvars)
        for late in (False, True):
            for number, eqn in enumerate(program.region.eqns):
                if duplicable[number] and not any(v in of_state for v in eqn.outvars):
                    outside.update(dict.fromkeys(eqn.outvars, "whole"))
                elif layered.backward[number] == late:
                    maker.update(dict.fromkeys(eqn.outvars, number))
                    span = layered.spans[number]
                    for layer in range(span.first, span.last + 1):
                        members[layer].append(number)
        free = region_recipes(program.region.eqns, program.region.invars)
        remade = frozenset(number for number, again in enumerate(free) if again)
        return cls(layered, tuple(map(tuple, members)), outside, maker, remade)

    def role(self, var: Var, layer: int) -> Role:
        """Of a value that the layer reads and does not make."""
        if var in self.outside:
            return self.outside[var]
        number = self.maker[var]
        before = self.layered.spans[number].first < layer
        return "activation" if before and not self.layered.backward[number] else "cotangent"


def layer_operations(equations: LayerEquations, layer: int) -> LayerOperations:
    """Numbers the operations and values of a layer."""
    walk = _Walk(equations, LayerOperations(layer))
    for ordinal, number in enumerate(equations.members[layer]):
        walk.found.ordinals[number] = ordinal
        phase: Phase = "backward" if equations.layered.backward[number] else "forward"
        eqn = equations.layered.program.region.eqns[number]
        span = equations.layered.spans[number]
        if span.first < span.last:
            walk.scan_over_layers(eqn, (ordinal,), phase)
        else:
            walk.visit(eqn, (ordinal,), phase, 1)
    return walk.found


@dataclass
class _Walk:
    """Numbers one layer; local to `layer_operations`."""

    equations: LayerEquations
    found: LayerOperations
    body_of: dict[Var, Var] = field(default_factory=dict)  # stacked value -> row in a body

    def new(self, var: Var, role: Role = "inner") -> int:
        self.found.numbers[var] = len(self.found.variables)
        self.found.variables.append(var)
        self.found.roles.append(role)
        return len(self.found.variables) - 1

    def number(self, atom: Atom) -> int | None:
        """Of an operand; values from outside get theirs when they are first read."""
        if not isinstance(atom, Var):
            return None
        if atom not in self.found.numbers:
            if not getattr(atom.aval, "shape", ()):
                self.found.numbers[atom] = None
            else:
                known = atom in self.equations.outside or atom in self.equations.maker
                role = self.equations.role(atom, self.found.layer) if known else "whole"
                self.new(atom, role)
        return self.found.numbers[atom]

    def add(
        self,
        path: Path,
        eqn: JaxprEqn,
        kind: str,
        phase: Phase,
        atoms: tuple[Sequence[Atom], Sequence[Var]],
        count: int,
    ) -> None:
        """An operation, unless it has no arrays."""
        arrays = [v for v in (*atoms[0], *atoms[1]) if getattr(v.aval, "shape", ())]
        if not arrays:
            self.found.numbers.update(dict.fromkeys(atoms[1]))
            return
        operands = [(k, self.number(a)) for k, a in enumerate(atoms[0])]
        results = [(k, v) for k, v in enumerate(atoms[1]) if not isinstance(v, DropVar)]
        if kind != "equation" and not results:
            return
        self.found.paths[path] = len(self.found.drafts)
        self.found.drafts.append(
            OperationDraft(
                path,
                eqn,
                kind,
                phase,
                tuple(n for _, n in operands if n is not None),
                tuple(self.new(v) for _, v in results),
                (tuple(k for k, n in operands if n is not None), tuple(k for k, _ in results)),
                count,
            )
        )

    def visit(self, eqn: JaxprEqn, path: Path, phase: Phase, count: int) -> None:
        name = eqn.primitive.name
        if name == "scan":
            self.scan(eqn, path, phase, count)
        elif name == "while":
            self.loop(eqn, path, phase, count)
        elif name == "cond":
            self.branch(eqn, path, phase, count)
        else:
            self.add(path, eqn, "equation", phase, (eqn.invars, eqn.outvars), count)

    def body(self, jaxpr: Jaxpr, path: Path, phase: Phase, count: int) -> None:
        for ordinal, eqn in enumerate(jaxpr.eqns):
            self.visit(eqn, (*path, ordinal), phase, count)

    def same(self, var: Var, atom: Atom) -> None:
        """The variable is another name of the value."""
        self.found.numbers[var] = self.number(atom)

    def tie(self, left: Atom, right: Atom) -> None:
        a, b = self.number(left), self.number(right)
        if a is not None and b is not None and a != b:
            self.found.ties.append((a, b))

    def scan(self, eqn: JaxprEqn, path: Path, phase: Phase, count: int) -> None:
        jaxpr, _ = open_jaxpr(eqn.params["jaxpr"])
        num_consts, num_carry = scan_counts(eqn)
        stacked = num_consts + num_carry
        for k, (atom, var) in enumerate(zip(eqn.invars, jaxpr.invars, strict=True)):
            kind = "same" if k < stacked else "unstack"
            self.add((*path, LOOP_IN, k), eqn, kind, phase, ([atom], [var]), count)
        self.body(jaxpr, (*path, 0), phase, count * eqn.params["length"])
        for var, made in zip(jaxpr.invars[num_consts:stacked], jaxpr.outvars, strict=False):
            self.tie(var, made)
        for k, (made, var) in enumerate(zip(jaxpr.outvars, eqn.outvars, strict=True)):
            kind = "same" if k < num_carry else "stack"
            self.add((*path, LOOP_OUT, k), eqn, kind, phase, ([made], [var]), count)

    def loop(self, eqn: JaxprEqn, path: Path, phase: Phase, count: int) -> None:
        """A `while`: counted once, since the program does not say how often it runs."""
        cond, _ = open_jaxpr(eqn.params["cond_jaxpr"])
        body, _ = open_jaxpr(eqn.params["body_jaxpr"])
        a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carried = eqn.invars[a + b :]
        for var, atom in zip(cond.invars[:a], eqn.invars[:a], strict=True):
            self.same(var, atom)
        for var, atom in zip(body.invars[:b], eqn.invars[a : a + b], strict=True):
            self.same(var, atom)
        for k, (atom, var) in enumerate(zip(carried, body.invars[b:], strict=True)):
            self.add((*path, LOOP_IN, k), eqn, "same", phase, ([atom], [var]), count)
        for var, inner in zip(cond.invars[a:], body.invars[b:], strict=True):
            self.same(var, inner)
        self.body(cond, (*path, 0), phase, count)
        self.body(body, (*path, 1), phase, count)
        for k, (var, made) in enumerate(zip(body.invars[b:], body.outvars, strict=True)):
            self.tie(var, made)
            self.add((*path, LOOP_OUT, k), eqn, "same", phase, ([made], [eqn.outvars[k]]), count)

    def branch(self, eqn: JaxprEqn, path: Path, phase: Phase, count: int) -> None:
        """A `cond`: every branch is counted."""
        branches = [open_jaxpr(branch)[0] for branch in eqn.params["branches"]]
        for index, jaxpr in enumerate(branches):
            for var, atom in zip(jaxpr.invars, eqn.invars[1:], strict=True):
                self.same(var, atom)
            self.body(jaxpr, (*path, index), phase, count)
        for k, var in enumerate(eqn.outvars):
            made = [jaxpr.outvars[k] for jaxpr in branches]
            self.add((*path, LOOP_OUT, k), eqn, "same", phase, (made, [var]), count)

    def scan_over_layers(self, eqn: JaxprEqn, path: Path, phase: Phase) -> None:
        """One iteration is the layer: its rows are values of the layer, and the carry comes from
        and goes to the layers beside it."""
        jaxpr, _ = open_jaxpr(eqn.params["jaxpr"])
        num_consts, num_carry = scan_counts(eqn)
        stacked = num_consts + num_carry
        carry: Role = "activation" if phase == "forward" else "cotangent"
        for k, (atom, var) in enumerate(zip(eqn.invars, jaxpr.invars, strict=True)):
            if not var.aval.shape:
                self.found.numbers[var] = None
            elif k < num_consts:
                self.same(var, atom)
            elif k < stacked:
                self.new(var, carry)
            elif isinstance(atom, Var) and atom in self.body_of:
                self.same(var, self.body_of[atom])
            else:
                role: Role = "whole"
                if isinstance(atom, Var):
                    role = self.equations.role(atom, self.found.layer)
                self.found.rows_of[self.new(var, role)] = atom
                if isinstance(atom, Var):
                    self.body_of[atom] = var
        self.body(jaxpr, (*path, 0), phase, 1)
        for made, var in zip(jaxpr.outvars[num_carry:], eqn.outvars[num_carry:], strict=True):
            if isinstance(made, Var) and not isinstance(var, DropVar):
                self.body_of[var] = made
                number = self.number(made)
                if number is not None:
                    self.found.rows_of.setdefault(number, var)
        carried = zip(jaxpr.invars[num_consts:stacked], jaxpr.outvars, strict=False)
        for var, made in carried:
            self.tie(var, made)
