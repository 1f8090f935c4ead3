"""The order in which one driver sends a step to its devices, as a flat list of instructions.

Every array of a step has a *cell*, a position in one list: a step-scoped slot has one cell, a
microbatch slot M, and each task has one for the token that says it has run. Instructions name
cells, so running a step looks nothing up by name. A cell is emptied after its last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax

from hetpass.backend.compile import Executable
from hetpass.errors import ScheduleError
from hetpass.ir.program import Slot, Staged
from hetpass.ir.quantities import counted
from hetpass.ir.schedule import Schedule, Task, TaskKind

_ROLES = {"F": "forward", "B": "backward", "W": "weight"}


@dataclass(frozen=True)
class Run:
    """Runs an executable: cells in, cells out, the last of them for its token.

    `name`: "forward 0.3", "epilogue 1". `task`: what it completes. `microbatch`: None for what
    runs once per step. `drops`: cells that nothing reads any more.
    """

    call: Callable[..., Sequence[jax.Array]]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    stage: int
    name: str
    task: Task | None
    microbatch: int | None = None
    drops: tuple[int, ...] = ()


@dataclass(frozen=True)
class Move:
    """Sends one cell's array to another stage.

    `transfer`: its position among the program's. `stages`: from and to. `microbatch`: None for
    what is sent once per step.
    """

    call: Callable[[jax.Array], jax.Array]
    source: int
    target: int
    transfer: int
    stages: tuple[int, int]
    microbatch: int | None
    drops: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wait:
    """Holds the driver until the task whose token it is has run."""

    token: int
    drops: tuple[int, ...] = ()


Instruction = Run | Move | Wait


@dataclass(frozen=True)
class Dispatch:
    """One step.

    Attributes:
      num_cells: in all.
      slots: per slot, its first cell.
      numbers: (cell, array) of the microbatch numbers, which every step starts with.
      instructions: in the order of dispatch, after the inputs are in their cells.
    """

    num_cells: int
    slots: tuple[int, ...]
    numbers: tuple[tuple[int, jax.Array], ...]
    instructions: tuple[Instruction, ...]


class Dispatched(Protocol):
    """What dispatching needs of a compiled step: `CompiledStep`, or a process's part of one, whose
    calls and numbers of other processes' stages are never used."""

    @property
    def staged(self) -> Staged: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def executables(self) -> Sequence[Executable]: ...
    @property
    def links(self) -> Sequence[Callable[[jax.Array], jax.Array]]: ...
    @property
    def numbers(self) -> Sequence[Sequence[jax.Array]]: ...


def dispatch(compiled: Dispatched) -> Dispatch:
    """The instructions of one step: prologue, starts, tasks, epilogue, with their transfers.

    A stage never holds more microbatches than the schedule says: before the forward of microbatch
    m the driver waits for the backward of m - N (N = the stage's bound), or for its forward where
    nothing runs backward; and likewise for its weight gradients, where they are tasks.

    Raises:
      ScheduleError: HP-SCHEDULE-SIZES for a schedule of other numbers of stages or microbatches,
        HP-SCHEDULE-DATA if a task would run before what it reads exists.
    """
    _check_sizes(compiled)
    return _Assembler(compiled).made()


def _check_sizes(compiled: Dispatched) -> None:
    staged, schedule = compiled.staged, compiled.schedule
    wanted = (staged.num_stages, staged.num_microbatches)
    given = (schedule.num_stages, schedule.num_microbatches)
    if wanted != given:
        raise ScheduleError(
            "HP-SCHEDULE-SIZES",
            f"the schedule {schedule.name!r} is for another program",
            details=(
                f"program: {counted(wanted[0], 'stage')}, {counted(wanted[1], 'microbatch')}",
                f"schedule: {counted(given[0], 'stage')}, {counted(given[1], 'microbatch')}",
            ),
        )


