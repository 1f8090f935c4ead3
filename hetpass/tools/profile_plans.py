"""`hetpass plan --facts DIR`: a plan from measured layer seconds, without a program."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path

from hetpass.cost.layer_costs import ProfiledCosts
from hetpass.cost.network import LinkNetwork, MeasuredNetwork, Network
from hetpass.errors import ToolError
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.quantities import spelled
from hetpass.planner.mix import mix
from hetpass.planner.pipelines import Market, PlanPrice
from hetpass.tools.answer import Answer
from hetpass.tools.bundle import Bundle, save_bundle
from hetpass.tools.sorts import CLUSTER
from hetpass.tools.terminal import Terminal

NETWORK = "network.json"


def plan_from_profiles(arguments: Namespace, terminal: Terminal, out: Path | None) -> Answer:
    """The best plan of parallel pipelines for a model whose layers were measured.

    Bandwidths come from `network.json` in the folder, where it is there, else from the cluster.
    """
    if arguments.batch is None or arguments.step is None:
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            "a plan from measured layers needs a model and a batch size",
            where="--facts",
            ways_out=["hetpass plan OPT-350 --facts DIR --batch 1024 --cluster FILE"],
        )
    cluster = CLUSTER.load(arguments.cluster)
    facts = ProgramFacts.from_profiles(arguments.facts, arguments.step, arguments.batch)
    assert facts.profile is not None
    measured = Path(arguments.facts) / NETWORK
    network: Network = LinkNetwork(cluster)
    if measured.exists():
        network = MeasuredNetwork.read(measured)
    began = time.perf_counter()
    with terminal.working("planning"):
        found = mix(Market(ProfiledCosts(facts.profile), network, cluster, arguments.batch, True))
    seconds = time.perf_counter() - began
    bundle = Bundle(arguments.step, found.plan, facts, cluster)
    written = save_bundle(out, bundle) if out is not None else ()
    parts = [str(found.plan), _price_text(found.price), f"plan {seconds:.1f} s"]
    parts += [f"wrote {', '.join(map(str, written))}"] if written else []
    data = {
        "step": arguments.step,
        "seconds": {"plan": seconds},
        "layers": facts.num_layers,
        "step_s": found.price.step_s,
        "plan": json.loads(found.plan.to_json()),
        "rejected_s": [step_s for _, step_s in found.rejected],
        "written": [str(path) for path in written],
    }
    return Answer(parts, data)


def _price_text(price: PlanPrice) -> str:
    return (
        f"step {price.step_s:.4g} s by simulation: pipelines {price.compute_s:.4g} s, sum of "
        f"gradients {price.sync_s:.4g} s, update {price.update_s:.4g} s; "
        f"{spelled(price.peak_bytes, 'bytes')} on the fullest device"
    )
