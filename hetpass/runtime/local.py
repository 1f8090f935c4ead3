"""Runs a compiled step in this process: one driver sends everything, devices run on their own.

Example, with a CompiledStep of two stages:

    runtime = LocalRuntime(compiled)
    leaves = runtime(flat_arguments)      # one jax.Array per output leaf, not waited for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hetpass._jax import with_weak_type
from hetpass.backend.compile import CompiledStep
from hetpass.backend.report import FragmentReport, report
from hetpass.backend.reshard import Placement
from hetpass.errors import ExecutionError
from hetpass.ir.program import FromInput, FromLiteral, FromSlot, InputLeaf, Staged
from hetpass.ir.timeline import Timeline
from hetpass.runtime.create import create, input_shardings
from hetpass.runtime.dispatch import Dispatch, Move, Run, dispatch
from hetpass.runtime.measure import measure
from hetpass.runtime.recorder import Observe, Recorder

Record = Callable[[str, int, float, float], None]
"""Called as record(name, stage, start_s, end_s) for every fragment that ran."""


@dataclass(frozen=True)
class _Feed:
    """One input's way into its cell."""

    input: int
    cell: int
    place: Placement


@dataclass(frozen=True)
class LocalRuntime:
    """A compiled step, ready to be called any number of times.

    Nothing is compiled by a call, except that arrays on other shardings than their slots (the
    first call's, as a rule) may need small programs that cut and join their shards.
    """

    compiled: CompiledStep
    program: Dispatch = field(init=False)
    _feeds: tuple[_Feed, ...] = field(init=False)
    _cells: tuple[Any, ...] = field(init=False)
    _given_away: tuple[int, ...] = field(init=False)
    _copied: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        program = dispatch(self.compiled)
        staged = self.compiled.staged
        traced = staged.layered.program.traced
        feeds = [
            _Feed(feed.input, program.slots[feed.slot], place)
            for feed, place in zip(staged.feeds, self.compiled.placements, strict=True)
        ]
        num_arguments = len(traced.inputs) - len(traced.constants)
        cells: list[Any] = [None] * program.num_cells
        for cell, array in program.numbers:
            cells[cell] = array
        for feed in feeds:
            if feed.input >= num_arguments:
                cells[feed.cell] = feed.place(traced.constants[feed.input - num_arguments])
        returned_slots = {r.slot for r in staged.results if isinstance(r, FromSlot)}
        returned = {r.input for r in staged.results if isinstance(r, FromInput)}
        given_away = {
            feed.input
            for feed in staged.feeds
            if traced.inputs[feed.input].donated and feed.slot not in returned_slots
        }
        object.__setattr__(self, "program", program)
        object.__setattr__(self, "_feeds", tuple(f for f in feeds if f.input < num_arguments))
        object.__setattr__(self, "_cells", tuple(cells))
        object.__setattr__(self, "_given_away", tuple(sorted(given_away - returned)))
        object.__setattr__(self, "_copied", repeated_inputs(staged.results))

    def __call__(self, arguments: Sequence[Any], record: Record | None = None) -> list[jax.Array]:
        """One step. Returns at once; the arrays are ready when their computations are.

        Args:
          arguments: one per input leaf of the step, without captured constants: numpy arrays,
            scalars or JAX arrays on any devices of this process.
          record: if given, the call waits for the step, and reports every fragment's times
            (seconds of `time.perf_counter`).

        Raises:
          ExecutionError: HP-RUN-DONATED, HP-RUN-ALIASED, HP-RUN-COUNT or HP-RUN-SHAPE, before
            anything runs.
        """
        if record is None:
            return self._step(arguments, None)

        def observe(instruction: Run | Move, start_s: float, end_s: float) -> None:
            if isinstance(instruction, Run):
                record(instruction.name, instruction.stage, start_s, end_s)

        return self.observed(arguments, observe)

    def observed(self, arguments: Sequence[Any], observe: Observe) -> list[jax.Array]:
        """One step, waited for; `observe` is told the times of every fragment and transfer."""
        with Recorder(observe, self.compiled.schedule.lane_of) as recorder:
            return self._step(arguments, recorder)

    def _step(self, arguments: Sequence[Any], recorder: Recorder | None) -> list[jax.Array]:
        inputs = self.compiled.staged.layered.program.traced.inputs
        check_arguments(arguments, inputs[: len(inputs) - self._num_constants])
        cells = list(self._cells)
        for feed in self._feeds:
            cells[feed.cell] = feed.place(arguments[feed.input])
        _send(self.program, cells, recorder)
        results = self._results(arguments, cells)
        for number in self._given_away:
            value = arguments[number]
            if isinstance(value, jax.Array) and not value.is_deleted():
                value.delete()
        return results

    # -- what every runtime has ---------------------------------------------------------------

    @property
    def staged(self) -> Staged:
        """The fragments, slots and transfers."""
        return self.compiled.staged

    def measured(
        self, arguments: Sequence[Any], lane_names: Sequence[str]
    ) -> tuple[list[jax.Array], Timeline]:
        """One step, waited for, and what every lane and link did in it."""
        return measure(self.compiled, self.program, self.observed, arguments, lane_names)

    def create(
        self, create_fn: Callable[..., Any], args: Sequence[Any], inputs: Sequence[int]
    ) -> list[jax.Array]:
        """The leaves of a state, made where the step wants them.

        Args:
          create_fn, args: its result is the state.
          inputs: per leaf, the flat input of the step that it is.
        """
        leaves, tree = jax.tree.flatten(tuple(args))
        jaxpr = jax.make_jaxpr(lambda *values: create_fn(*jax.tree.unflatten(tree, values)))(
            *leaves
        )
        # A leaf that the step does not use lives beside the others: with the first stage's.
        elsewhere = NamedSharding(self.compiled.meshes[0], PartitionSpec())
        wanted = input_shardings(self.compiled)
        return create(jaxpr, leaves, [wanted[number] or elsewhere for number in inputs])

    def reports(self) -> tuple[FragmentReport, ...]:
        """Memory, collectives and compile seconds of every fragment, from the compiler."""
        return report(self.compiled)

    # -- a call -------------------------------------------------------------------------------

    @property
    def _num_constants(self) -> int:
        return len(self.compiled.staged.layered.program.traced.constants)

    def _results(self, arguments: Sequence[Any], cells: Sequence[Any]) -> list[jax.Array]:
        placed = {feed.input: feed.cell for feed in self._feeds if feed.place.cut is None}
        leaves = self.compiled.staged.layered.program.traced.jaxpr.outvars
        results = []
        for number, result in enumerate(self.compiled.staged.results):
            if isinstance(result, FromSlot):
                value = cells[self.program.slots[result.slot]]
            elif isinstance(result, FromLiteral):
                value = jnp.asarray(result.value, result.aval.dtype)
            elif result.input in placed:
                value = cells[placed[result.input]]
            else:
                value = self._unplaced(result.input, arguments)
            value = jnp.copy(value) if number in self._copied else value
            results.append(with_weak_type(value, leaves[number].aval.weak_type))
        return results

    def _unplaced(self, number: int, arguments: Sequence[Any]) -> jax.Array:
        traced = self.compiled.staged.layered.program.traced
        given = (*arguments, *traced.constants)[number]
        if isinstance(given, jax.Array):
            return given
        return jnp.asarray(np.array(given), traced.inputs[number].aval.dtype)


