"""What the solver's evaluator says of collectives is what is asked for, and what is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.assignments import MODEL_MESHES, chained_plan, evaluated_and_emitted
from benchmarks.models.layer_steps import moe
from hetpass.analysis.operation_graph import operation_graphs
from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.ir.devices import Link
from tests.backend.assigned_cases import draw, layered, trained


def tied_table(width=64, words=32):
    """A table that is looked up at the start and multiplied by at the end; norms whose scales are
    broadcast, indices whose batch is whole: what partition makes again in backward."""

    def loss(p, batch):
        x = p["table"][batch["x"]]
        for w in p["layers"]:
            scale = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            x = x + jnp.tanh((x * scale) @ w)
        logits = jnp.einsum("bsh,wh->bsw", x * p["g"], p["table"])
        return (jax.nn.logsumexp(logits, -1) - logits[..., 0]).mean()

    layers = [draw(k, width, width) for k in (1, 2)]
    params = {"table": draw(0, words, width), "g": jnp.ones(width), "layers": layers}
    return trained(loss, params, {"x": jnp.arange(16 * 8).reshape(16, 8) % words})


@pytest.mark.parametrize(("case", "mesh"), [(tied_table, "1x8"), (moe, "1x8")])
def test_the_evaluator_prices_what_is_emitted_and_compiled(case, mesh):
    axes = MODEL_MESHES[mesh]
    source = layered(case(), 2)
    links = (Link(1e-8, 5e10), Link(1e-8, 1e11))
    plan, priced = chained_plan(
        source, operation_graphs(source), LinkedMesh(axes, links[2 - len(axes) :])
    )
    assert sum(priced.values())
    found = evaluated_and_emitted(plan, source, priced)
    assert found["differ"] == {}
    assert found["compiled_differ"] == []
