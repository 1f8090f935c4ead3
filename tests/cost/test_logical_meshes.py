from __future__ import annotations

import pytest

from hetpass.cost.logical_meshes import LinkedMesh, logical_meshes
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import DeviceGroup, Link

INSIDE, ACROSS = Link(1e-6, 1e11), Link(1e-5, 1e9)


def group(hosts, per_host):
    return DeviceGroup("g", find_kind("A100-40"), hosts, per_host, INSIDE, ACROSS)


def test_every_factorization_once_where_links_are_equal():
    assert [m.axes for m in logical_meshes(group(1, 8), 8)] == [
        (("data", 8),),
        (("data", 2), ("model", 4)),
    ]
    assert [m.axes for m in logical_meshes(group(1, 6), 6)] == [
        (("data", 6),),
        (("data", 2), ("model", 3)),
    ]
    assert [m.axes for m in logical_meshes(group(1, 1), 1)] == [(("data", 1),)]


def test_an_axis_that_leaves_the_host_shares_its_network():
    meshes = {m.axes: m for m in logical_meshes(group(2, 4), 8)}
    assert len(meshes) == 3
    two_by_four = meshes[("data", 2), ("model", 4)]
    assert two_by_four.links == (Link(1e-5, 1e9 / 4), INSIDE)
    four_by_two = meshes[("data", 4), ("model", 2)]
    assert four_by_two.links == (Link(1e-5, 1e9 / 2), INSIDE)
    assert meshes[(("data", 8),)].links == (ACROSS,)


def test_a_collective_over_two_axes_is_held_up_by_the_slower_link():
    mesh = LinkedMesh((("a", 2), ("b", 3)), (ACROSS, INSIDE))
    assert mesh.link(("a", "b")) == ACROSS
    assert mesh.link(("b",)) == INSIDE
    assert mesh.ways(("a", "b")) == mesh.devices == 6


def test_capabilities_are_of_the_kind():
    mesh = logical_meshes(group(1, 4), 4)[0]
    assert mesh.reduce_scatter
    assert mesh.merges_reductions
    plain = logical_meshes(DeviceGroup("c", find_kind("cpu"), 1, 4), 4)[0]
    assert not plain.reduce_scatter


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="as many"):
        LinkedMesh((("a", 2),), ())
    with pytest.raises(ValueError, match="different names"):
        LinkedMesh((("a", 2), ("a", 2)), (INSIDE, INSIDE))
