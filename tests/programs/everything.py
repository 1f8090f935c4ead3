"""The whole zoo, by line."""

from __future__ import annotations

from tests.programs import (
    clipping,
    dataflow,
    dropout,
    frameworks,
    indexing,
    losses,
    optimizers,
    outputs,
    precision,
    primitives,
    sharing,
    signatures,
    statistics,
)
from tests.programs.program import programs_of

NUMBERS = programs_of(
    (sharing, losses, clipping, dropout, statistics, precision, outputs, optimizers, indexing)
)
PROGRAMS = programs_of((frameworks, primitives, dataflow, signatures))
