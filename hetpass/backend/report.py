"""What the compiler made of each fragment: memory, collectives, seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from hetpass.backend.compile import CompiledStep, Executable
from hetpass.backend.compiled_collectives import compiled_collectives
from hetpass.backend.lower import StageProgram
from hetpass.backend.priced_collectives import CollectiveDifference, collective_differences

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?[\w.-]+\s*=\s*(?P<result>.*?)\s"
    rf"(?P<kind>{'|'.join(map(re.escape, COLLECTIVES))})(?P<start>-start)?\(",
    re.MULTILINE,
)


@dataclass(frozen=True)
class CollectiveCount:
    """How many collectives of one kind, and the bytes of their results on one device.

    A combined instruction with several results counts once.
    """

    count: int
    result_bytes: int


@dataclass(frozen=True, repr=False)
class FragmentReport:
    """One executable. Bytes are per device; `peak_bytes` = arguments + outputs + temporaries
    - aliased (the compiler's own peak leaves temporaries out on CPU). `collectives`: None where
    this JAX cannot print what the compiler made. `differences`: where the collectives are not those
    that the stage's assignments were priced with."""

    stage: int
    role: str
    phase: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    collectives: Mapping[str, CollectiveCount] | None
    compile_s: float
    differences: tuple[CollectiveDifference, ...] = ()

    @property
    def peak_bytes(self) -> int:
        held = self.argument_bytes + self.output_bytes + self.temporary_bytes
        return held - self.alias_bytes

    def __str__(self) -> str:
        name = f"stage {self.stage} {self.role}" + (f" {self.phase}" if self.phase else "")
        line = (
            f"{name}: {self.peak_bytes:,} bytes ({self.temporary_bytes:,} temporary), "
            f"{self._collectives()}, compiled in {self.compile_s:.2f} s"
        )
        return "\n".join([line, *(f"  not as priced: {d}" for d in self.differences)])

    def _collectives(self) -> str:
        if self.collectives is None:
            return "collectives unknown"
        found = (f"{c.count} {k} ({c.result_bytes:,} bytes)" for k, c in self.collectives.items())
        return ", ".join(found) or "no collectives"

    def __repr__(self) -> str:
        return f"<FragmentReport {self}>"


def report(compiled: CompiledStep) -> tuple[FragmentReport, ...]:
    """One per executable, in their order."""
    return tuple(fragment_report(executable) for executable in compiled.executables)


def fragment_report(executable: Executable) -> FragmentReport:
    """Of one executable."""
    program, memory = executable.program, executable.call.memory_analysis()
    text = _text(executable)
    return FragmentReport(
        stage=program.stage,
        role=program.role,
        phase=program.phase,
        argument_bytes=int(getattr(memory, "argument_size_in_bytes", 0)),
        output_bytes=int(getattr(memory, "output_size_in_bytes", 0)),
        temporary_bytes=int(getattr(memory, "temp_size_in_bytes", 0)),
        alias_bytes=int(getattr(memory, "alias_size_in_bytes", 0)),
        collectives=None if text is None else collectives(text),
        compile_s=executable.compile_s,
        differences=() if text is None else _differences(program, text),
    )


def _text(executable: Executable) -> str | None:
    try:
        return executable.call.as_text() or ""
    except jax.errors.JaxRuntimeError:  # libtpu may know instructions that this XLA does not
        return None


def _differences(program: StageProgram, text: str) -> tuple[CollectiveDifference, ...]:
    if not program.mesh:
        return ()
    made = compiled_collectives(text, program.mesh)
    return collective_differences(program.emitted(), made, program.mesh)


def collectives(text: str) -> dict[str, CollectiveCount]:
    """By kind, the collectives of a compiled (post-optimization) HLO module's text."""
    found: dict[str, CollectiveCount] = {}
    for match in _INSTRUCTION.finditer(text):
        shapes = [_shape_bytes(*shape) for shape in _SHAPE.findall(match["result"])]
        if match["start"] and match["kind"] in ("all-gather", "collective-permute"):
            # The start of these yields (operands, results, context).
            shapes = shapes[len(shapes) // 2 :] if len(shapes) == 2 else shapes[1:2]
        before = found.get(match["kind"], CollectiveCount(0, 0))
        found[match["kind"]] = CollectiveCount(before.count + 1, before.result_bytes + sum(shapes))
    return found


def _shape_bytes(dtype: str, dims: str) -> int:
    count = math.prod(int(d) for d in dims.split(",") if d)
    digits = re.search(r"\d+", dtype)
    bits = _ITEM_BITS.get(dtype, int(digits.group()) if digits else 8)
    return (count * bits + 7) // 8