def repeated_inputs(results: Sequence[Any]) -> frozenset[int]:
    """Output leaves that return an input which an earlier leaf returns: they get a copy."""
    seen: set[int] = set()
    repeated = set()
    for number, result in enumerate(results):
        if isinstance(result, FromInput):
            if result.input in seen:
                repeated.add(number)
            seen.add(result.input)
    return frozenset(repeated)


def _send(program: Dispatch, cells: list[Any], recorder: Recorder | None) -> None:
    for step in program.instructions:
        if recorder is not None:
            recorder.before()
        if isinstance(step, Run):
            results = step.call(*[cells[i] for i in step.arguments])
            for cell, value in zip(step.results, results, strict=True):
                cells[cell] = value
            if recorder is not None:
                recorder.after(step, results[-1])
            del results
        elif isinstance(step, Move):
            cells[step.target] = step.call(cells[step.source])
            if recorder is not None:
                recorder.moved(step, cells[step.target])
        else:
            cells[step.token].block_until_ready()
        for cell in step.drops:
            cells[cell] = None


def check_arguments(arguments: Sequence[Any], leaves: Sequence[InputLeaf]) -> None:
    """Refuses what cannot run, before anything is dispatched.

    Raises:
      ExecutionError: HP-RUN-COUNT for a wrong number of leaves, HP-RUN-SHAPE for another shape or
        dtype, HP-RUN-DONATED for an array that was given away before, HP-RUN-ALIASED for an array
        that is given away here and passed twice.
    """
    if len(arguments) != len(leaves):
        raise ExecutionError(
            "HP-RUN-COUNT",
            f"{len(arguments)} array leaves for a step of {len(leaves)}",
        )
    seen: dict[int, InputLeaf] = {}
    for value, leaf in zip(arguments, leaves, strict=True):
        if not _is_array(value):
            raise _misfit(leaf, f"{type(value).__name__}: no array", leaf.aval.str_short())
        if np.shape(value) != leaf.aval.shape:
            raise _misfit(leaf, f"shape {np.shape(value)}", f"shape {leaf.aval.shape}")
        if isinstance(value, (np.ndarray, np.generic)):
            dtype = jax.dtypes.canonicalize_dtype(value.dtype)
            if dtype != leaf.aval.dtype:
                raise _misfit(leaf, str(dtype), str(leaf.aval.dtype))
        if not hasattr(value, "is_deleted"):  # no jax.Array, nor an array of another process
            continue
        if value.dtype != leaf.aval.dtype:
            raise _misfit(leaf, str(value.dtype), str(leaf.aval.dtype))
        if value.is_deleted():
            raise _was_donated(leaf)
        other = seen.setdefault(id(value), leaf)
        if other is not leaf and (other.donated or leaf.donated):
            raise _aliased(other, leaf)


