from __future__ import annotations

from hetpass.cost.logical_meshes import logical_meshes
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import DeviceGroup, Link
from hetpass.planner.intra_op.evaluate import evaluate
from hetpass.planner.intra_op.frontier import frontier
from hetpass.planner.intra_op.memory_sweep import pareto
from hetpass.planner.intra_op.program import program
from hetpass.planner.intra_op.setting import Setting
from tests.planner.intra_op.layer_graphs import mlp

GROUP = DeviceGroup("g", find_kind("A100-40"), 1, 4, Link(5e-6, 25e9))


def test_recomputation_and_meshes_are_among_the_choices():
    """Residuals of eight microbatches in flight: recomputed where memory is worth the time."""
    graph = mlp(1 << 14, 1024, 4, 4096)
    settings = [
        Setting(mesh, GROUP.kind, 8, 8, recompute)
        for mesh in logical_meshes(GROUP, 4)
        for recompute in (False, True)
    ]
    found = frontier(graph, settings)
    times = [offer.answer.seconds for offer in found]
    memories = [offer.answer.memory_bytes for offer in found]
    assert times == sorted(times)
    assert memories == sorted(memories, reverse=True)
    assert {offer.setting.recompute for offer in found} == {False, True}
    assert not found[0].setting.recompute
    assert found[-1].setting.recompute
    for offer in found:
        priced = evaluate(graph, offer.setting, offer.answer.assignment)
        assert priced.violations == ()
    for setting in settings:
        for answer in pareto(program(graph, setting)):
            assert any(
                offer.answer.seconds <= answer.seconds * (1 + 1e-9)
                and offer.answer.memory_bytes <= answer.memory_bytes * (1 + 1e-9)
                for offer in found
            )