class _Assembler:
    """Builds one Dispatch; used once."""

    def __init__(self, compiled: Dispatched) -> None:
        self.compiled = compiled
        self.count = compiled.staged.num_microbatches
        self.slots, next_cell = _slot_cells(compiled.staged.slots, self.count)
        self.num_cells = next_cell
        self.numbers: dict[tuple[int, int], int] = {}
        self.tokens: dict[Task, int] = {}
        self.instructions: list[Instruction] = []
        self.written: set[int] = set()
        self.by_role = _by_role(compiled.executables)
        self.held = compiled.schedule.held()
        self.sends: dict[int, list[int]] = {}
        for number, transfer in enumerate(compiled.staged.transfers):
            self.sends.setdefault(transfer.source, []).append(number)

    def made(self) -> Dispatch:
        runs = list(self._runs())
        last_write = {
            (slot, m if self._is_microbatch(slot) else None): position
            for position, (executable, m, _) in enumerate(runs)
            for slot in executable.program.results
        }
        for feed in self.compiled.staged.feeds:
            self._written(feed.slot, None)
        for position, (executable, m, task) in enumerate(runs):
            if task is not None and task.kind == "F":
                self._bound(task)
            self._run(executable, m, task)
            for slot in executable.program.results:
                number = m if self._is_microbatch(slot) else None
                if last_write[slot, number] == position:
                    self._written(slot, number)
        arrays = self.compiled.numbers
        return Dispatch(
            num_cells=self.num_cells,
            slots=self.slots,
            numbers=tuple((cell, arrays[s][m]) for (s, m), cell in self.numbers.items()),
            instructions=_with_drops(self.instructions, self._kept()),
        )

    def _runs(self) -> Iterable[tuple[Executable, int | None, Task | None]]:
        for executable in self._phases("prologue"):
            yield executable, None, None
        for executable in self._phases("start"):
            yield executable, None, None
        has_weight = self.compiled.schedule.has_weight
        for task in self.compiled.schedule.in_order():
            roles = [_ROLES[task.kind]]
            if task.kind == "B" and not has_weight:
                roles.append("weight")
            found = [e for r in roles for e in self.by_role.get((task.stage, r), ())]
            for number, executable in enumerate(found):
                yield executable, task.microbatch, task if number == len(found) - 1 else None
        for executable in self._phases("epilogue"):
            yield executable, None, None

    def _phases(self, role: str) -> list[Executable]:
        found = [e for (_, r), es in self.by_role.items() if r == role for e in es]
        return sorted(found, key=lambda e: (e.program.phase, e.program.stage))

    def _is_microbatch(self, slot: int) -> bool:
        return self.compiled.staged.slots[slot].scope == "microbatch"

    def _cell(self, slot: int, number: int | None) -> int:
        return self.slots[slot] + (number or 0 if self._is_microbatch(slot) else 0)

    def _fresh(self) -> int:
        self.num_cells += 1
        return self.num_cells - 1

    def _written(self, slot: int, number: int | None) -> None:
        cell = self._cell(slot, number)
        self.written.add(cell)
        slots = self.compiled.staged.slots
        for transfer in self.sends.get(slot, ()):
            target = self.compiled.staged.transfers[transfer].target
            stages = (slots[slot].stage, slots[target].stage)
            link, there = self.compiled.links[transfer], self._cell(target, number)
            self.instructions.append(Move(link, cell, there, transfer, stages, number))
            self._written(target, number)

    def _bound(self, task: Task) -> None:
        """Waits until the stage holds fewer microbatches than its bounds."""
        schedule, stage = self.compiled.schedule, task.stage
        bounds: list[tuple[TaskKind, int]] = [("B", schedule.in_flight[stage])]
        if not schedule.has_backward or (stage, "backward") not in self.by_role:
            # Without backward tasks one runs while the next is being sent.
            least = 1 if schedule.has_backward else 2
            bounds = [("F", max(schedule.in_flight[stage], least))]
        if schedule.has_weight:
            bounds.append(("W", self.held[stage]))
        for kind, bound in bounds:
            token = self.tokens.get(Task(kind, stage, task.microbatch - bound))
            if token is not None:
                self.instructions.append(Wait(token))

    def _run(self, executable: Executable, number: int | None, task: Task | None) -> None:
        program = executable.program
        arguments = [self._cell(slot, number) for slot in program.arguments]
        missing = [s for s in program.arguments if self._cell(s, number) not in self.written]
        if missing:
            raise self._unwritten(executable, number, missing[0])
        results = [self._cell(slot, number) for slot in program.results]
        name = f"{program.role} {program.stage}"
        if program.per_microbatch:
            assert number is not None
            if (program.stage, number) not in self.numbers:
                self.numbers[program.stage, number] = self._fresh()
            arguments.append(self.numbers[program.stage, number])
            name = f"{name}.{number}"
        results.append(self._fresh())
        if task is not None:
            self.tokens[task] = results[-1]
        self.written.update(results)
        self.instructions.append(
            Run(
                executable.call,
                tuple(arguments),
                tuple(results),
                program.stage,
                name,
                task,
                number,
            )
        )

    def _unwritten(self, executable: Executable, number: int | None, slot: int) -> ScheduleError:
        program, found = executable.program, self.compiled.staged.slots[slot]
        return ScheduleError(
            "HP-SCHEDULE-DATA",
            f"{program.role} of stage {program.stage} runs before {found.name!r} exists",
            where=f"schedule {self.compiled.schedule.name!r}",
            details=(() if number is None else (f"microbatch {number}",)),
        )

    def _kept(self) -> frozenset[int]:
        """Cells that outlive the instructions: numbers, inputs and results."""
        step = {s.index for s in self.compiled.staged.slots if s.scope == "step"}
        return_slots = {getattr(r, "slot", None) for r in self.compiled.staged.results}
        returned_inputs = {getattr(r, "input", None) for r in self.compiled.staged.results}
        return_slots |= {f.slot for f in self.compiled.staged.feeds if f.input in returned_inputs}
        kept = {self.slots[slot] for slot in step if slot in return_slots}
        return frozenset(kept | set(self.numbers.values()))


def _slot_cells(slots: Sequence[Slot], count: int) -> tuple[tuple[int, ...], int]:
    cells, next_cell = [], 0
    for slot in slots:
        cells.append(next_cell)
        next_cell += count if slot.scope == "microbatch" else 1
    return tuple(cells), next_cell


def _by_role(executables: Sequence[Executable]) -> Mapping[tuple[int, str], list[Executable]]:
    found: dict[tuple[int, str], list[Executable]] = {}
    for executable in executables:
        key = (executable.program.stage, executable.program.role)
        found.setdefault(key, []).append(executable)
    for group in found.values():
        group.sort(key=lambda e: e.program.phase)
    return found


def _touched(instruction: Instruction) -> tuple[int, ...]:
    if isinstance(instruction, Run):
        return (*instruction.arguments, *instruction.results)
    if isinstance(instruction, Move):
        return (instruction.source, instruction.target)
    return (instruction.token,)


def _with_drops(
    instructions: Sequence[Instruction], kept: frozenset[int]
) -> tuple[Instruction, ...]:
    """Each cell is emptied by the last instruction that touches it."""
    last: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        last.update((cell, position) for cell in _touched(instruction))
    drops: dict[int, list[int]] = {}
    for cell, position in last.items():
        if cell not in kept:
            drops.setdefault(position, []).append(cell)
    return tuple(
        replace(instruction, drops=tuple(drops.get(position, ())))
        for position, instruction in enumerate(instructions)
    )
