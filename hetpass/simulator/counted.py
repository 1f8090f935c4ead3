"""The step of 1F1B with given in-flight counts, without a Schedule: for whoever compares many.

With one stage on every lane, wires that no two transfers of different stages share, and transfers
beside compute, every time follows from earlier ones: no queue of events is needed. The numbers are
those of `simulator.engine`, to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hetpass.schedules.costs import LinkCost, PipelineCosts
from hetpass.schedules.pipe import prepare
from hetpass.simulator.engine import play


def counted_makespan_s(
    costs: PipelineCosts, in_flight: Sequence[int], num_microbatches: int
) -> float:
    """Seconds of one step of "1f1b" with these counts, one stage per lane, no W tasks.

    Args:
      in_flight: per stage at least 1 and at most M, never rising along the stages.
    """
    if _apart(costs.links):
        return _followed(costs, in_flight, num_microbatches)
    return _played(costs, in_flight, num_microbatches)


def _apart(links: Sequence[LinkCost]) -> bool:
    names = [
        name
        for link in links
        for wires in (link.forward_wires, link.backward_wires)
        for name in dict.fromkeys(wires)
    ]
    return len(set(names)) == len(names) and all(link.overlaps for link in links)


def _followed(costs: PipelineCosts, in_flight: Sequence[int], num_microbatches: int) -> float:
    """Tasks in an order that every lane and every dependency agrees with: all warm-ups, then the
    backward tasks of a microbatch from the last stage on, and the forward tasks they make room
    for from the first."""
    stages, last = costs.stages, len(costs.stages) - 1
    links = [(x.forward_s, x.backward_s, x.latency_s) for x in costs.links]
    free_s = [0.0] * len(stages)
    there_s, back_s = [0.0] * last, [0.0] * last  # when wires are free
    activations: list[list[float]] = [[] for _ in stages]  # arrival at a stage, per microbatch
    activations[0] = [0.0] * num_microbatches
    forwards = [stage.forward_s for stage in stages]
    backwards = [stage.backward_s + stage.weight_s for stage in stages]

    def forward(stage: int, microbatch: int) -> None:
        now_s, ready_s = free_s[stage], activations[stage][microbatch]
        now_s = (ready_s if ready_s > now_s else now_s) + forwards[stage]
        free_s[stage] = now_s
        if stage < last:
            wire_s = there_s[stage]
            occupied_s, _, latency_s = links[stage]
            wire_s = (wire_s if wire_s > now_s else now_s) + occupied_s
            there_s[stage] = wire_s
            activations[stage + 1].append(wire_s + latency_s)

    for stage, count in enumerate(in_flight):
        for microbatch in range(min(count, num_microbatches)):
            forward(stage, microbatch)
    ahead = list(enumerate(in_flight))
    for microbatch in range(num_microbatches):
        ready_s = 0.0
        for stage in range(last, -1, -1):
            now_s = free_s[stage]
            now_s = (ready_s if ready_s > now_s else now_s) + backwards[stage]
            free_s[stage] = now_s
            if stage:
                wire_s = back_s[stage - 1]
                _, occupied_s, latency_s = links[stage - 1]
                wire_s = (wire_s if wire_s > now_s else now_s) + occupied_s
                back_s[stage - 1] = wire_s
                ready_s = wire_s + latency_s
        for stage, count in ahead:
            if microbatch + count < num_microbatches:
                forward(stage, microbatch + count)
    return max(free + stage.update_s for free, stage in zip(free_s, stages, strict=True))


def _played(costs: PipelineCosts, in_flight: Sequence[int], num_microbatches: int) -> float:
    """The same by events: transfers may meet on a wire."""
    count = len(costs.stages)
    pipe = prepare(costs, tuple(range(count)), num_microbatches, has_weight=False)
    orders = []
    for stage, held in enumerate(in_flight):
        forward, backward = stage * num_microbatches, (count + stage) * num_microbatches
        warm = min(held, num_microbatches) - 1
        orders.append(
            [
                *range(forward, forward + warm),
                *itertools.chain.from_iterable(
                    (
                        *([forward + warm + m] if warm + m < num_microbatches else []),
                        backward + m,
                    )
                    for m in range(num_microbatches)
                ),
            ]
        )
    played = play(pipe, orders)
    if played is None:
        raise AssertionError(f"in-flight counts {list(in_flight)} do not end")
    return played.makespan_s
