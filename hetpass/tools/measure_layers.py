"""Seconds of a step's layers on the devices that are here, kind by kind.

Every layer is made a stage of its own on one device, and the executables of one layer of each kind
are timed on arrays made up for them. Neither the whole model nor the whole batch has to fit: only
one layer at a time is there. Two sizes of the microbatch tell what is paid per microbatch and what
per example.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hetpass.analysis.summarize import summarize
from hetpass.backend.compile import CompiledStep, Executable, compile
from hetpass.errors import ToolError
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup
from hetpass.ir.cluster_devices import kind_name
from hetpass.ir.device_profile import LayerSeconds
from hetpass.ir.facts import Amount, Seconds
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.ir.quantities import counted
from hetpass.planner.schedule_choice import plan_schedule
from hetpass.tools.steps import stepped
from hetpass.tools.target import Target

_ROUNDS = 12
_GROUP = "here"


@dataclass(frozen=True)
class _Timed:
    """Forward and backward seconds by layer kind, for microbatches of so many examples."""

    examples: int
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    fingerprint: str


def measure_layers(
    target: Target, arguments: Namespace, say: Callable[[str], None] = lambda text: None
) -> dict[str, LayerSeconds]:
    """By fingerprint and device kind, what `DeviceProfile.layers` holds.

    The microbatch that is measured is that of `--microbatches`, and half of it.

    Raises:
      ToolError: HP-TOOL-ARGUMENTS, there is no number of microbatches to measure at.
    """
    if not arguments.microbatches:
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            "layers are measured for a size of the microbatch, and none is given",
            where="--microbatches",
            ways_out=["--microbatches M: layers are measured at B / M examples, and half of that"],
        )
    result: dict[str, dict[str, dict[str, Seconds]]] = {}
    by_kind = {kind_name(device): device for device in reversed(jax.devices())}
    for kind, device in by_kind.items():
        timed = [
            found
            for count in (arguments.microbatches, 2 * arguments.microbatches)
            if (found := _timed(target, arguments, kind, device, count, say)) is not None
        ]
        large, small = timed[0], timed[-1]
        rows = {
            layer: Seconds(
                _fitted(large, small, large.forward_s[layer], small.forward_s.get(layer)),
                _fitted(
                    large, small, large.backward_s.get(layer, 0.0), small.backward_s.get(layer)
                ),
            )
            for layer in large.forward_s
        }
        result.setdefault(large.fingerprint, {})[kind] = rows
    return dict(result)


def _fitted(large: _Timed, small: _Timed, more_s: float, less_s: float | None) -> Amount:
    """A part per microbatch and one per example, neither below zero."""
    if less_s is None or small.examples == large.examples:
        return Amount(0.0, more_s / large.examples)
    each = (more_s - less_s) / (large.examples - small.examples)
    each = min(max(each, 0.0), more_s / large.examples)
    return Amount(more_s - each * large.examples, each)


def _timed(
    target: Target,
    arguments: Namespace,
    kind: str,
    device: Any,
    count: int,
    say: Callable[[str], None],
) -> _Timed | None:
    """Every kind of layer for B / count examples; None where B cannot be cut so."""
    say(f"cutting into {counted(count, 'microbatch')}")
    cluster = Cluster((DeviceGroup(_GROUP, find_kind(kind), 1, 1),))
    step = stepped(target, cluster, arguments)
    traced = step.trace(*target.arguments).program
    if traced.batch_size is None or traced.batch_size % count:
        return None
    passes, options = step.settings.passes, step.settings.options
    layered = passes.layers(traced, count, options.split)
    facts = summarize(layered)
    stages = tuple(
        StagePlan(k, k, (Replica(_GROUP, (0,), (("data", 1),)),)) for k in range(facts.num_layers)
    )
    plan = Plan((Pipeline(stages, count),), "interleaved")
    staged = passes.partition(layered, plan)
    schedule = plan_schedule(plan, has_backward=any(layered.backward), num_microbatches=count)
    say("compiling one layer of each kind")
    compiled = compile(staged, plan, {_GROUP: [device]}, schedule)
    seconds: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for executable in compiled.executables:
        role, layer = executable.program.role, facts.layers[executable.program.stage].kind
        if role in seconds and layer not in seconds[role]:
            say(f"{layer}: {role}")
            seconds[role][layer] = _executable_s(executable, compiled)
    return _Timed(
        traced.batch_size // count, seconds["forward"], seconds["backward"], facts.fingerprint or ""
    )


def _executable_s(executable: Executable, compiled: CompiledStep) -> float:
    """The least seconds of a call; what it takes over is made anew each time."""
    import time

    slots = executable.program.arguments
    values = [_made_up(compiled.avals[s], compiled.shardings[s]) for s in slots]
    number = [compiled.numbers[executable.program.stage][0]]
    extra = number if executable.program.per_microbatch else []
    seconds = []
    for _ in range(_ROUNDS + 1):
        given = _fresh(values, slots, executable.donated)
        began = time.perf_counter()
        jax.block_until_ready(executable.call(*given, *extra))
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _fresh(values: Sequence[Any], slots: Sequence[int], donated: Sequence[int]) -> list[Any]:
    given = [
        jax.numpy.copy(v) if slot in donated else v for v, slot in zip(values, slots, strict=True)
    ]
    return list(jax.block_until_ready(given))


def _made_up(aval: Any, sharding: Any) -> Any:
    """An array that no operation finds hard: small positive numbers, zeros for whole ones."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(0), aval.size)
        return jax.device_put(keys.reshape(aval.shape), sharding)
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
        generator = np.random.default_rng(0)
        values = generator.uniform(0.01, 0.03, aval.shape).astype(np.float32)
        return jax.device_put(values.astype(aval.dtype), sharding)
    return jax.device_put(np.zeros(aval.shape, aval.dtype), sharding)
