from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpass.cost.analytic import Submesh
from hetpass.cost.submeshes import placed, submesh_sizes, submeshes
from hetpass.ir.catalogue import find_kind
from hetpass.ir.devices import DeviceGroup, Link

LINK = Link(0.0, 1.0)


def group(hosts, per_host):
    return DeviceGroup("g", find_kind("cpu"), hosts, per_host, LINK, LINK)


def test_every_count_of_one_host():
    for count in (1, 3, 5, 6, 8):
        assert submesh_sizes(group(1, count)) == tuple(range(1, count + 1))


def test_whole_hosts_and_their_parts():
    assert submesh_sizes(group(4, 8)) == (1, 2, 4, 8, 16, 24, 32)
    assert submesh_sizes(group(2, 6)) == (1, 2, 6, 12)
    assert submesh_sizes(group(2, 3)) == (1, 3, 6)
    assert submesh_sizes(group(4, 8), whole_hosts=True) == (8, 16, 24, 32)


def test_arrangements_divide_the_examples():
    assert submeshes(group(1, 8), 4, 8, 8) == [Submesh(4, 1), Submesh(2, 2), Submesh(1, 4)]
    assert submeshes(group(1, 8), 4, 2, 2) == [Submesh(2, 2)]
    assert submeshes(group(1, 8), 3, 8, 8) == []
    assert submeshes(group(2, 4), 8, 8, 8) == [Submesh(8, 1), Submesh(4, 2), Submesh(2, 4)]
    assert Submesh(2, 2).axes == (("data", 2), ("model", 2))
    assert Submesh(4).axes == (("data", 4),)


@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_parts_always_lie_side_by_side(hosts, per_host, data):
    cluster_group = group(hosts, per_host)
    sizes, left = [], hosts * per_host
    while True:
        legal = [n for n in submesh_sizes(cluster_group) if n <= left]
        size = data.draw(st.sampled_from([0, *legal]))
        if not size:
            break
        sizes.append(size)
        left -= size
    places = placed(cluster_group, sizes)
    used = [device for part in places for device in part]
    assert len(used) == len(set(used)) == sum(sizes)
    assert all(device < hosts * per_host for device in used)
    for size, part in zip(sizes, places, strict=True):
        assert len(part) == size
        if size < per_host:
            assert part[0] // per_host == part[-1] // per_host
        elif hosts > 1:
            assert part[0] % per_host == 0


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="do not fit"):
        placed(group(2, 3), [2, 2, 2])