def _is_array(value: Any) -> bool:
    if isinstance(value, (bool, int, float, complex)) or hasattr(value, "__jax_array__"):
        return True
    return hasattr(value, "dtype") and not isinstance(value, jax.ShapeDtypeStruct)


def _misfit(leaf: InputLeaf, given: str, wanted: str) -> ExecutionError:
    return ExecutionError(
        "HP-RUN-SHAPE",
        f"{leaf.path} does not fit the compiled step",
        where=leaf.path,
        details=(f"given: {given}", f"compiled for: {wanted}"),
        ways_out=("trace and compile the step for these arguments",),
    )


def _was_donated(leaf: InputLeaf) -> ExecutionError:
    return ExecutionError(
        "HP-RUN-DONATED",
        f"{leaf.path} was deleted: its array was given away (donated) by an earlier call",
        where=leaf.path,
        ways_out=(
            "use the state that the step returned",
            "pass donate_argnums=() to keep the arrays that are passed in",
        ),
    )


def _aliased(first: InputLeaf, second: InputLeaf) -> ExecutionError:
    return ExecutionError(
        "HP-RUN-ALIASED",
        f"{first.path} and {second.path} are the same array, and it is given away (donated)",
        where=f"{first.path}, {second.path}",
        ways_out=(
            "copy one of them: jax.numpy.copy(x)",
            "pass donate_argnums=() to keep the arrays that are passed in",
        ),
    )
