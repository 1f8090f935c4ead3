"""The program-level values: Traced, StepProgram, Layered, Staged.

A pass is the arrow between two of them:

    trace:     step, example arguments -> Traced
    split:     Traced, M               -> StepProgram
    segment:   StepProgram             -> Layered
    partition: Layered, Plan           -> Staged

All are frozen. Equations are JAX's own (`JaxprEqn`); a value is a `Var`. *Full-batch* variables
belong to the step as traced at B; *region* variables belong to the same program at b = B / M.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hetpass._jax import Atom, Jaxpr, JaxprEqn, ShapedArray, Var
from hetpass.ir.kinds import Batched, CombineOp, Kind
from hetpass.ir.quantities import counted

# ---------------------------------------------------------------------------------------------
# Traced


@dataclass(frozen=True)
class InputLeaf:
    """One flat input of the step.

    Attributes:
      path: as the user would write it, `state.params['wte']`, `batch['tokens']`; for a captured
        constant `constant 3`.
      aval: at the full batch.
      argnum: the position of the argument; None for captured constants.
      batch_dim: the dimension that holds the examples; None if free of the batch.
      donated: the caller gives the array away.
      zeros: a captured constant that holds zeros only, as the start of a sum does.
    """

    path: str
    aval: ShapedArray
    argnum: int | None
    batch_dim: int | None
    donated: bool
    zeros: bool = False


@dataclass(frozen=True, repr=False)
class Traced:
    """An unmodified step as one flat jaxpr (calls inlined), at B and at its probes.

    Attributes:
      name: of the user's function.
      jaxpr: at the full batch. invars: one per `inputs`, captured constants last.
      probes: the same program at 2B and 3B, equation by equation; () if it cannot be traced there
        (then only M = 1 is possible) or has no batch.
      probe_failure: why there are no probes; "" if there are.
      probe_place: the user's line that it is about; "" where none is.
      probe_function: the function of JAX that this line called; "" where none is known.
      probes_agree: there are none although the programs at 2B and 3B correspond: B is special.
      inputs: one per invar.
      constants: the values of the captured constants, in order.
      in_tree, out_tree: of the step's arguments `(args, kwargs)` and its result.
      out_paths: one per outvar, as the user would write it.
      batch_size: B; None if the step has no batch.
      recomputed: per equation, whether it recomputes a forward value inside a
        `jax.checkpoint`ed backward; such equations must not be merged with the forward ones.
    """

    name: str
    jaxpr: Jaxpr
    probes: tuple[Jaxpr, ...]
    probe_failure: str
    inputs: tuple[InputLeaf, ...]
    constants: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    out_paths: tuple[str, ...]
    batch_size: int | None
    recomputed: tuple[bool, ...]
    probe_place: str = ""
    probe_function: str = ""
    probes_agree: bool = False

    def __str__(self) -> str:
        from hetpass.ir import text

        return text.traced(self)

    def __repr__(self) -> str:  # a session that shows a value shall not show all of a model
        return f"<Traced {self.name}: {counted(len(self.jaxpr.eqns), 'equation')}>"


# ---------------------------------------------------------------------------------------------
# StepProgram


@dataclass(frozen=True)
class WholeInput:
    """The region reads a full-batch variable that is free of the batch, the same each time."""

    var: Var


@dataclass(frozen=True)
class SliceInput:
    """The region reads microbatch m's examples of a full-batch variable."""

    var: Var
    kind: Batched


@dataclass(frozen=True)
class OffsetInput:
    """The region reads m * b, the full-batch index of its first example (int32 scalar)."""


RegionInput = WholeInput | SliceInput | OffsetInput


@dataclass(frozen=True)
class Accumulated:
    """A region result whose full value is `op` over the microbatches.

    Attributes:
      target: the full-batch variable that the epilogue reads.
      op: how values combine.
      dtype: of the accumulator: at least float32, never below the value's own type. The
        accumulated value is cast to `target`'s dtype once, at the end.
    """

    target: Var
    op: CombineOp
    dtype: Any


@dataclass(frozen=True)
class Joined:
    """A region result whose full value is the microbatches' slices, joined."""

    target: Var
    kind: Batched


RegionOutput = Accumulated | Joined


