from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hetpass.cost.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from hetpass.cost.layouts import fits, layouts, ways, whole
from hetpass.cost.logical_meshes import LinkedMesh
from hetpass.cost.reshard import reshard_path, reshard_table
from hetpass.ir.devices import Link
from hetpass.ir.operation_graph import Layout, Value

SLOW, FAST = Link(1e-5, 1e9), Link(1e-6, 1e11)
MESH = LinkedMesh((("data", 2), ("model", 4)), (SLOW, FAST))
THREE = LinkedMesh((("x", 2), ("y", 2), ("z", 2)), (FAST, FAST, FAST))
LINE = LinkedMesh((("data", 8),), (FAST,))
ARRAY = Value((64, 32), 4)


def cut(*dims, partial=()):
    return Layout(tuple(tuple(d.split()) for d in dims), frozenset(partial))


def pieces(layout, shape, mesh):
    """Which part of an array every device has: per device, per dimension (first, last + 1)."""
    sizes = dict(mesh.axes)
    found = []
    for place in itertools.product(*(range(n) for _, n in mesh.axes)):
        where = dict(zip(mesh.names, place, strict=True))
        bounds = []
        for size, axes in zip(shape, layout.dims, strict=True):
            index, parts = 0, 1
            for axis in axes:
                index, parts = index * sizes[axis] + where[axis], parts * sizes[axis]
            bounds.append((size // parts * index, size // parts * (index + 1)))
        found.append(tuple(bounds))
    return found


@pytest.mark.parametrize("mesh", [MESH, THREE, LINE])
def test_every_step_of_every_pair_is_what_it_says(mesh):
    """Bytes and pieces on every device before and after each step follow from its kind."""
    known = layouts(ARRAY.shape, mesh.axes, ordered=False)
    for source, target in itertools.product(known, repeat=2):
        path = reshard_path(ARRAY, source, target, mesh)
        assert math.isfinite(path.seconds)
        assert len(path.steps) == 0 if source == target else len(path.steps) > 0
        before = source
        for step in path.steps:
            has = set(zip(range(8), pieces(before, ARRAY.shape, mesh), strict=True))
            gets = set(zip(range(8), pieces(step.after, ARRAY.shape, mesh), strict=True))
            assert step.result_bytes == ARRAY.size_bytes / ways(step.after, mesh.axes)
            ratio = ways(step.after, mesh.axes) / ways(before, mesh.axes)
            size = mesh.ways(step.axes)
            expected = {"slice": size, "all_gather": 1 / size, "all_to_all": 1, "permute": 1}
            assert ratio == expected[step.kind]
            if step.kind == "slice":
                assert all(
                    _inside(a, b) for (_, a), (_, b) in zip(sorted(gets), sorted(has), strict=True)
                )
            if step.kind == "permute":
                assert {part for _, part in has} == {part for _, part in gets}
            before = step.after
        assert before == target


def _inside(part, whole_part):
    return all(b[0] <= a[0] and a[1] <= b[1] for a, b in zip(part, whole_part, strict=True))


def test_the_number_of_layouts():
    """Of a matrix on two axes: 1 whole, 4 cut by one axis, 2 by one each way, 4 on one side."""
    assert len(layouts((64, 64), MESH.axes, ordered=False)) == 11
    assert len(layouts((64, 64), MESH.axes)) == 9
    assert layouts((64, 64), MESH.axes)[0] == whole(2)
    assert len(layouts((3, 64), MESH.axes)) == 4
    assert len(layouts((64,), LINE.axes, partial=True)) == 3


def test_closed_forms():
    size = ARRAY.size_bytes
    gathered = reshard_path(ARRAY, cut("data", ""), cut("", ""), LINE)
    assert gathered.seconds == pytest.approx(all_gather_s(size, 8, FAST))
    both = cut("", "", partial=("data", "model"))
    summed = reshard_path(ARRAY, both, cut("", ""), MESH)
    # Within the fast axis first: the slow one sees a quarter.
    fast, slow = 6 * FAST.seconds(size / 4), 2 * SLOW.seconds(size / 8)
    assert [(s.kind, s.axes) for s in summed.steps] == [("all_reduce", ("data", "model"))]
    assert summed.seconds == pytest.approx(fast + slow)
    scattered = reshard_path(ARRAY, cut("", "", partial=("model",)), cut("model", ""), MESH)
    assert scattered.seconds == pytest.approx(reduce_scatter_s(size, 4, FAST))
    assert [s.kind for s in scattered.steps] == ["reduce_scatter"]


def test_a_slow_axis_is_crossed_with_small_pieces():
    """Cut along the fast axis first: a quarter of the bytes then cross the slow one."""
    path = reshard_path(ARRAY, cut("data", ""), cut("", ""), MESH)
    assert [(s.kind, s.axes) for s in path.steps] == [
        ("slice", ("model",)),
        ("all_gather", ("data",)),
        ("all_gather", ("model",)),
    ]


def test_without_reduce_scatter_an_all_reduce_is_sliced():
    plain = LinkedMesh(MESH.axes, MESH.links, reduce_scatter=False)
    path = reshard_path(ARRAY, cut("", "", partial=("model",)), cut("model", ""), plain)
    assert [s.kind for s in path.steps] == ["all_reduce", "slice"]
    assert path.seconds == pytest.approx(all_reduce_s(ARRAY.size_bytes, 4, FAST))


def test_what_stays_partial_has_no_steps_of_its_own():
    two = cut("", "", partial=("data", "model"))
    kept = reshard_path(ARRAY, two, cut("", "", partial=("data",)), MESH)
    assert [(s.kind, s.axes) for s in kept.steps] == [("all_reduce", ("model",))]
    one = cut("", "", partial=("data",))
    assert reshard_path(ARRAY, one, cut("model", "", partial=("data",)), MESH).seconds == math.inf
    assert reshard_path(ARRAY, cut("", ""), one, MESH).seconds == math.inf


def test_paths_are_shortest_and_tables_agree():
    table = reshard_table(ARRAY.shape, ARRAY.item_bytes, MESH)
    for source, via, target in itertools.product(layouts(ARRAY.shape, MESH.axes), repeat=3):
        there = reshard_path(ARRAY, source, via, MESH).seconds
        onward = reshard_path(ARRAY, via, target, MESH).seconds
        direct = reshard_path(ARRAY, source, target, MESH).seconds
        assert direct <= there + onward + 1e-11
        assert np.isclose(table.seconds[table.index[source], table.index[target]], direct)


def test_layouts_that_do_not_fit():
    assert fits(cut("data model", ""), (8, 1), MESH.axes)
    assert not fits(cut("data", "data"), (8, 8), MESH.axes)
    assert not fits(cut("model", ""), (6, 8), MESH.axes)
    assert not fits(cut("other", ""), (8, 8), MESH.axes)
    assert not fits(cut("data"), (8, 8), MESH.axes)
