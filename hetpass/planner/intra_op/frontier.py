"""Time against memory of one layer kind, over all meshes and ways to recompute. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpass.ir.operation_graph import OperationGraph
from hetpass.planner.intra_op.answers import Answer
from hetpass.planner.intra_op.linear_program import Effort
from hetpass.planner.intra_op.memory_sweep import pareto
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.setting import Setting


@dataclass(frozen=True)
class Offer:
    """An answer, and the setting that it is for."""

    setting: Setting
    answer: Answer


def frontier(
    graph: OperationGraph, settings: Sequence[Setting], effort: Effort = Effort()
) -> tuple[Offer, ...]:
    """Offers of which none is bettered in both time and memory, fastest first.

    Args:
      settings: to choose among: meshes (`cost.logical_meshes`), each with and without
        recomputation; for the same devices and microbatches.
    """
    offers = [
        Offer(setting, answer)
        for setting in settings
        for answer in pareto(program(graph, setting), effort)
    ]
    offers.sort(key=lambda offer: (offer.answer.seconds, offer.answer.memory_bytes))
    found: list[Offer] = []
    for offer in offers:
        if not found or offer.answer.memory_bytes < found[-1].answer.memory_bytes:
            found.append(offer)
    return tuple(found)