@dataclass(frozen=True, repr=False)
class StepProgram:
    """A step with its microbatch region found: prologue, M times the region, epilogue.

    Attributes:
      traced: the step as it came.
      num_microbatches: M.
      prologue: equations over full-batch variables that the region needs, run once per step.
      region: the microbatch program at b = B / M. Its invars stand with `region_inputs`, its
        outvars with `region_outputs`. Every outvar is the result of a region equation.
      kinds: the kind of every region variable, seen at b.
      origin: for every region equation, the index of its equation in `traced.jaxpr`.
      epilogue: equations over full-batch variables, run once per step, after the region.
      outvars: full-batch variables or literals, one per output leaf of the step.
    """

    traced: Traced
    num_microbatches: int
    prologue: tuple[JaxprEqn, ...]
    region: Jaxpr
    region_inputs: tuple[RegionInput, ...]
    region_outputs: tuple[RegionOutput, ...]
    kinds: Mapping[Var, Kind]
    origin: tuple[int, ...]
    epilogue: tuple[JaxprEqn, ...]
    outvars: tuple[Atom, ...]

    def __str__(self) -> str:
        from hetpass.ir import text

        return text.step_program(self)

    def __repr__(self) -> str:
        of = f"{self.traced.name}: {counted(self.num_microbatches, 'microbatch')}"
        return f"<StepProgram {of} of {counted(len(self.region.eqns), 'equation')}>"


# ---------------------------------------------------------------------------------------------
# Layered


@dataclass(frozen=True)
class LayerSpan:
    """The layers that a region equation belongs to, inclusive.

    `first < last` only for a `scan` over layers, one layer per iteration: a forward scan runs
    iteration i in layer first + i; a reversed (backward) scan runs iteration i (of its stacked
    inputs) in layer first + i as well, last layer first.
    """

    first: int
    last: int


@dataclass(frozen=True, repr=False)
class Layered:
    """A StepProgram whose region is cut into layers.

    Legal by construction, and checked by the verifier: a forward equation reads forward values
    of its own or earlier layers only; a backward equation reads any forward value, and backward
    values of its own or later layers.

    Attributes:
      num_layers: L.
      spans: one per region equation.
      backward: one per region equation: runs in the backward task.
      layer_kinds: one number per layer; equal layers (same equations, shapes and parameters)
        share it.
      forward_flops, backward_flops: per layer and microbatch.
      cut_bytes: entry i, for the cut between layers i and i + 1: bytes that cross it forward, per
        microbatch.
      names: per layer, for people: taken from the name stacks ("Block_3/attn").
      boundaries: the cuts that the user marked: `k` for a cut before layer k.
    """

    program: StepProgram
    num_layers: int
    spans: tuple[LayerSpan, ...]
    backward: tuple[bool, ...]
    layer_kinds: tuple[int, ...]
    forward_flops: tuple[float, ...]
    backward_flops: tuple[float, ...]
    cut_bytes: tuple[float, ...]
    names: tuple[str, ...]
    boundaries: tuple[int, ...] = ()

    def __str__(self) -> str:
        from hetpass.ir import text

        return text.layered(self)

    def __repr__(self) -> str:
        of = f"{self.program.traced.name}: {counted(self.num_layers, 'layer')}"
        return f"<Layered {of}, {counted(self.program.num_microbatches, 'microbatch')}>"


# ---------------------------------------------------------------------------------------------
# Staged


@dataclass(frozen=True)
class Slot:
    """A named place for a value on one stage.

    Attributes:
      index: its number, the position in `Staged.slots`.
      stage: where it lives.
      aval: of the value as fragments see it: at b for scope "microbatch"; for scope "step" at the
        full batch if it is whole, and for a *stacked* slot the aval of one microbatch's part (the
        array that is stored has one more leading dimension of size M).
      scope: "step": one value per step. "microbatch": one value per microbatch in flight.
      kind: how the value relates to the batch. A `Partial` slot is an accumulator: the backend
        may store it with one more leading dimension, one entry per device of the data axis, and
        combines that dimension away when an epilogue fragment reads it.
      stacked: holds the parts of all M microbatches, indexed by the leading dimension.
      name: for people and for the keys of a plan's shardings.
    """

    index: int
    stage: int
    aval: ShapedArray
    scope: Literal["step", "microbatch"]
    kind: Kind
    stacked: bool
    name: str


# What a fragment does with a slot. Each has the slot's index.


@dataclass(frozen=True)
class Read:
    """The slot's value as it is. A Partial slot: combined over the data axis."""

    slot: int


