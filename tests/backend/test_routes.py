"""Routes bring every part to everyone who wants it, once over the slow link, evenly."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetpass.backend.pieces import elements, mesh_boxes
from hetpass.backend.routes import Side, naive_elements, route

SHAPE = (24, 48)
AXES = ({}, {"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 4, "b": 2})


def specs(axes):
    """Every way to cut two dimensions by these axes."""
    names = list(axes)
    ways = {((), ())}
    for chosen in itertools.product((0, 1, None), repeat=len(names)):
        for order in itertools.permutations(range(len(names))):
            cut = [[], []]
            for k in order:
                if chosen[k] is not None:
                    cut[chosen[k]].append(names[k])
            ways.add((tuple(cut[0]), tuple(cut[1])))
    return sorted(ways)


@st.composite
def sides(draw, first_place):
    axes = draw(st.sampled_from(AXES))
    boxes = mesh_boxes(draw(st.sampled_from(specs(axes))), axes, SHAPE)
    per_place = draw(st.sampled_from([1, 2, 3, 8]))
    return Side(boxes, tuple(first_place + i // per_place for i in range(len(boxes))))


@pytest.mark.parametrize("axes", AXES[1:])
def test_boxes_are_those_of_jax(axes):
    count = int(np.prod(list(axes.values())))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))
    for names in specs(axes):
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        indices = sharding.devices_indices_map(SHAPE)
        expected = [
            tuple(s.indices(n)[:2] for s, n in zip(indices[device], SHAPE, strict=True))
            for device in mesh.devices.flat
        ]
        assert list(mesh_boxes(names, axes, SHAPE)) == expected


@given(sides(0), sides(100))
def test_everyone_gets_all_of_its_boxes(source, target):
    for place in set(target.places):
        found = np.zeros(SHAPE, int)
        for parcel in route(source, target).parcels:
            if place in parcel.receivers:
                found[tuple(slice(*span) for span in parcel.box)] += 1
        for box, where in zip(target.boxes, target.places, strict=True):
            if where == place:
                assert (found[tuple(slice(*span) for span in box)] == 1).all()


@given(sides(0), sides(100))
def test_every_element_crosses_once(source, target):
    found = route(source, target)
    assert found.crossing_elements == elements(((0, SHAPE[0]), (0, SHAPE[1])))
    assert naive_elements(source, target) >= found.crossing_elements
    for parcel in found.parcels:
        held = source.boxes[parcel.source]
        assert source.places[parcel.source] == parcel.sender
        assert all(a <= c and d <= b for (a, b), (c, d) in zip(held, parcel.box, strict=True))
        assert len(set(parcel.receivers)) == len(parcel.receivers)


def test_a_copy_for_several_hosts_is_sent_once_and_passed_on():
    whole = ((0, 64), (0, 64))
    found = route(Side((whole,), (0,)), Side((whole,) * 4, (1, 1, 2, 3)))
    assert [elements(p.box) for p in found.parcels] == [64 * 64 // 3 // 64 * 64, 1344, 1408]
    assert sorted(p.receivers[0] for p in found.parcels) == [1, 2, 3]
    assert all(sorted(p.receivers) == [1, 2, 3] for p in found.parcels)
    assert found.passed_elements == 2 * 64 * 64


def test_copies_share_the_sending():
    whole = ((0, 64), (0, 64))
    rows = mesh_boxes([("a",)], {"a": 4}, (64, 64))
    found = route(Side((whole,) * 4, (0, 0, 1, 1)), Side(rows, (2,) * 4))
    sent = {place: sum(p.sender == place for p in found.parcels) for place in (0, 1)}
    assert sent == {0: 2, 1: 2}
    assert len({p.source for p in found.parcels}) == 4


def test_what_is_there_already_does_not_cross():
    rows = mesh_boxes([("a",)], {"a": 2}, (64, 64))
    found = route(Side(rows, (0, 1)), Side(rows[::-1], (1, 0)))
    assert found.crossing_elements == 0


def test_senders_begin_at_different_receivers():
    rows = mesh_boxes([("a",)], {"a": 2}, (64, 64))
    columns = mesh_boxes([(), ("a",)], {"a": 2}, (64, 64))
    found = route(Side(rows, (0, 1)), Side(columns, (2, 3)))
    first = {}
    for parcel in found.parcels:
        first.setdefault(parcel.sender, parcel.receivers[0])
    assert len(set(first.values())) == 2
