"""Stages for the layers of a step whose parameters already live on another step's stages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetpass._jax import Var
from hetpass.ir.program import Layered, WholeInput
from hetpass.transforms.sizes import aval_bytes


def stages_beside(layered: Layered, homes: Mapping[int, int], num_stages: int) -> tuple[int, ...]:
    """The stage of every layer: not decreasing, and moving the fewest parameter bytes.

    Args:
      layered: the step to place.
      homes: flat input -> stage, for inputs that already live somewhere.
      num_stages: S.

    A dynamic program over (layer, stage): O(L S).
    """
    cost = _moved_bytes(layered, homes, num_stages)
    best = np.zeros(num_stages)
    choices = []
    for row in cost:
        reach = np.minimum.accumulate(best)
        first = np.array([int(np.argmin(best[: s + 1])) for s in range(num_stages)])
        choices.append(first)
        best = reach + row
    stage = int(np.argmin(best))
    stages = []
    for first in reversed(choices):
        stages.append(stage)
        stage = int(first[stage])
    return tuple(reversed(stages))


def _moved_bytes(layered: Layered, homes: Mapping[int, int], num_stages: int) -> np.ndarray:
    """[L, S]: bytes of inputs that a layer reads on each stage from elsewhere."""
    program = layered.program
    numbers = {v: i for i, v in enumerate(program.traced.jaxpr.invars)}
    source: dict[Var, int] = {}
    for var, read in zip(program.region.invars, program.region_inputs, strict=True):
        if isinstance(read, WholeInput) and numbers.get(read.var) in homes:
            source[var] = numbers[read.var]
    moved = np.zeros((layered.num_layers, num_stages))
    seen: set[tuple[int, int]] = set()
    for eqn, span in zip(program.region.eqns, layered.spans, strict=True):
        for atom in eqn.invars:
            if not isinstance(atom, Var) or atom not in source:
                continue
            number = source[atom]
            share = aval_bytes(atom.aval) / (span.last - span.first + 1)
            for layer in range(span.first, span.last + 1):
                if (layer, number) not in seen:
                    seen.add((layer, number))
                    moved[layer] += share
                    moved[layer, homes[number]] -= share
    return moved
