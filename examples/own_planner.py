"""Research: a planner of your own needs only numbers, and is judged by hetpass's own simulator.

Facts and cluster go in, a `Plan` comes out; the plan then compiles and runs like any other. The
planner here is random search over cuts and orders of groups, thirty tries of it.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import random

from mlp import cluster, example_arguments, train_step

import hetpass as hp
from hetpass.planner.evaluate import evaluate


def random_plan(facts, cluster, generator, num_microbatches):
    """Every group one stage, in some order, cut anywhere."""
    groups = generator.sample(cluster.groups, len(cluster.groups))
    cuts = sorted(generator.sample(range(1, facts.num_layers), len(groups) - 1))
    edges = [0, *cuts, facts.num_layers]
    text = " | ".join(
        f"{group.name}: {first}-{end - 1}"
        for group, first, end in zip(groups, edges, edges[1:], strict=False)
    )
    return hp.Plan.parse(
        text,
        cluster=cluster,
        num_layers=facts.num_layers,
        num_microbatches=num_microbatches,
    )


def main(tries=30):
    weights, batch = example_arguments()
    traced = train_step.trace(weights, batch)
    facts, generator = traced.facts, random.Random(0)
    plans = [random_plan(facts, cluster, generator, 4) for _ in range(tries)]
    judged = [evaluate(plan, facts, cluster) for plan in plans]
    best = min(judged, key=lambda evaluation: evaluation.step_s)
    print(best)
    print("hetpass finds", traced.plan().plan.predictions["step_s"])
    compiled = traced.with_plan(best.plan).compile()
    weights, loss = compiled(weights, batch)
    return best.step_s, float(loss)


if __name__ == "__main__":
    main()