@dataclass(frozen=True)
class ReadRow:
    """Microbatch m's part of a stacked slot."""

    slot: int


@dataclass(frozen=True)
class ReadJoined:
    """The full-batch value that a stacked slot's M parts make (full-batch aval)."""

    slot: int


@dataclass(frozen=True)
class ReadOffset:
    """m * b as an int32 scalar; belongs to no slot."""


FragmentInput = Read | ReadRow | ReadJoined | ReadOffset


@dataclass(frozen=True)
class Write:
    """The slot becomes the value."""

    slot: int


@dataclass(frozen=True)
class Accumulate:
    """The (Partial, donated) slot becomes op(slot, value), in the slot's dtype."""

    slot: int


@dataclass(frozen=True)
class WriteRow:
    """Row m of the (stacked, donated) slot becomes the value."""

    slot: int


@dataclass(frozen=True)
class WriteSplit:
    """A full-batch value is cut into the M rows of a stacked slot."""

    slot: int


FragmentOutput = Write | Accumulate | WriteRow | WriteSplit

Role = Literal["prologue", "forward", "backward", "weight", "epilogue"]


@dataclass(frozen=True)
class Fragment:
    """A piece of the step that runs on one stage as one executable.

    Attributes:
      role: prologue and epilogue fragments run once per step; forward, backward and weight
        fragments once per microbatch, when the schedule's task says so.
      phase: prologue and epilogue fragments of one stage run in order of phase; a value sent
        between stages is written in an earlier phase than it is read.
      jaxpr: pure; region variables and avals at b for the microbatch roles, full batch else.
      inputs, outputs: one per invar and per outvar of `jaxpr`.
      frees: the slots whose last use this fragment is; the backend may donate them.
    """

    stage: int
    role: Role
    phase: int
    jaxpr: Jaxpr
    inputs: tuple[FragmentInput, ...]
    outputs: tuple[FragmentOutput, ...]
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """A slot's value is copied to a slot of another stage as soon as it is written.

    Both slots have the same aval, scope, kind and `stacked`; only meshes and shardings differ.
    Partial slots are never transferred: an epilogue fragment combines first.
    """

    source: int
    target: int


@dataclass(frozen=True)
class Feed:
    """A flat input of the step (arguments, then constants) is placed into a slot at its start.

    A stacked slot takes the full-batch array cut into M parts along the slot's batch dimension.
    """

    input: int
    slot: int


@dataclass(frozen=True)
class FromSlot:
    """An output leaf is the (step-scoped, not stacked) slot's value at the end of the step."""

    slot: int


@dataclass(frozen=True)
class FromInput:
    """An output leaf is an input, unchanged."""

    input: int


@dataclass(frozen=True)
class FromLiteral:
    """An output leaf is a constant of the program."""

    value: Any
    aval: ShapedArray


Result = FromSlot | FromInput | FromLiteral


@dataclass(frozen=True, repr=False)
class Staged:
    """A step cut into fragments and transfers: what the backend compiles and the runtime runs.

    Every `Accumulate` and `WriteRow` slot starts each step at its identity (zeros, -inf, …).
    Slots of scope "microbatch" are written once and read only on their own stage.

    Attributes:
      layered: where it came from.
      num_stages: S.
      fragments: at most one per (stage, role, phase); a role that has nothing to do is absent.
      kinds: the kind of every variable of the microbatch fragments.
      feeds: where inputs go. An input that several stages read is fed once, to its owner, and
        transferred.
      results: one per output leaf.
      pairs: (input, output) leaf numbers of state that comes back: equal path and aval, so equal
        stage and sharding.
    """

    layered: Layered
    num_stages: int
    num_microbatches: int
    slots: tuple[Slot, ...]
    fragments: tuple[Fragment, ...]
    transfers: tuple[Transfer, ...]
    kinds: Mapping[Var, Kind]
    feeds: tuple[Feed, ...]
    results: tuple[Result, ...]
    pairs: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        from hetpass.ir import text

        return text.staged(self)

    def __repr__(self) -> str:
        of = f"{self.layered.program.traced.name}: {counted(self.num_stages, 'stage')}"
        fragments = counted(len(self.fragments), "fragment")
        return f"<Staged {of}, {fragments}, {counted(len(self.transfers), 'transfer')}>"
