"""Dry runs: the whole way on virtual CPU devices in place of compile-only ones."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import hetpass as hp
from hetpass.backend import dryrun as dry
from hetpass.errors import ClusterError, PlanError
from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, Link

LINK = Link(1e-5, 1e9)
CLUSTER = Cluster(
    (
        DeviceGroup("h", find_kind("H100-80"), 1, 4, LINK),
        DeviceGroup("v", find_kind("V100-16"), 1, 2, LINK),
    ),
    default_link=LINK,
)


def step(params, x):
    def loss(p):
        h = x
        for w in p:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


@pytest.fixture
def cpus(monkeypatch):
    monkeypatch.setattr(dry, "compile_only_devices", lambda group, count: jax.devices()[:count])


def test_every_fragment_is_compiled_for_its_stage(cpus):
    found = planned_by_halves().dryrun()
    assert [stage.kind for stage in found.stages] == ["H100-80", "V100-16"]
    assert found.fits
    assert {f.role for stage in found.stages for f in stage.fragments} >= {"forward", "backward"}
    sums = [f.collectives for f in found.stages[0].fragments if f.role == "epilogue"]
    assert any("all-reduce" in found for found in sums)  # over the data axis, inside the group
    assert "fits" in str(found)


def planned_by_halves():
    probe = traced_step()
    last = probe.facts.num_layers - 1
    half = last // 2
    return probe.with_plan(f"h[2](data=2): 0-{half} | v[1]: {half + 1}-{last}", num_microbatches=4)


def test_the_fullest_moment_holds_more_than_any_program_takes(cpus):
    found = planned_by_halves().dryrun()
    parameters = 2 * 16 * 16 * 4  # half of the layers
    for stage in found.stages:
        assert stage.peak_bytes >= max(f.peak_bytes for f in stage.fragments)
        assert parameters < stage.peak_bytes < 20 * parameters


def test_more_microbatches_in_flight_hold_more(cpus):
    plan = planned_by_halves()
    staged = plan.traced.settings.passes.partition(plan.layered, plan.plan)
    peaks = [
        dry.dryrun(staged, plan.plan, CLUSTER, (count, 1)).stages[0].peak_bytes
        for count in (1, 2, 30)
    ]
    assert peaks[0] <= peaks[1] < peaks[2]


def test_a_stage_that_does_not_fit_is_named(cpus):
    fits = planned_by_halves().dryrun().stages[0]
    stage = replace(fits, peak_bytes=fits.limit_bytes + 1)
    assert not stage.fits
    assert "does not fit" in str(dry.DryRun((stage,), 1, 1))


def traced_step():
    return hp.het_parallelize(step, cluster=CLUSTER, num_microbatches=4).trace(
        [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 4,
        jax.ShapeDtypeStruct((16, 16), jnp.float32),
    )


def test_plans_that_do_not_fit_by_the_compilers_word_are_passed_over(monkeypatch):
    traced = traced_step()
    best = traced.plan()
    assert best.search is not None
    assert best.search.rejected
    asked = []

    def verdict(planned):
        asked.append(planned.plan)
        stage = dry.DryStage("h", "H100-80", (), (), 2 if len(asked) == 1 else 1, 1)
        return dry.DryRun((stage,), 1, 1)

    monkeypatch.setattr(type(best), "dryrun", verdict)
    found = traced.plan(dryrun=True)
    assert len(asked) == 2
    assert asked[0] == best.plan
    assert found.plan == asked[1] != best.plan


def test_where_no_plan_fits_the_fullest_stage_is_named(monkeypatch):
    traced = traced_step()
    stage = dry.DryStage("h", "H100-80", (), (), 2, 1)
    planned = type(traced.plan())
    monkeypatch.setattr(planned, "dryrun", lambda self: dry.DryRun((stage,), 1, 1))
    with pytest.raises(PlanError) as caught:
        traced.plan(dryrun=True)
    assert caught.value.code == "HP-PLAN-MEMORY"
    assert "H100-80 of h" in str(caught.value)


def test_what_cannot_be_compiled_for_is_refused():
    group = DeviceGroup("c", find_kind("cpu"), 1, 4, LINK)
    with pytest.raises(ClusterError) as caught:
        dry.compile_only_devices(group, 2)
    assert caught.value.code == "HP-TARGET-KIND"


def test_without_the_plugin_the_way_out_is_the_extra(monkeypatch):
    def missing(*args, **kwargs):
        raise NotImplementedError("no such platform")

    monkeypatch.setattr(dry.topologies, "get_topology_desc", missing)
    with pytest.raises(ClusterError) as caught:
        dry.compile_only_devices(CLUSTER.groups[0], 2)
    assert caught.value.code == "HP-TARGET-PLUGIN"
    assert any("dryrun-cuda12" in way for way in caught.value.ways_out)
